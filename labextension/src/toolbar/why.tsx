// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Why a kernel waits, and behind which ones; fetched again when its place changes. */
import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import type { ISession, IWait, PoolClient } from '../api';
import { refusal } from '../tell';
import { describeWait } from '../words';

interface IProps {
  readonly trans: TranslationBundle;
  readonly client: PoolClient;
  readonly kernelId: string;
  readonly session: ISession;
  /** The length of the pool's queue: if it changes, others may be ahead. */
  readonly queueLength: number;
}

export function Why(props: IProps): React.JSX.Element {
  const { trans, client, kernelId, session, queueLength } = props;
  const [wait, setWait] = React.useState<IWait | null>(null);
  const [fault, setFault] = React.useState('');
  const { queue_position: position, wait_reason: reason, eta_seconds: eta } = session;
  React.useEffect(() => {
    let wanted = true;
    client.wait(kernelId).then(
      found => {
        if (wanted) {
          setWait(found);
          setFault('');
        }
      },
      (error: unknown) => {
        if (wanted) {
          setFault(refusal(trans, error));
        }
      }
    );
    return () => {
      wanted = false;
    };
  }, [client, trans, kernelId, session.id, position, reason, queueLength]);
  const id = React.useId();
  // Only the counts ahead are used: the rest is newer in the session.
  const lines =
    wait && position !== null
      ? describeWait(trans, { ...wait, position, reason, eta_seconds: eta })
      : [];
  return (
    <section className="jp-gpupool-Popover-why" aria-labelledby={id}>
      <h3 id={id} className="jp-gpupool-Popover-title">
        {trans.__('Why am I waiting?')}
      </h3>
      {lines.map(line => (
        <p key={line}>{line}</p>
      ))}
      {fault ? <p className="jp-mod-refused">{fault}</p> : null}
      <p className="jp-gpupool-Popover-note">
        {trans.__('Interrupt the kernel to stop waiting.')}
      </p>
    </section>
  );
}
