// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Buttons that release the slice, or keep it while the kernel is idle. */
import type { Kernel } from '@jupyterlab/services';
import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import type { ISession } from '../api';
import type { IPoolModel } from '../tokens';
import { attachNow } from '../attach';
import { duration, keepSeconds } from '../keeping';
import { dayAndTime, goesBack, goingBack, localTime } from '../words';
import { Answer } from './answer';
import { useAnswer } from './hooks';
import { hasSlice, truth } from './situation';

/** `setTimeout` accepts at most this many milliseconds. */
const LONG = 2 ** 31 - 1;

interface IProps {
  readonly trans: TranslationBundle;
  readonly model: IPoolModel;
  readonly kernelId: string;
  readonly session: ISession;
  readonly keepMinutes: number;
  /** The page's connection to the kernel; null if there is none. */
  readonly kernel: Kernel.IKernelConnection | null;
}

export function Actions(props: IProps): React.JSX.Element {
  const { trans, model, kernelId, session, keepMinutes } = props;
  const up = model.broker.status === 'up';
  const { answer, busy, say, run } = useAnswer(trans, truth(session, up), up);
  const leaving = goesBack(session);
  const nothing = hasSlice(session)
    ? leaving
      ? goingBack(trans, session)
      : ''
    : session.state === 'queued'
      ? trans.__('The kernel waits for a slice and has none to give back.')
      : trans.__('The kernel has no slice to give back.');
  const until = session.keep_until;
  const has = hasSlice(session) && session.state !== 'detaching';
  const kept = useUntil(until, model) && has;
  const seconds = keepSeconds(keepMinutes, model.view);
  // Show no note: the new state already says that the slice is kept.
  const keep = (time: number) =>
    run(async () => {
      await model.client.keep(kernelId, time);
      return { note: '' };
    });
  return (
    <div className="jp-gpupool-Popover-actions">
      {session.state === 'detached' && props.kernel ? (
        <GetNow trans={trans} kernel={props.kernel} up={up} />
      ) : null}
      <div className="jp-gpupool-Popover-row">
        <button
          type="button"
          className="jp-gpupool-Popover-button"
          aria-disabled={busy || nothing !== ''}
          title={nothing || undefined}
          onClick={() => {
            // The button is not `disabled`, so that it can get the focus and say why it
            // does nothing.
            if (nothing) {
              say({ refused: false, text: nothing });
            } else {
              void run(() => model.client.release(kernelId));
            }
          }}
        >
          {trans.__('Release now')}
        </button>
        {has && (kept || seconds !== null) ? (
          <button
            type="button"
            className="jp-gpupool-Popover-button"
            aria-disabled={busy}
            onClick={() => void keep(kept ? 0 : (seconds ?? 0))}
          >
            {kept
              ? trans.__('Stop keeping')
              : trans.__('Keep for %1', duration(trans, seconds ?? 0))}
          </button>
        ) : null}
      </div>
      {kept && until !== null ? (
        <p className="jp-gpupool-Popover-note" role="status">
          {trans.__(
            'The slice is kept until %1, even while the kernel is idle.',
            dayAndTime(trans, localTime(model, until))
          )}
        </p>
      ) : null}
      {leaving ? (
        <p className="jp-gpupool-Popover-note">
          {goingBack(trans, session)} {trans.__('To cancel this, keep the slice.')}
        </p>
      ) : null}
      <Answer answer={answer} />
    </div>
  );
}

/**
 * The button "Get a GPU now". It has its own `useAnswer`, so that the other buttons
 * work while the kernel waits for its slice.
 */
function GetNow(props: {
  readonly trans: TranslationBundle;
  readonly kernel: Kernel.IKernelConnection;
  readonly up: boolean;
}): React.JSX.Element {
  const { trans, kernel, up } = props;
  const { answer, busy, run } = useAnswer(trans, String(up), up);
  return (
    <>
      <div className="jp-gpupool-Popover-row">
        <button
          type="button"
          className="jp-gpupool-Popover-button"
          aria-disabled={busy}
          onClick={() => void run(() => attachNow(trans, kernel))}
        >
          {busy ? trans.__('Getting a GPU…') : trans.__('Get a GPU now')}
        </button>
      </div>
      <Answer answer={answer} />
    </>
  );
}

/**
 * Return whether `time`, on the broker's clock, is in the future. When that time comes,
 * the component renders again.
 */
function useUntil(time: number | null, model: Pick<IPoolModel, 'now'>): boolean {
  const [looks, again] = React.useReducer((count: number) => count + 1, 0);
  const left = time === null ? 0 : time - model.now();
  React.useEffect(() => {
    if (time === null || time <= model.now()) {
      return undefined;
    }
    const timer = setTimeout(again, Math.min((time - model.now()) * 1000 + 50, LONG));
    return () => clearTimeout(timer);
  }, [time, model, looks]);
  return left > 0;
}
