// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** The rows of the admin's table, and their order. Pure. */
import type { TranslationBundle } from '@jupyterlab/translation';

import type { IAdmin, IAdminSession } from '../api';
import { bytes } from '../words';

/** The columns by which the table can be sorted. */
export type Sort =
  'owner' | 'name' | 'slice' | 'used' | 'busy' | 'waste' | 'idle' | 'kept' | 'waits';

/** One session; a figure that is not known is null. */
export interface IRow {
  readonly session: IAdminSession;
  readonly owner: string;
  readonly name: string;
  readonly slice: number;
  readonly used: number | null;
  /**
   * The time in which the session used CUDA, as a share (0 to 1) of its time with a
   * slice.
   */
  readonly busy: number | null;
  /** Seconds in which the session had a slice and did not use CUDA. */
  readonly unused: number | null;
  /** Bytes of the session's slice times `unused`. */
  readonly waste: number | null;
  /** Seconds since the session became idle. */
  readonly idle: number | null;
  /** Seconds until the keep of the session ends. */
  readonly kept: number | null;
  /** Seconds since the session began to wait. */
  readonly waits: number | null;
}

/**
 * If a session has had a slice for fewer seconds than this, its use of CUDA counts as
 * unknown.
 */
const LEAST = 1;

export function row(session: IAdminSession, now: number): IRow {
  const { counted_seconds: counted, busy_seconds: spent } = session;
  const slice = session.granted_bytes;
  const known = spent !== null && counted >= LEAST;
  const unused = known ? Math.max(0, counted - spent) : null;
  const { idle_since: idle, keep_until: kept, queued_at: queued } = session;
  return {
    session,
    owner: session.owner,
    name: session.label || session.id,
    slice,
    used: slice > 0 ? (session.used_bytes ?? session.footprint_bytes) : null,
    busy: known ? Math.min(1, spent / counted) : null,
    unused,
    waste: unused === null ? null : slice * unused,
    idle: idle === null ? null : Math.max(0, now - idle),
    kept: kept !== null && kept > now ? kept - now : null,
    waits: queued === null ? null : Math.max(0, now - queued)
  };
}

/**
 * Return the sorted rows: names from A to Z, figures from the largest to the smallest.
 * With `inverted`, the order is the opposite. Rows with an unknown figure are always
 * last.
 */
export function rows(view: IAdmin, sort: Sort, inverted: boolean): IRow[] {
  const all = view.sessions.map(session => row(session, view.now));
  const sign = inverted ? -1 : 1;
  return all.sort((a, b) => {
    const [one, other] = [a[sort], b[sort]];
    if (one === null || other === null) {
      return (one === null ? 1 : 0) - (other === null ? 1 : 0) || byId(a, b);
    }
    const order =
      typeof one === 'string' ? one.localeCompare(String(other)) : Number(other) - one;
    return sign * order || byId(a, b);
  });
}

function byId(a: IRow, b: IRow): number {
  return a.session.id < b.session.id ? -1 : 1;
}

/** `40 s`, `3 min`, `2.5 h`: as Python's `format_seconds` prints them. */
export function duration(trans: TranslationBundle, seconds: number): string {
  if (seconds < 90) {
    return trans.__('%1 s', Math.round(seconds));
  }
  if (seconds < 5400) {
    return trans.__('%1 min', Math.round(seconds / 60));
  }
  return trans.__('%1 h', (seconds / 3600).toFixed(1).replace(/\.0$/, ''));
}

/**
 * The size of a session's slice, and for how long the session had a slice and did not
 * use CUDA: `8 GiB for 11 min`.
 */
export function wasteText(trans: TranslationBundle, shown: IRow): string {
  if (shown.slice === 0) {
    return '';
  }
  return shown.unused === null
    ? trans.__('not known')
    : trans.__('%1 for %2', bytes(shown.slice), duration(trans, shown.unused));
}

/** The state of a session in plain words. */
export function stateText(trans: TranslationBundle, shown: IRow): string {
  const { request, suspended_bytes: suspended } = shown.session;
  switch (shown.session.state) {
    case 'queued':
      return request.devices > 1
        ? trans.__(
            'Waits for %1 on each of %2 GPUs',
            bytes(request.memory),
            request.devices
          )
        : trans.__('Waits for %1', bytes(request.memory));
    case 'attaching':
      return trans.__('Moving to the GPU');
    case 'active':
      return trans.__('In use');
    case 'idle':
      return trans.__('Idle');
    case 'detaching':
      return trans.__('Moving to host memory');
    default:
      return suspended > 0
        ? trans.__('In host memory: %1', bytes(suspended))
        : trans.__('No GPU');
  }
}
