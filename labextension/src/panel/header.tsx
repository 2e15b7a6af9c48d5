// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** The state of the pool in one sentence, and its errors. */
import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import type { IPool } from '../api';
import type { IBroker, IPoolModel } from '../tokens';
import { noBroker } from '../tell';
import { Marked } from '../toolbar/answer';
import { dayAndTime, localTime } from '../words';
import { inShort } from './describe';
import { useTools } from './tools';

export interface IHeaderProps {
  readonly view: IPool | null;
  readonly broker: IBroker;
  readonly live: boolean;
  readonly found: IPoolModel['found'];
  readonly having: number;
  readonly waiting: number;
}

export function Header(props: IHeaderProps): React.ReactElement {
  const { trans, model } = useTools();
  const { view, broker, live } = props;
  const empty = view ? view.devices.length === 0 : !props.found.found;
  // On a machine without a GPU no broker starts. So report the missing GPU, and not the
  // absent broker.
  const gone = broker.status === 'away' && !(empty && view === null && !broker.denied);
  // While no pooled kernel runs, an absent broker is normal: a broker ends when no
  // kernel needs it.
  const asleep = gone && !live && noBroker(broker.code);
  const away = gone && !asleep;
  return (
    <div className="jp-gpupool-header">
      <h2>{trans.__('GPU Pool')}</h2>
      {view?.emulated && <Emulated trans={trans} />}
      <Links />
      {away && <Away broker={broker} live={live} />}
      {asleep && (
        <p className="jp-gpupool-plain" role="status">
          {trans.__('The pool starts when the first Pooled GPU kernel starts.')}
        </p>
      )}
      {empty && !away && <NoDevice view={view} found={props.found} />}
      {!empty && view && !asleep && (
        <p className="jp-gpupool-sentence">
          {inShort(trans, view.devices.length, props.having, props.waiting)}
        </p>
      )}
      {!empty && !view && !gone && (
        <p className="jp-gpupool-sentence">{trans.__('Asking the pool…')}</p>
      )}
      {view && (gone || !live) && (
        <p className="jp-gpupool-plain">
          {trans.__('Last update: %1.', dayAndTime(trans, localTime(model, view.now)))}
        </p>
      )}
      {!live && (
        <p className="jp-gpupool-plain">
          {trans.__('No Pooled GPU kernel is open.')} <Refresh />
        </p>
      )}
    </div>
  );
}

export function Emulated(props: {
  readonly trans: TranslationBundle;
}): React.ReactElement {
  const { trans } = props;
  return (
    <span
      className="jp-gpupool-emulated"
      title={trans.__(
        'These GPUs are emulated in host memory. All other parts of the pool are real.'
      )}
    >
      {trans.__('EMULATED')}
    </span>
  );
}

/**
 * Why the pool is away. Screen readers announce this text only while no kernel runs.
 * While a kernel runs, the chip in the toolbar announces it.
 */
function Away(props: {
  readonly broker: IBroker;
  readonly live: boolean;
}): React.ReactElement {
  const { trans } = useTools();
  return (
    <div className="jp-gpupool-alert" role={props.live ? undefined : 'status'}>
      <strong>
        {props.broker.denied
          ? trans.__('No access to the GPU pool')
          : trans.__('No answer from the GPU pool')}
      </strong>
      {[props.broker.message, props.broker.nextStep].filter(Boolean).map(line => (
        <p key={line}>
          <Marked line={line} />
        </p>
      ))}
      {props.live && <p>{trans.__('This panel tries again by itself.')}</p>}
    </div>
  );
}

function NoDevice(props: {
  readonly view: IPool | null;
  readonly found: IPoolModel['found'];
}): React.ReactElement {
  const { trans } = useTools();
  const reason = props.view?.problem || props.found.reason;
  // If this server runs kernels on other machines, these kernels do have a GPU. So the
  // text says that only this machine has none.
  const remote = Object.keys(props.view?.remote_kernels ?? {}).length > 0;
  return (
    <div className="jp-gpupool-empty">
      <strong>
        {remote ? trans.__('No GPU on this machine') : trans.__('No GPU found')}
      </strong>
      {reason && (
        <p>
          <Marked line={reason} />
        </p>
      )}
      <p>
        {remote
          ? trans.__(
              'Your pooled kernels run on other machines and use the GPUs there.'
            )
          : trans.__(
              'Kernels of the pool cannot start on this machine, but other kernels can.'
            )}
      </p>
    </div>
  );
}

function Refresh(): React.ReactElement {
  const { trans, model } = useTools();
  const [asking, setAsking] = React.useState(false);
  return (
    <button
      type="button"
      className="jp-gpupool-button"
      aria-disabled={asking}
      onClick={() => {
        if (!asking) {
          setAsking(true);
          void model.refresh().finally(() => setAsking(false));
        }
      }}
    >
      {asking ? trans.__('Asking…') : trans.__('Refresh')}
    </button>
  );
}

/** Links to the panel in a tab, and to the page of admins. */
function Links(): React.ReactElement | null {
  const { links } = useTools();
  const found = links();
  return found.length === 0 ? null : (
    <span className="jp-gpupool-links">
      {found.map(link => (
        <button
          key={link.label}
          type="button"
          className="jp-gpupool-button"
          onClick={link.go}
        >
          {link.label}
        </button>
      ))}
    </span>
  );
}
