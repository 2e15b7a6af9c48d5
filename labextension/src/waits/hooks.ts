// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** The broker's plan for a kernel, fetched again when it may have changed. */
import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import type { IExplanation, ISession, PoolClient } from '../api';
import { refusal } from '../tell';

/**
 * Milliseconds after which the page fetches the plan again, because the times in the
 * plan become old.
 */
export const AGAIN = 10_000;

export interface IPlan {
  /** Null until the first answer. */
  readonly found: IExplanation | null;
  /** Why the plan could not be updated; empty if it is up to date. */
  readonly fault: string;
}

/**
 * Fetches the plan, and fetches it again every `AGAIN` milliseconds and when the
 * session changes. Also fetches it again when `queueLength` changes, because other
 * kernels may need the slice now.
 */
export function usePlan(
  trans: TranslationBundle,
  client: Pick<PoolClient, 'why'>,
  kernelId: string,
  session: ISession,
  queueLength: number
): IPlan {
  const [found, setFound] = React.useState<IExplanation | null>(null);
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
      answer => {
        if (wanted) {
          setFound(answer);
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
    session.request.memory,
    position,
    reason,
    until,
    queueLength,
    round
  ]);
  return { found, fault };
}
