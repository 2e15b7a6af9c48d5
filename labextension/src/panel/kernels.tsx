// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** My kernels on this server: their slices, their use, and actions. */
import * as React from 'react';

import type { IDevice, ISession } from '../api';
import { duration } from '../keeping';
import { useAnswer } from '../toolbar/hooks';
import { truth } from '../toolbar/situation';
import {
  bytes,
  comesBack,
  dayAndTime,
  goesBack,
  goingBack,
  localTime,
  say
} from '../words';
import type { IKernelRow } from './arrange';
import { Badge, hue } from './section';
import { Sparkline } from './sparkline';
import { useTick } from '../ticker';
import { useHistory, useKeepSeconds, useTools, useUp } from './tools';

const HAS_SLICE: ReadonlySet<ISession['state']> = new Set([
  'attaching',
  'active',
  'idle'
]);

export const Kernels = React.memo(function Kernels(props: {
  readonly rows: readonly IKernelRow[];
  readonly elsewhere: readonly IKernelRow[];
  readonly devices: readonly IDevice[];
}): React.ReactElement {
  const { trans } = useTools();
  const { rows, elsewhere, devices } = props;
  return (
    <>
      {rows.length === 0 ? (
        <p className="jp-gpupool-plain">
          {trans.__('No kernel of this server is in the pool.')}
        </p>
      ) : (
        <ul className="jp-gpupool-list">
          {rows.map(row => (
            <Kernel key={row.session.id} row={row} devices={devices} />
          ))}
        </ul>
      )}
      {elsewhere.length > 0 && (
        <>
          <p className="jp-gpupool-plain">
            {trans.__(
              'You have these kernels on another server. Release or keep their slices there:'
            )}
          </p>
          <ul className="jp-gpupool-list">
            {elsewhere.map(row => (
              <li key={row.session.id} className="jp-gpupool-line">
                <Badge number={row.number} />
                <span className="jp-gpupool-grow">{row.name}</span>
                <StateWords row={row} devices={devices} />
              </li>
            ))}
          </ul>
        </>
      )}
    </>
  );
});

interface IKernelProps {
  readonly row: IKernelRow;
  readonly devices: readonly IDevice[];
}

const Kernel = React.memo(function Kernel(props: IKernelProps): React.ReactElement {
  const { trans, open, model } = useTools();
  const { session, name, path, number, active, closed } = props.row;
  const recall = session.recall_at ?? null;
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
        {closed && <span className="jp-gpupool-figure">{trans.__('tab closed')}</span>}
      </div>
      <StateWords {...props} />
      {goesBack(session) && (
        <div className="jp-gpupool-why">
          {goingBack(trans, session)} {trans.__('To cancel this, keep the slice.')}
        </div>
      )}
      {recall !== null && (
        <div className="jp-gpupool-why">
          {trans.__(
            'The administrator will take this kernel’s slice back at %1. Nothing is lost.',
            dayAndTime(trans, localTime(model, recall))
          )}
        </div>
      )}
      {session.preempted && (
        <div className="jp-gpupool-why">
          {trans.__(
            'The pool took this kernel’s slice while the kernel was working: %1',
            session.preempted
          )}
        </div>
      )}
      {session.state === 'detached' && session.taken_reason && (
        <div className="jp-gpupool-why">
          {trans.__(
            'The pool took this kernel’s slice while the kernel was idle: %1; %2.',
            session.taken_reason,
            comesBack(trans, session.attach)
          )}
        </div>
      )}
      {session.pinned_reason && (
        <div className="jp-gpupool-why">
          {trans.__(
            'The kernel’s state cannot leave the GPU: %1',
            session.pinned_reason
          )}
        </div>
      )}
      {session.state === 'idle' && session.stays_reason && (
        <div className="jp-gpupool-why">
          {trans.__('The kernel keeps its slice: %1', session.stays_reason)}
        </div>
      )}
      <Lines
        kernel={session.kernel_id}
        granted={session.granted_bytes}
        number={number}
      />
      <Actions session={session} name={name} />
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

/** The graphs of a kernel. They are drawn again only when a new history arrives. */
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
        name={trans.__('CUDA')}
        full={trans.__('Share of time in which the kernel used CUDA')}
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
  readonly session: ISession;
  readonly name: string;
}

function Actions(props: IActionsProps): React.ReactElement {
  const { trans, model, ticker, shutDown } = useTools();
  const seconds = useKeepSeconds();
  const { kernel_id: kernel, keep_until: until, state } = props.session;
  const kept = until !== null && until > model.now();
  const time = duration(trans, seconds ?? 0);
  // Render again when the slice is no longer kept.
  useTick(ticker, kept);
  const up = useUp();
  const {
    answer,
    busy,
    say: tell,
    run
  } = useAnswer(trans, truth(props.session, up), up);
  const leaving = goesBack(props.session);
  const none = trans.__('This kernel has no slice of a GPU now.');
  const nothing = !HAS_SLICE.has(state)
    ? none
    : leaving
      ? goingBack(trans, props.session)
      : '';
  // The buttons are not `disabled`, because a disabled button loses the focus. A
  // keyboard user must move the focus to a button to read why it does nothing.
  return (
    <>
      <div className="jp-gpupool-actions">
        <button
          type="button"
          className="jp-gpupool-button"
          aria-disabled={busy || nothing !== ''}
          aria-label={trans.__('Release the slice of %1', props.name)}
          title={nothing || undefined}
          onClick={() => {
            if (nothing) {
              tell({ text: nothing, refused: false });
            } else {
              void run(() => model.client.release(kernel));
            }
          }}
        >
          {trans.__('Release')}
        </button>
        {(kept || seconds !== null) && (
          <button
            type="button"
            className="jp-gpupool-button"
            aria-disabled={busy || (!kept && !HAS_SLICE.has(state))}
            title={kept || HAS_SLICE.has(state) ? undefined : none}
            aria-label={
              kept
                ? trans.__('Stop keeping the slice of %1', props.name)
                : trans.__('Keep for %1 the slice of %2', time, props.name)
            }
            onClick={() => {
              if (!kept && !HAS_SLICE.has(state)) {
                tell({ text: none, refused: false });
              } else {
                void run(() => model.client.keep(kernel, kept ? 0 : (seconds ?? 0)));
              }
            }}
          >
            {kept ? trans.__('Stop keeping') : trans.__('Keep for %1', time)}
          </button>
        )}
        <button
          type="button"
          className="jp-gpupool-button"
          aria-disabled={busy}
          aria-label={trans.__('Shut down the kernel of %1', props.name)}
          onClick={() => void run(() => shutDown(kernel, props.name))}
        >
          {trans.__('Shut down…')}
        </button>
      </div>
      {kept && (
        <p className="jp-gpupool-plain">
          {trans.__(
            'The slice is kept until %1, even while the kernel is idle.',
            dayAndTime(trans, localTime(model, until))
          )}
        </p>
      )}
      <div
        role="status"
        className={`jp-gpupool-result${answer?.refused ? ' jp-mod-bad' : ''}`}
      >
        {answer?.text}
      </div>
    </>
  );
}
