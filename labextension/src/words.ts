// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** States, sizes and times in words. Pure: the present time is an argument. */
import type { TranslationBundle } from '@jupyterlab/translation';

import type { IBudget, IDevice, INamedDevice, ISession } from './api';

const GIB = 1024 ** 3;
const UNITS = ['B', 'KiB', 'MiB', 'GiB', 'TiB'] as const;

/**
 * Write a size: `6 GiB`, `1.5 GiB`, `512 MiB`. Python's `format_bytes` writes the same
 * texts; `sizes.json` contains the tests of both.
 */
export function bytes(value: number): string {
  let amount = value;
  let unit = 0;
  while (Number(amount.toFixed(1)) >= 1024 && unit < UNITS.length - 1) {
    amount /= 1024;
    unit += 1;
  }
  return `${tenths(amount)} ${UNITS[unit]}`;
}

/** `6`, `1.5`: at most one decimal. */
function tenths(amount: number): string {
  return amount.toFixed(1).replace(/\.0$/, '');
}

/**
 * Write `6 of 8 GiB`. If the two sizes have different units and `used` is not 0, write
 * both units: `512 MiB of 8 GiB`.
 */
export function part(trans: TranslationBundle, used: number, whole: number): string {
  const one = bytes(used).split(' ');
  const other = bytes(whole).split(' ');
  const first = one[1] === other[1] || used === 0 ? (one[0] ?? '') : one.join(' ');
  return trans.__('%1 of %2', first, other.join(' '));
}

/**
 * Write the size of a slice; for a slice that has grown, `9 GiB, 4 guaranteed`.
 * Python's `format_grant` writes the same text.
 */
export function grant(
  trans: TranslationBundle,
  granted: number,
  guaranteed: number
): string {
  const whole = bytes(granted);
  const least = bytes(guaranteed);
  if (guaranteed >= granted || whole === least) {
    return whole;
  }
  const same = whole.split(' ')[1] === least.split(' ')[1];
  return trans.__('%1, %2 guaranteed', whole, same ? least.split(' ')[0] : least);
}

/**
 * The bytes of a session's slices that are guaranteed: at most the request on each
 * device.
 */
export function guaranteedBytes(session: ISession): number {
  const { memory } = session.request;
  return session.slices.reduce(
    (sum, slice) => sum + Math.min(slice.granted_bytes, memory),
    0
  );
}

/**
 * A daily budget is low if at most this share of it is left. The chip then shows how
 * much is left.
 */
const LOW = 0.1;

/** The daily budget with the least time left; null if no budget is low. */
function lowBudget(session: ISession): IBudget | null {
  const low = (session.budgets ?? []).filter(
    budget => budget.left <= budget.seconds * LOW
  );
  return low.sort((a, b) => a.left - b.left)[0] ?? null;
}

/** `0:42`, `12:05`, `1:02:05`: a count-down. */
export function clock(seconds: number): string {
  const whole = Math.max(0, Math.ceil(seconds));
  const two = (n: number) => String(n).padStart(2, '0');
  const minutes = Math.floor(whole / 60);
  return minutes < 60
    ? `${minutes}:${two(whole % 60)}`
    : `${Math.floor(minutes / 60)}:${two(minutes % 60)}:${two(whole % 60)}`;
}

/** Convert a time on the broker's clock to a time on this computer's clock. */
export function localTime(model: { now(): number }, at: number): Date {
  return new Date(Date.now() + (at - model.now()) * 1000);
}

/** `14:02` or `14:02:35`, in the format of the user interface's language. */
export function timeOfDay(
  trans: TranslationBundle,
  time: Date,
  seconds = false
): string {
  const form: Intl.DateTimeFormatOptions = {
    hour: '2-digit',
    minute: '2-digit',
    ...(seconds && { second: '2-digit' })
  };
  return written(trans, time, form);
}

/** The time of day. If `time` is not on the day `today`, also the date. */
export function dayAndTime(
  trans: TranslationBundle,
  time: Date,
  today = new Date()
): string {
  if (time.toDateString() === today.toDateString()) {
    return timeOfDay(trans, time);
  }
  return written(trans, time, {
    weekday: 'short',
    day: 'numeric',
    month: 'short',
    hour: '2-digit',
    minute: '2-digit'
  });
}

function written(
  trans: TranslationBundle,
  time: Date,
  form: Intl.DateTimeFormatOptions
): string {
  const own = (trans as { readonly locale?: string }).locale?.replaceAll('_', '-');
  // If the browser's list contains this language, use the browser's tag: it may also
  // contain the region, such as `en-GB`.
  const its = navigator.languages.find(tag => tag.split('-')[0] === own?.split('-')[0]);
  try {
    return time.toLocaleString(its ?? own ?? [], form);
  } catch {
    // The browser does not know this language.
    return time.toLocaleString([], form);
  }
}

/** `~40 s`, `~3 min`, `~2 h`: an estimate. */
export function about(trans: TranslationBundle, seconds: number): string {
  if (seconds < 90) {
    return trans.__('~%1 s', Math.max(1, Math.round(seconds)));
  }
  if (seconds < 90 * 60) {
    return trans.__('~%1 min', Math.round(seconds / 60));
  }
  return trans.__('~%1 h', Math.round(seconds / 3600));
}

/**
 * The page shows a range of time from one of these numbers of seconds to another, or to
 * a whole number of days, because no estimate is more exact.
 */
const STEPS = [
  0, 5, 10, 15, 20, 30, 40, 60, 90, 120, 180, 300, 600, 900, 1200, 1800, 2700, 3600,
  5400, 7200, 10800, 18000, 28800, 43200, 86400
] as const;
const DAY = 86400;

/**
 * Write a range of time: `20 to 60 s`, `up to 5 min`. Python's `format_range` writes
 * the same texts; `waits.json` contains the tests of both.
 */
export function range(trans: TranslationBundle, least: number, most: number): string {
  const from = Math.max(0, least);
  const to = Math.max(1, most);
  let low = STEPS.reduce<number>((best, step) => (step <= from ? step : best), 0);
  const high = STEPS.find(step => step >= to) ?? Math.ceil(to / DAY) * DAY;
  if (low === high) {
    low = STEPS[STEPS.findIndex(step => step === high) - 1] ?? 0;
  }
  const end = step(trans, high);
  if (low === 0) {
    return trans.__('up to %1', end);
  }
  const begin = step(trans, low);
  const same = begin.split(' ')[1] === end.split(' ')[1];
  return trans.__('%1 to %2', same ? begin.split(' ')[0] : begin, end);
}

function step(trans: TranslationBundle, seconds: number): string {
  if (seconds <= 90) {
    return trans.__('%1 s', seconds);
  }
  return seconds < 7200
    ? trans.__('%1 min', Math.floor(seconds / 60))
    : trans.__('%1 h', Math.floor(seconds / 3600));
}

/**
 * Write how long a wait has lasted: `40 s`, `3 min`; empty in the first second.
 * Python's `format_waited` writes the same texts.
 */
export function waited(trans: TranslationBundle, seconds: number): string {
  const by = seconds < 10 ? 1 : seconds < 60 ? 10 : 60;
  const whole = Math.floor(seconds / by) * by;
  if (whole < 1) {
    return '';
  }
  if (whole < 90) {
    return trans.__('%1 s', whole);
  }
  return whole < 5400
    ? trans.__('%1 min', Math.round(whole / 60))
    : trans.__('%1 h', tenths(whole / 3600));
}

/**
 * Write the time of a wait: `20 to 60 s left`. Without an estimate, write
 * `waiting for 40 s, no estimate yet`, or in the first second `no estimate yet`.
 */
export function waitTime(
  trans: TranslationBundle,
  session: Pick<ISession, 'expected' | 'queued_at'>,
  now: number
): string {
  const { expected, queued_at: since } = session;
  if (expected !== null && expected.until > now) {
    return trans.__(
      '%1 left',
      range(trans, expected.since - now, expected.until - now)
    );
  }
  const so = since === null ? '' : waited(trans, now - since);
  return so
    ? trans.__('waiting for %1, no estimate yet', so)
    : trans.__('no estimate yet');
}

/**
 * Write an ordinal number, such as `2nd`. English has four forms; a language with other
 * ordinals translates each form.
 */
export function ordinal(trans: TranslationBundle, n: number): string {
  const tens = n % 100;
  const last = tens > 10 && tens < 14 ? 0 : n % 10;
  switch (last) {
    case 1:
      return trans.__('%1st', n);
    case 2:
      return trans.__('%1nd', n);
    case 3:
      return trans.__('%1rd', n);
    default:
      return trans.__('%1th', n);
  }
}

/** `GPU 1`, `GPUs 0, 1`: the devices of a session, by their numbers in the pool. */
export function gpus(
  trans: TranslationBundle,
  uuids: readonly string[],
  devices: readonly INamedDevice[]
): string {
  const numbers = uuids
    .map(uuid => devices.find(device => device.uuid === uuid)?.index)
    .filter(index => index !== undefined)
    .sort((a, b) => a - b);
  return trans._n('GPU %2', 'GPUs %2', uuids.length, numbers.join(', ') || '?');
}

/** The place of a session's slice: `GPU 1`, or on another machine `GPU 1 of gpu2`. */
export function place(
  trans: TranslationBundle,
  session: ISession,
  devices: readonly INamedDevice[]
): string {
  const said = gpus(trans, session.devices, session.gpus ?? devices);
  return session.machine ? trans.__('%1 of %2', said, session.machine) : said;
}

/** The kind of a state. It is also the name of the state's style. */
export type Tone = 'none' | 'wait' | 'move' | 'busy' | 'idle' | 'host' | 'away';

export interface ISaid {
  readonly text: string;
  readonly tone: Tone;
  /**
   * The text without its count-down. It is used for `aria-label`, because a label must
   * not change each second.
   */
  readonly still: string;
  /** Only the figure, for narrow places. */
  readonly short: string;
  /**
   * The shortest text, for the narrowest places. It must fit there, because a figure
   * without its last digits looks like another figure.
   */
  readonly least: string;
  /** Whether the text counts down and must be drawn again each second. */
  readonly counts: boolean;
}

/**
 * The text is a count-down until the suspend of an idle slice is this many seconds
 * late.
 */
const LATE = 2;

/** A text that does not count down. */
export function plain(text: string, tone: Tone, short = text, least = ''): ISaid {
  return { text, still: text, short, least, tone, counts: false };
}

/** A session's state in few words, for the space beside a kernel's name. */
export function say(
  trans: TranslationBundle,
  session: ISession | null,
  devices: readonly IDevice[],
  now: number
): ISaid {
  if (session === null) {
    return plain(trans.__('No GPU'), 'none');
  }
  if (session.machine && session.unreachable) {
    return plain(
      trans.__('%1 does not answer', session.machine),
      'away',
      trans.__('No answer')
    );
  }
  const where = place(trans, session, devices);
  switch (session.state) {
    case 'queued':
      return waiting(trans, session, now);
    case 'attaching':
      return session.suspended_bytes > 0
        ? plain(
            trans.__('Restoring %1…', bytes(session.suspended_bytes)),
            'move',
            trans.__('%1…', bytes(session.suspended_bytes))
          )
        : plain(trans.__('Attaching…'), 'move');
    case 'detaching':
      return session.preempted
        ? plain(trans.__('Preempted, moving…'), 'move', trans.__('Preempted'))
        : plain(trans.__('Moving to host memory…'), 'move', trans.__('Moving…'));
    case 'active': {
      const used = session.used_bytes ?? session.footprint_bytes;
      const guaranteed = guaranteedBytes(session);
      const size =
        used === null || bytes(guaranteed) !== bytes(session.granted_bytes)
          ? grant(trans, session.granted_bytes, guaranteed)
          : part(trans, used, session.granted_bytes);
      const short =
        used === null
          ? bytes(session.granted_bytes)
          : trans.__(
              '%1/%2 GiB',
              tenths(used / GIB),
              tenths(session.granted_bytes / GIB)
            );
      const least = short.split(' ')[0];
      const text = trans.__('%1 on %2', size, where);
      const low = lowBudget(session);
      return low === null
        ? plain(text, 'busy', short, least)
        : plain(
            trans.__('%1, %2 GPU-seconds left today', text, Math.round(low.left)),
            'busy',
            short,
            least
          );
    }
    case 'idle':
      if (session.pinned_reason) {
        return plain(trans.__('Idle on %1, pinned', where), 'idle', trans.__('Pinned'));
      }
      if (session.stays_reason) {
        return plain(trans.__('Idle on %1, stays', where), 'idle', trans.__('Stays'));
      }
      if (session.wanted) {
        return (session.keep_until ?? 0) > now
          ? plain(trans.__('Idle on %1, kept', where), 'idle', trans.__('Kept'))
          : plain(
              trans.__('Idle: may move to host memory at any moment'),
              'idle',
              trans.__('May move')
            );
      }
      if (session.leaves_at !== null) {
        if (now - session.leaves_at > LATE) {
          return plain(
            trans.__('Idle on %1, about to leave', where),
            'idle',
            trans.__('About to leave')
          );
        }
        const left = clock(session.leaves_at - now);
        return {
          text: trans.__('Idle, back to the pool in %1', left),
          still: trans.__('Idle, back to the pool'),
          short: left,
          least: left,
          tone: 'idle',
          counts: true
        };
      }
      return plain(trans.__('Idle on %1', where), 'idle', trans.__('Idle'));
    default:
      return session.suspended_bytes > 0
        ? plain(
            trans.__('In host memory: %1', bytes(session.suspended_bytes)),
            'host',
            trans.__('Host %1', bytes(session.suspended_bytes))
          )
        : plain(trans.__('No GPU'), 'none');
  }
}

/** The end of a sentence: it says what brings the suspended state back to a GPU. */
export function comesBack(trans: TranslationBundle, attach: string): string {
  switch (attach) {
    case 'cell':
      return trans.__('the next cell brings it back');
    case 'manual':
      return trans.__('%gpu attach brings it back');
    default:
      return trans.__('the next CUDA call brings it back');
  }
}

/** Whether the user has released the slice, but the slice cannot leave the GPU yet. */
export function goesBack(session: ISession | null): session is ISession {
  return (
    session !== null &&
    (session.release_asked ?? false) &&
    session.granted_bytes > 0 &&
    session.state !== 'detaching'
  );
}

/** The sentence about a slice that the user has released and that cannot leave yet. */
export function goingBack(trans: TranslationBundle, session: ISession): string {
  return session.state === 'idle'
    ? trans.__('Goes back to the pool as soon as it can be moved.')
    : trans.__('Goes back to the pool when its work on the GPU is done.');
}

/**
 * Write the time of a wait as a sentence for the popover. The broker's lines use the
 * same sentences.
 */
export function waitSentence(
  trans: TranslationBundle,
  session: Pick<ISession, 'expected' | 'queued_at'>,
  now: number
): string {
  const { expected, queued_at: since } = session;
  if (expected !== null && expected.until > now) {
    return trans.__(
      'It will probably wait for another %1.',
      range(trans, expected.since - now, expected.until - now)
    );
  }
  const so = since === null ? '' : waited(trans, now - since);
  return so
    ? trans.__('It has waited for %1; there is no estimate yet.', so)
    : trans.__('There is no estimate yet of how long it will wait.');
}

/**
 * The text of a waiting session: `Waiting: 2nd, 20 to 60 s left`, or without an
 * estimate `Waiting: 2nd, for 4 s, no estimate yet`.
 */
function waiting(trans: TranslationBundle, session: ISession, now: number): ISaid {
  const { expected, queued_at: since, queue_position: position } = session;
  const preempted = Boolean(session.preempted);
  if (position === null) {
    return plain(preempted ? trans.__('Preempted') : trans.__('Waiting'), 'wait');
  }
  const at = ordinal(trans, position);
  const still = preempted ? trans.__('Preempted: %1', at) : trans.__('Waiting: %1', at);
  const said = { still, least: `${position}`, tone: 'wait', counts: true } as const;
  if (expected !== null && expected.until > now) {
    const left = range(trans, expected.since - now, expected.until - now);
    return {
      ...said,
      text: trans.__('%1, %2 left', still, left),
      short: trans.__('%1 · %2', at, left)
    };
  }
  const so = since === null ? '' : waited(trans, now - since);
  const text = so
    ? trans.__('%1, for %2, no estimate yet', still, so)
    : trans.__('%1, no estimate yet', still);
  return { ...said, text, short: so ? trans.__('%1 · for %2', at, so) : at };
}

/** Make a sentence of a reason, because the broker sends only a part of a sentence. */
export function sentence(reason: string): string {
  const text = reason.charAt(0).toUpperCase() + reason.slice(1);
  return !text || /[.!?]$/.test(text) ? text : `${text}.`;
}
