// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** My kernels on this server: what they have, what they used of it, and what can be done. */
import * as React from 'react';

import type { IDevice, State } from '../api';
import { PoolError } from '../api';
import { bytes, say } from '../words';
import type { IKernelRow } from './arrange';
import { Badge, hue } from './section';
import { Sparkline } from './sparkline';
import { useTick } from '../ticker';
import { useHistory, useTools } from './tools';

/** Seconds for which the button keeps a slice. */
export const KEEP = 600;

const HAS_SLICE: ReadonlySet<State> = new Set(['attaching', 'active', 'idle']);

export const Kernels = React.memo(function Kernels(props: {
  readonly rows: readonly IKernelRow[];
  readonly devices: readonly IDevice[];
}): React.ReactElement {
  const { trans } = useTools();
  if (props.rows.length === 0) {
    return (
      <p className="jp-gpupool-plain">
        {trans.__('No kernel of this server is in the pool.')}
      </p>
    );
  }
  return (
    <ul className="jp-gpupool-list">
      {props.rows.map(row => (
        <Kernel key={row.session.id} row={row} devices={props.devices} />
      ))}
    </ul>
  );
});

interface IKernelProps {
  readonly row: IKernelRow;
  readonly devices: readonly IDevice[];
}

const Kernel = React.memo(function Kernel(props: IKernelProps): React.ReactElement {
  const { trans, open } = useTools();
  const { session, name, path, number, active } = props.row;
  return (
    <li className={`jp-gpupool-kernel${active ? ' jp-mod-front' : ''}`}>
      <div className="jp-gpupool-line">
        <Badge number={number} />
        {path ? (
          <button
            type="button"
            className="jp-gpupool-link"
            title={path}
            aria-current={active || undefined}
            onClick={() => open(session.kernel_id)}
          >
            {name}
          </button>
        ) : (
          <span className="jp-gpupool-grow jp-gpupool-strong">{name}</span>
        )}
      </div>
      <StateWords {...props} />
      {session.pinned_reason && (
        <div className="jp-gpupool-why">
          {trans.__('Pinned: %1', session.pinned_reason)}
        </div>
      )}
      <Lines
        kernel={session.kernel_id}
        granted={session.granted_bytes}
        number={number}
      />
      <Actions kernel={session.kernel_id} name={name} state={session.state} />
    </li>
  );
});

function StateWords(props: IKernelProps): React.ReactElement {
  const { trans, model, ticker } = useTools();
  const said = say(trans, props.row.session, props.devices, model.now());
  useTick(ticker, said.counts);
  return <div className={`jp-gpupool-state jp-mod-${said.tone}`}>{said.text}</div>;
}

interface ILinesProps {
  readonly kernel: string;
  readonly granted: number;
  readonly number: number;
}

/** Drawn again when there is another history, not when the pool changes. */
const Lines = React.memo(function Lines(props: ILinesProps): React.ReactElement | null {
  const { trans } = useTools();
  const history = useHistory();
  const of = history?.kernels[props.kernel];
  if (!history || !of) {
    return null;
  }
  return (
    <div className={hue(props.number)}>
      <Sparkline
        name={trans.__('Memory')}
        time={of.time}
        values={of.used}
        now={history.now}
        top={props.granted}
        say={bytes}
      />
      <Sparkline
        name={trans.__('Busy')}
        time={of.time}
        values={of.busy}
        now={history.now}
        top={1}
        say={value => trans.__('%1 %', Math.round(value * 100))}
      />
    </div>
  );
});

interface IActionsProps {
  readonly kernel: string;
  readonly name: string;
  readonly state: State;
}

function Actions(props: IActionsProps): React.ReactElement {
  const { trans, model } = useTools();
  const [asking, setAsking] = React.useState(false);
  const [result, setResult] = React.useState<{ text: string; bad: boolean } | null>(
    null
  );
  const has = HAS_SLICE.has(props.state);
  const can = has && !asking;
  // What was answered is about the state in which it was asked; a refusal waits to be read.
  React.useEffect(() => setResult(old => (old?.bad ? old : null)), [props.state]);
  const ask = (what: () => Promise<{ readonly note: string }>): void => {
    if (!can) {
      return;
    }
    setAsking(true);
    setResult(null);
    what()
      .then(answer => setResult({ text: answer.note, bad: false }))
      .catch((error: unknown) => setResult({ text: reason(error), bad: true }))
      .finally(() => setAsking(false));
  };
  const why = has ? undefined : trans.__('This kernel has no slice of a GPU now.');
  // Not `disabled`: a button that goes away under the finger takes the focus with it.
  return (
    <>
      <div className="jp-gpupool-actions">
        <button
          type="button"
          className="jp-gpupool-button"
          aria-disabled={!can}
          aria-label={trans.__('Release the slice of %1', props.name)}
          title={why}
          onClick={() => ask(() => model.client.release(props.kernel))}
        >
          {trans.__('Release')}
        </button>
        <button
          type="button"
          className="jp-gpupool-button"
          aria-disabled={!can}
          aria-label={trans.__('Keep for 10 min the slice of %1', props.name)}
          title={why}
          onClick={() => ask(() => model.client.keep(props.kernel, KEEP))}
        >
          {trans.__('Keep for 10 min')}
        </button>
      </div>
      <div
        role="status"
        className={`jp-gpupool-result${result?.bad ? ' jp-mod-bad' : ''}`}
      >
        {result?.text}
      </div>
    </>
  );
}

function reason(error: unknown): string {
  if (error instanceof PoolError) {
    return [error.message, error.nextStep].filter(Boolean).join(' ');
  }
  return error instanceof Error ? error.message : String(error);
}
