// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Why a kernel waits, or who may take its slice: the broker's lines, fetched when they change. */
import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import type { ISession, PoolClient } from '../api';
import { refusal } from '../tell';

/** Milliseconds after which the lines are fetched again: they have times in them. */
export const AGAIN = 10_000;

interface IProps {
  readonly trans: TranslationBundle;
  readonly client: PoolClient;
  readonly kernelId: string;
  readonly session: ISession;
  /** The length of the pool's queue: if it changes, other kernels may need this slice. */
  readonly queueLength: number;
}

export function Why(props: IProps): React.JSX.Element {
  const { trans, client, kernelId, session, queueLength } = props;
  const [lines, setLines] = React.useState<readonly string[]>([]);
  const [fault, setFault] = React.useState('');
  const [round, setRound] = React.useState(0);
  React.useEffect(() => {
    const timer = setInterval(() => setRound(number => number + 1), AGAIN);
    return () => clearInterval(timer);
  }, []);
  const { state, queue_position: position, wait_reason: reason } = session;
  const until = session.expected?.until ?? null;
  React.useEffect(() => {
    let wanted = true;
    client.why(kernelId).then(
      found => {
        if (wanted) {
          setLines(found.lines);
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
  }, [
    client,
    trans,
    kernelId,
    session.id,
    state,
    session.granted_bytes,
    position,
    reason,
    until,
    queueLength,
    round
  ]);
  const id = React.useId();
  const waits = state === 'queued';
  return (
    <section className="jp-gpupool-Popover-why" aria-labelledby={id}>
      <h3 id={id} className="jp-gpupool-Popover-title">
        {waits ? trans.__('Why am I waiting?') : trans.__('Who may take this slice?')}
      </h3>
      {lines.map((line, i) => (
        <p key={i}>{line}</p>
      ))}
      {fault ? <p className="jp-mod-refused">{fault}</p> : null}
      {waits ? (
        <p className="jp-gpupool-Popover-note">
          {trans.__('Interrupt the kernel to stop waiting.')}
        </p>
      ) : null}
    </section>
  );
}

/** Guarantees, shares and daily budgets of the user and its groups, in the broker's lines. */
export function Standing(props: {
  readonly trans: TranslationBundle;
  readonly lines: readonly string[];
}): React.JSX.Element {
  const id = React.useId();
  return (
    <section className="jp-gpupool-Popover-why" aria-labelledby={id}>
      <h3 id={id} className="jp-gpupool-Popover-title">
        {props.trans.__('My share')}
      </h3>
      {props.lines.map((line, i) => (
        <p key={i}>{line}</p>
      ))}
    </section>
  );
}
