// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** The popover's content: the state of a document's kernel in words, and actions. */
import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import type { ISession } from '../api';
import { byAdmin, pauseOf } from '../maintenance';
import { bytes, comesBack } from '../words';
import { Actions } from './actions';
import { Marked } from './answer';
import { Ask } from './ask';
import { Bar } from './bar';
import { useSituation } from './hooks';
import {
  hasSlice,
  lastHeard,
  preemptedReason,
  truth,
  type ISituation
} from './situation';
import type { KernelWatch } from './watch';
import { Standing, Why } from './why';

interface IProps {
  readonly watch: KernelWatch;
  /** The headline's id, for the dialog's label. */
  readonly labelId: string;
  readonly keepMinutes: number;
  readonly onClose: () => void;
  /** Shows the side panel; null if there is none. */
  readonly onShowPool: (() => void) | null;
}

export function Card(props: IProps): React.JSX.Element {
  const { watch, labelId, keepMinutes, onClose, onShowPool } = props;
  const { model, trans, kernelId } = watch;
  const it = useSituation(watch);
  const asks = useLast(it?.session ?? null, kernelId);
  if (it === null || kernelId === null) {
    return (
      <p id={labelId}>
        {trans.__('This %1 has no kernel of the GPU pool.', watch.what)}
      </p>
    );
  }
  const { session, view } = it;
  // For a kernel on another machine, the capacity of the devices is not known. Use the
  // largest allowed request instead.
  const room = session?.machine
    ? (session.most_bytes ?? session.request.limit)
    : Math.max(0, ...(view?.devices ?? []).map(d => d.memory_capacity));
  return (
    <div className="jp-gpupool-Popover-card">
      <div className="jp-gpupool-Popover-row jp-gpupool-Popover-head">
        <h2 id={labelId}>{it.headline}</h2>
        <button
          type="button"
          className="jp-gpupool-Popover-close"
          aria-label={trans.__('Close')}
          title={trans.__('Close')}
          onClick={onClose}
        >
          <svg viewBox="0 0 16 16" width="16" height="16" aria-hidden="true">
            <path d="M4 4l8 8M12 4l-8 8" className="jp-gpupool-Glyph-line" />
          </svg>
        </button>
      </div>
      {it.nearlyFull ? (
        <p className="jp-gpupool-Popover-full">
          {trans.__(
            'The slice is nearly full: ask for more memory, or free some in the kernel.'
          )}
        </p>
      ) : null}
      {notes(trans, it).map(note => (
        <p key={note}>
          <Marked line={note} />
        </p>
      ))}
      {it.kind === 'ours' && session && hasSlice(session) ? (
        <Bar
          trans={trans}
          session={session}
          devices={session.gpus ?? view?.devices ?? []}
        />
      ) : null}
      {it.kind === 'ours' &&
      session &&
      (session.state === 'queued' || hasSlice(session)) ? (
        <Why trans={trans} model={model} session={session} />
      ) : null}
      {it.kind === 'ours' && session?.standing?.length ? (
        <Standing trans={trans} lines={session.standing} />
      ) : null}
      {/* Keep the form while the pool is away, because the typed text and the server's
          last answer are in it. */}
      {asks && view && it.kind !== 'no-device' ? (
        <Ask
          key={kernelId}
          trans={trans}
          client={model.client}
          kernelId={kernelId}
          what={it.what}
          request={asks.request}
          most={asks.most_bytes}
          state={truth(session, it.broker.status === 'up')}
          up={it.broker.status === 'up'}
          waits={asks.state === 'queued'}
          room={room}
        />
      ) : null}
      {session && view && it.kind !== 'no-device' ? (
        <Actions
          key={`${kernelId} actions`}
          trans={trans}
          model={model}
          kernelId={kernelId}
          session={session}
          keepMinutes={keepMinutes}
          kernel={watch.context.session?.kernel ?? null}
        />
      ) : null}
      {onShowPool || it.emulated ? (
        <div className="jp-gpupool-Popover-row jp-gpupool-Popover-foot">
          {onShowPool ? (
            <button
              type="button"
              className="jp-gpupool-Popover-link"
              onClick={onShowPool}
            >
              {trans.__('Show the pool')}
            </button>
          ) : null}
          {it.emulated ? (
            <span
              className="jp-gpupool-Popover-emulated"
              title={trans.__('No real GPU: figures and speed are simulated.')}
            >
              {trans.__('EMULATED')}
            </span>
          ) : null}
        </div>
      ) : null}
    </div>
  );
}

/**
 * Return the kernel's session. A restarting kernel has no session for a moment: in this
 * case return its last session.
 */
function useLast(session: ISession | null, kernelId: string | null): ISession | null {
  const [last, setLast] = React.useState(session);
  if (session !== null && session !== last) {
    setLast(session);
  }
  return session ?? (last?.kernel_id === kernelId ? last : null);
}

/** Further notes, one or two sentences each. */
function notes(trans: TranslationBundle, it: ISituation): string[] {
  const { session, view, broker } = it;
  switch (it.kind) {
    case 'asking':
      return [];
    case 'away': {
      const before = lastHeard(trans, it);
      return [
        [broker.message, broker.nextStep].filter(Boolean).join(' '),
        before ? trans.__('Last known: %1.', before) : ''
      ].filter(Boolean);
    }
    case 'no-device':
      return [
        view?.problem ?? '',
        trans.__(
          'Kernels of the pool cannot start on this machine, but other kernels can.'
        )
      ].filter(Boolean);
    default:
      break;
  }
  if (session === null) {
    return [
      trans.__(
        'The pool does not know this kernel yet. If this message stays, restart the kernel.'
      )
    ];
  }
  if (session.unreachable) {
    return [
      session.unreachable,
      trans.__('Try again later, or ask your administrator.')
    ];
  }
  const size = bytes(session.request.memory);
  switch (session.state) {
    case 'queued':
      return session.preempted
        ? [
            preemptedReason(session),
            trans.__('The kernel’s state is in host memory, and nothing is lost.')
          ]
        : [];
    case 'idle':
      if (session.pinned_reason) {
        return [
          trans.__('The kernel is pinned: its state must stay on the GPU.'),
          session.pinned_reason
        ];
      }
      if (session.stays_reason) {
        return [session.stays_reason];
      }
      if (session.wanted) {
        return [trans.__('%1. Other kernels wait for this slice.', it.said.text)];
      }
      return session.leaves_at === null
        ? [trans.__('The kernel keeps the slice until another kernel needs it.')]
        : [`${it.said.text}.`];
    case 'detached': {
      const order = session.machine ? null : pauseOf(view);
      if (order !== null) {
        return [
          trans.__('No kernel gets a GPU now: %1.', byAdmin(trans, order)),
          ...(session.suspended_bytes > 0
            ? [trans.__('Your data is safe in host memory, and CPU work goes on.')]
            : [])
        ];
      }
      return session.suspended_bytes > 0
        ? [
            trans.__(
              'Your data is safe in host memory; %1.',
              comesBack(trans, session.attach)
            ),
            ...(session.taken_reason
              ? [
                  trans.__(
                    'The pool took the slice while the kernel was idle: %1.',
                    session.taken_reason
                  )
                ]
              : [])
          ]
        : [getting(trans, session.attach, size)];
    }
    case 'detaching':
      return [
        trans.__('Your data does not change, and returns to a GPU when it is needed.')
      ];
    default:
      return session.pinned_reason ? [session.pinned_reason] : [];
  }
}

function getting(trans: TranslationBundle, attach: string, size: string): string {
  switch (attach) {
    case 'cell':
      return trans.__('The kernel gets a slice of %1 when a cell runs.', size);
    case 'manual':
      return trans.__('The kernel gets a slice of %1 when you run %gpu attach.', size);
    default:
      return trans.__(
        'The kernel gets a slice of %1 when a cell first uses CUDA.',
        size
      );
  }
}
