// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** What the user can do while a kernel waits: in its cell, in the popover and in the panel. */
import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import type { IExplanation, ISession } from '../api';
import { isMine, type IPoolModel } from '../tokens';
import { Answer } from '../toolbar/answer';
import { useAnswer } from '../toolbar/hooks';
import { truth } from '../toolbar/situation';
import { bytes, goesBack } from '../words';
import { StartNotices } from './notices';

/** The page lists at most this many of the user's other kernels with their slices. */
const MOST_NAMED = 3;

interface IProps {
  readonly trans: TranslationBundle;
  readonly model: IPoolModel;
  /** A session that waits. */
  readonly session: ISession;
  /** The broker's plan for the session; null until it is known. */
  readonly plan: IExplanation | null;
  /**
   * The kernel's name. If several kernels wait, the labels for screen readers contain
   * this name.
   */
  readonly name?: string;
}

export function WaitActions(props: IProps): React.JSX.Element {
  const { trans, model, session, plan, name = '' } = props;
  const { client } = model;
  const { kernel_id: kernelId } = session;
  const up = model.broker.status === 'up';
  const { answer, busy, run } = useAnswer(trans, truth(session, up), up);
  const notices = StartNotices.of(model, trans);
  const told = React.useSyncExternalStore(
    React.useCallback(
      (update: () => void) => {
        notices.changed.connect(update);
        return () => notices.changed.disconnect(update);
      },
      [notices]
    ),
    () => notices.wanted(kernelId)
  );
  const size = plan?.starts_with_bytes ?? null;
  const button = (
    text: string,
    action: () => Promise<{ readonly note: string }>,
    more: { readonly main?: boolean; readonly label?: string } = {}
  ) => (
    <button
      type="button"
      className={`jp-gpupool-Popover-button ${more.main ? 'jp-mod-main' : ''}`}
      aria-disabled={busy}
      aria-label={more.label ?? (name ? trans.__('%1: %2', text, name) : undefined)}
      onClick={() => void run(action)}
    >
      {text}
    </button>
  );
  return (
    <div
      className="jp-gpupool-Wait-actions"
      role="group"
      aria-label={
        name ? trans.__('What you can do for %1', name) : trans.__('What you can do')
      }
      // Enter and Space press these buttons; the notebook must not get the keys.
      data-lm-suppress-shortcuts="true"
    >
      <div className="jp-gpupool-Popover-row">
        {size === null
          ? null
          : button(
              session.request.devices > 1
                ? trans.__('Start now with %1 on each GPU', bytes(size))
                : trans.__('Start now with %1', bytes(size)),
              async () => {
                const { note } = await client.change(kernelId, { memory: size });
                return { note };
              },
              { main: true }
            )}
        {session.here
          ? button(trans.__('Stop waiting'), async () => {
              await client.interrupt(kernelId);
              return { note: trans.__('The kernel is interrupted.') };
            })
          : null}
        {told
          ? null
          : button(trans.__('Tell me when it starts'), async () => ({
              note: await notices.want(kernelId, session.label)
            }))}
      </div>
      {told ? (
        <p className="jp-gpupool-Popover-note">
          {trans.__('You will get a notice when it starts.')}
        </p>
      ) : null}
      {own(model, plan).map(([held, holder]) => {
        const leaves: boolean = goesBack(holder);
        return (
          <div key={holder.id} className="jp-gpupool-Popover-row">
            <span>
              {leaves
                ? trans.__(
                    '%1 (yours) gives %2 back when its work on the GPU is done.',
                    holder.label,
                    bytes(held)
                  )
                : trans.__('%1 (yours) holds %2', holder.label, bytes(held))}
            </span>
            {leaves
              ? null
              : button(trans.__('Release'), () => client.release(holder.kernel_id), {
                  label: trans.__('Release the GPU of %1', holder.label)
                })}
          </div>
        );
      })}
      <Answer answer={answer} />
    </div>
  );
}

/**
 * Return the user's other sessions whose slices the waiting kernel could use, at most
 * `MOST_NAMED`. Each session comes with the bytes of these slices, and the largest
 * comes first.
 */
function own(model: IPoolModel, plan: IExplanation | null): [number, ISession][] {
  const held = new Map<string, number>();
  for (const lease of plan?.holders ?? []) {
    if (lease.own && lease.use !== 'leaving') {
      held.set(lease.session, (held.get(lease.session) ?? 0) + lease.bytes);
    }
  }
  const found: [number, ISession][] = [];
  for (const session of model.view?.sessions ?? []) {
    const size = held.get(session.id);
    // The plan may be older than the view.
    const has = session.granted_bytes > 0 && session.state !== 'detaching';
    if (size !== undefined && has && isMine(session) && session.kernel_id) {
      found.push([size, session]);
    }
  }
  return found.sort((a, b) => b[0] - a[0]).slice(0, MOST_NAMED);
}
