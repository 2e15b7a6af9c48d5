// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Give the slice back, or keep it although idle. */
import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import type { ISession } from '../api';
import type { IPoolModel } from '../tokens';
import { localTime, timeOfDay } from '../words';
import { Answer } from './answer';
import { useAnswer } from './hooks';
import { hasSlice } from './situation';

/** Milliseconds in which a sentence is read. */
const READ = 5000;

/** Milliseconds that timers can count. */
const LONG = 2 ** 31 - 1;

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
  // What was answered about another state is soon no longer true; a refusal waits to be read.
  const latest = React.useRef(answer);
  latest.current = answer;
  React.useEffect(() => {
    const before = latest.current;
    if (before === null || before.refused) {
      return undefined;
    }
    const timer = setTimeout(() => say(now => (now === before ? null : now)), READ);
    return () => clearTimeout(timer);
  }, [session.state, say]);
  const nothing = hasSlice(session)
    ? ''
    : session.state === 'queued'
      ? trans.__('The kernel waits for a slice and has none to give back.')
      : trans.__('The kernel has no slice to give back.');
  const until = session.keep_until;
  const kept = useUntil(until, model);
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
      {kept && until !== null ? (
        <p className="jp-gpupool-Popover-note">
          {trans.__(
            'Kept until %1, even when idle.',
            timeOfDay(trans, localTime(model, until))
          )}
        </p>
      ) : null}
      <Answer answer={answer} />
    </div>
  );
}

/** Whether a time of the broker's is to come; renders again when it has. */
function useUntil(time: number | null, model: Pick<IPoolModel, 'now'>): boolean {
  const [, again] = React.useReducer((count: number) => count + 1, 0);
  const left = time === null ? 0 : time - model.now();
  React.useEffect(() => {
    if (time === null || time <= model.now()) {
      return undefined;
    }
    const timer = setTimeout(again, Math.min((time - model.now()) * 1000 + 50, LONG));
    return () => clearTimeout(timer);
  }, [time, model]);
  return left > 0;
}
