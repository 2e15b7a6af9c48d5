// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Give the slice back, or keep it although idle. */
import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import type { ISession } from '../api';
import type { IPoolModel } from '../tokens';
import { Answer } from './answer';
import { useAnswer } from './hooks';
import { hasSlice } from './situation';

interface IProps {
  readonly trans: TranslationBundle;
  readonly model: IPoolModel;
  readonly kernelId: string;
  readonly session: ISession;
  readonly keepMinutes: number;
}

export function Actions(props: IProps): React.JSX.Element {
  const { trans, model, kernelId, session, keepMinutes } = props;
  const { answer, busy, say, run } = useAnswer();
  // What was answered about another state is no longer true.
  React.useEffect(() => say(null), [session.state, say]);
  const nothing = hasSlice(session)
    ? ''
    : session.state === 'queued'
      ? trans.__('The kernel waits for a slice and has none to give back.')
      : trans.__('The kernel has no slice to give back.');
  const kept = session.keep_until !== null && session.keep_until > model.now();
  const keep = (seconds: number) => run(() => model.client.keep(kernelId, seconds));
  return (
    <div className="jp-gpupool-Popover-actions">
      <div className="jp-gpupool-Popover-row">
        <button
          type="button"
          className="jp-gpupool-Popover-button"
          aria-disabled={busy || nothing !== ''}
          title={nothing || undefined}
          onClick={() => {
            // It is not `disabled`, so that it can be reached and says why.
            if (nothing) {
              say({ refused: false, text: nothing });
            } else {
              void run(() => model.client.release(kernelId));
            }
          }}
        >
          {trans.__('Release now')}
        </button>
        <button
          type="button"
          className="jp-gpupool-Popover-button"
          aria-disabled={busy}
          onClick={() => void keep(kept ? 0 : keepMinutes * 60)}
        >
          {kept
            ? trans.__('Stop keeping')
            : trans._n('Keep for %1 minute', 'Keep for %1 minutes', keepMinutes)}
        </button>
      </div>
      {kept ? (
        <p className="jp-gpupool-Popover-note">
          {trans.__(
            'Kept until %1, even when idle.',
            timeOfDay(session.keep_until - model.now())
          )}
        </p>
      ) : null}
      <Answer answer={answer} />
    </div>
  );
}

/** The time on this machine's clock in so many seconds: the broker's may differ. */
function timeOfDay(seconds: number): string {
  return new Date(Date.now() + seconds * 1000).toLocaleTimeString([], {
    hour: '2-digit',
    minute: '2-digit'
  });
}
