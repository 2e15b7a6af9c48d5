// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * The state of one document's kernel in words. Pure: makes text from the model's view.
 */
import type { TranslationBundle } from '@jupyterlab/translation';

import type { IPool, ISession } from '../api';
import { byAdmin, pauseOf } from '../maintenance';
import type { IBroker, IPoolModel } from '../tokens';
import {
  bytes,
  ordinal,
  part,
  place,
  plain,
  say,
  sentence,
  type ISaid
} from '../words';

export interface ISituation {
  /** `asking`: the page has no answer yet. `ours`: the pool answers and has devices. */
  readonly kind: 'asking' | 'away' | 'no-device' | 'ours';
  readonly said: ISaid;
  /**
   * The state as a text that screen readers announce at each change. It has no figures
   * that change with time.
   */
  readonly news: string;
  /** The state as one sentence. */
  readonly headline: string;
  readonly session: ISession | null;
  readonly view: IPool | null;
  readonly broker: IBroker;
  /** Whether the session's device is emulated. */
  readonly emulated: boolean;
  /**
   * Share of the slice in use, 0 to 1; null without a slice, or if the use is not
   * known.
   */
  readonly filled: number | null;
  /** Whether the slice on some device has nearly reached its limit. */
  readonly nearlyFull: boolean;
  /** `notebook`, `console` or `kernel`, in the language of the user interface. */
  readonly what: string;
}

/** Return the word for what uses a kernel, by the type of its session. */
export function whatOf(trans: TranslationBundle, type: string): string {
  switch (type) {
    case 'notebook':
      return trans.__('notebook');
    case 'console':
      return trans.__('console');
    default:
      return trans.__('kernel');
  }
}

/** Return the state of the kernel `kernelId` in words. */
export function situation(
  trans: TranslationBundle,
  model: IPoolModel,
  kernelId: string,
  what: string
): ISituation {
  const { view, broker } = model;
  const session = model.session(kernelId);
  const devices = view?.devices ?? [];
  const own = (session?.gpus ?? devices).filter(device =>
    session?.devices.includes(device.uuid)
  );
  const machine = view?.remote_kernels?.[kernelId] ?? '';
  const emulated = own.length
    ? own.some(device => device.emulated)
    : (view?.emulated ?? false);
  const near = nearlyFull(session);
  const common = {
    ...{ session, view, broker, emulated, what },
    filled: filled(session),
    nearlyFull: near
  };
  if (broker.status === 'away') {
    return {
      ...common,
      kind: 'away',
      ...(broker.denied
        ? {
            said: plain(
              trans.__('No access to the GPU pool'),
              'away',
              trans.__('No access')
            ),
            news: trans.__('No access to the GPU pool'),
            headline: trans.__('This page has no access to the GPU pool.')
          }
        : {
            said: plain(
              trans.__('No answer from the GPU pool'),
              'away',
              trans.__('No answer')
            ),
            news: trans.__('The GPU pool does not answer'),
            headline: trans.__('The GPU pool does not answer.')
          })
    };
  }
  if (view === null) {
    return {
      ...common,
      kind: 'asking',
      said: plain(trans.__('GPU pool…'), 'none'),
      news: '',
      headline: trans.__('Asking the GPU pool…')
    };
  }
  if (machine && session === null) {
    return {
      ...common,
      kind: 'asking',
      said: plain(trans.__('Asking %1…', machine), 'none', machine),
      news: '',
      headline: trans.__(
        'This %1 runs on %2, which has not answered yet.',
        what,
        machine
      )
    };
  }
  if (session?.machine && session.unreachable) {
    const said = say(trans, session, devices, model.now());
    return {
      ...common,
      kind: 'ours',
      said,
      news: said.text,
      headline: trans.__(
        '%1 does not answer. This %2 probably still runs there.',
        session.machine,
        what
      )
    };
  }
  if (!machine && devices.length === 0) {
    return {
      ...common,
      kind: 'no-device',
      said: plain(trans.__('No GPU found'), 'away', trans.__('No GPU')),
      news: trans.__('No GPU found'),
      headline: trans.__('No GPU was found on this machine.')
    };
  }
  const order = machine ? null : pauseOf(view);
  if (order !== null && session?.state === 'queued') {
    const why = byAdmin(trans, order);
    return {
      ...common,
      kind: 'ours',
      said: plain(
        trans.__(
          'Waiting: %1',
          order.kind === 'pause'
            ? trans.__('the administrator has paused all GPUs')
            : trans.__('the administrator has drained all GPUs')
        ),
        'wait',
        order.kind === 'pause' ? trans.__('Paused') : trans.__('Drained')
      ),
      news: trans.__('Waiting for a GPU: %1', why),
      headline: trans.__('This %1 waits for a GPU: %2.', what, why)
    };
  }
  const said = say(trans, session, devices, model.now());
  return {
    ...common,
    kind: 'ours',
    said:
      near && session?.state === 'active'
        ? plain(trans.__('%1, nearly full', said.text), said.tone, said.short)
        : said,
    news: news(trans, session, view),
    headline: headline(trans, session, view, emulated, what)
  };
}

/** The last known state of a session, without a count-down. */
export function lastHeard(trans: TranslationBundle, it: ISituation): string {
  const { session, view } = it;
  if (view === null) {
    return '';
  }
  if (session?.state !== 'active') {
    return news(trans, session, view);
  }
  const where = place(trans, session, view.devices);
  return trans.__('%1 on %2', bytes(session.granted_bytes), where);
}

/** Why the pool preempted a session, as a sentence; empty without a preemption. */
export function preemptedReason(session: ISession | null): string {
  return session ? sentence(session.preempted ?? '') : '';
}

/**
 * Why an idle session keeps its slice: the session is pinned, or the pool has a reason.
 * Empty if neither is the case.
 */
export function staysReason(session: ISession | null): string {
  return session?.state === 'idle' ? session.pinned_reason || session.stays_reason : '';
}

/** The bytes that a session uses on all its devices together; null if not known. */
export function usedBytes(session: ISession): number | null {
  return session.used_bytes ?? session.footprint_bytes;
}

/** Whether a session has a slice, or is about to get one. */
export function hasSlice(session: ISession | null): boolean {
  return session !== null && session.granted_bytes > 0 && session.state !== 'queued';
}

/**
 * Return the state of a session as a text. When this text changes, the answers that the
 * broker gave before no longer apply. The text has no figures that change with time.
 */
export function truth(session: ISession | null, up: boolean): string {
  return session === null
    ? String(up)
    : JSON.stringify([
        up,
        session.id,
        session.state,
        session.request,
        session.granted_bytes,
        session.keep_until,
        session.release_asked ?? false
      ]);
}

/** A slice counts as nearly full if at least this share of its limit is in use. */
const NEAR = 0.9;

/** Whether the slice on some device has nearly reached its limit. */
export function nearlyFull(session: ISession | null): boolean {
  return (
    hasSlice(session) &&
    (session?.slices ?? []).some(
      ({ used_bytes: used, granted_bytes: granted }) =>
        typeof used === 'number' &&
        used >= NEAR * Math.max(granted, session?.request.limit ?? 0)
    )
  );
}

function filled(session: ISession | null): number | null {
  if (!session || session.granted_bytes <= 0) {
    return null;
  }
  const used = usedBytes(session);
  return used === null ? null : Math.min(1, used / session.granted_bytes);
}

function news(trans: TranslationBundle, session: ISession | null, view: IPool): string {
  if (session === null) {
    return trans.__('No GPU');
  }
  const where = place(trans, session, view.devices);
  switch (session.state) {
    case 'queued':
      if (session.preempted) {
        return trans.__('Preempted: %1', session.preempted);
      }
      return session.queue_position === null
        ? trans.__('Waiting for a GPU')
        : trans.__('Waiting for a GPU: %1', ordinal(trans, session.queue_position));
    case 'attaching':
      return session.suspended_bytes > 0
        ? trans.__('Coming back from host memory')
        : trans.__('Getting a GPU');
    case 'detaching':
      return trans.__('Moving to host memory');
    case 'active':
      // Leave out the sizes: a slice grows in steps, and a screen reader would announce
      // each step.
      return trans.__('Working on %1', where);
    case 'idle':
      if (session.pinned_reason) {
        return trans.__('Idle on %1, pinned', where);
      }
      if (session.stays_reason) {
        return trans.__('Idle on %1, stays', where);
      }
      if (session.wanted) {
        return trans.__('Idle on %1, and other kernels wait', where);
      }
      return session.leaves_at === null
        ? trans.__('Idle on %1', where)
        : trans.__('Idle on %1, goes back to the pool by itself', where);
    default:
      return session.suspended_bytes > 0
        ? trans.__('In host memory: %1', bytes(session.suspended_bytes))
        : trans.__('No GPU');
  }
}

function headline(
  trans: TranslationBundle,
  session: ISession | null,
  view: IPool,
  emulated: boolean,
  what: string
): string {
  if (session === null) {
    return trans.__('This %1 has no GPU.', what);
  }
  const name = place(trans, session, view.devices);
  const where = emulated ? trans.__('%1 (emulated)', name) : name;
  const used = usedBytes(session);
  switch (session.state) {
    case 'queued':
      return session.preempted
        ? trans.__(
            'The pool took the GPU from this %1. The %1 will continue by itself.',
            what
          )
        : trans.__('This %1 waits for a GPU.', what);
    case 'attaching':
      return session.suspended_bytes > 0
        ? trans.__(
            '%1 of this %2 is moving from host memory to the GPU.',
            bytes(session.suspended_bytes),
            what
          )
        : trans.__('This %1 is getting a GPU.', what);
    case 'detaching':
      return trans.__('The state of this %1 is moving to host memory.', what);
    case 'active':
      return used === null
        ? trans.__('This %1 has %2 on %3.', what, bytes(session.granted_bytes), where)
        : trans.__(
            'This %1 uses %2 on %3.',
            what,
            part(trans, used, session.granted_bytes),
            where
          );
    case 'idle':
      return trans.__(
        'This %1 is idle with %2 on %3.',
        what,
        bytes(session.granted_bytes),
        where
      );
    default:
      return session.suspended_bytes > 0
        ? trans.__(
            '%1 of this %2 is in host memory.',
            bytes(session.suspended_bytes),
            what
          )
        : trans.__('This %1 has no GPU.', what);
  }
}
