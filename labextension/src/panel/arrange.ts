// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * Arranges a view for the panel: the slices on each device, the queue, and my kernels.
 *
 * Unchanged parts are the same objects as before, so that React does not draw them
 * again.
 */
import type { IAnySession, IDevice, IPool, ISession, ISlice as IHas } from '../api';
import { isMine } from '../tokens';

/** The part of a session that lies on one device. */
export interface ISlice {
  readonly session: ISession | IAnySession;
  /**
   * The number that marks my kernel, as its colour does; 0 for other users' kernels.
   */
  readonly number: number;
  /** Empty for other users' sessions. */
  readonly name: string;
  /** Whether the session belongs to the document in front. */
  readonly active: boolean;
  /** Bytes on this device. */
  readonly bytes: number;
  /** Null if not known. */
  readonly used: number | null;
}

export interface IDeviceRow {
  readonly device: IDevice;
  readonly slices: readonly ISlice[];
}

export interface IKernelRow {
  readonly session: ISession;
  readonly number: number;
  readonly name: string;
  /** The path of the kernel's document; empty if the document cannot be opened. */
  readonly path: string;
  /** Whether no tab shows the kernel's document. */
  readonly closed: boolean;
  readonly active: boolean;
}

export interface IWaitRow {
  readonly session: ISession | IAnySession;
  readonly number: number;
  readonly name: string;
}

export interface IArranged {
  readonly rows: readonly IDeviceRow[];
  readonly queue: readonly IWaitRow[];
  /** My kernels of this server. */
  readonly kernels: readonly IKernelRow[];
  /**
   * My kernels of other servers. They are also listed below the devices and in the
   * queue.
   */
  readonly elsewhere: readonly IKernelRow[];
  /**
   * The devices, to find a device's number. This array is replaced only if a number
   * changes.
   */
  readonly devices: readonly IDevice[];
  /** Number of sessions that have a slice, and number of sessions that wait for one. */
  readonly having: number;
  readonly waiting: number;
  /** Suspended bytes of my kernels on this machine. */
  readonly suspended: number;
}

export interface IName {
  readonly name: string;
  /** Empty if the document cannot be opened. */
  readonly path: string;
  /** Whether no tab shows the document; missing if that is not known. */
  readonly closed?: boolean;
}

/** Returns the name of a kernel; null if no document of this server uses the kernel. */
export type NameOf = (kernelId: string) => IName | null;

/**
 * Arranges one view after another. It keeps its last result, because it returns the
 * same objects for unchanged parts.
 */
export class Arranger {
  /**
   * `live` is whether a kernel of this server runs. If none runs, leave out this
   * server's kernels, because an old view may still contain them.
   */
  arrange(
    view: IPool,
    nameOf: NameOf,
    active: string | null,
    live: boolean
  ): IArranged {
    const sessions = live
      ? view.sessions
      : view.sessions.filter(session => !session.here);
    const mine = sessions.filter(isMine);
    // The sessions on this machine. The panel shows the devices, the queue and the host
    // memory of this machine only.
    const local = sessions.filter(session => !(isMine(session) && session.machine));
    this._number(mine);
    const called = new Map<string, IName>();
    for (const session of mine) {
      const name = nameOf(session.kernel_id) ?? { name: title(session), path: '' };
      called.set(session.id, name);
    }
    const slices = this._slices(local, called, active);
    const last = this._last;
    const rows = view.devices.map((device, i) => {
      const old = last?.rows[i];
      const on = sameList(old?.slices, slices.get(device.uuid) ?? []);
      return same(old, { device, slices: on });
    });
    const queue = local
      .filter(session => session.state === 'queued')
      .sort((a, b) => (a.queue_position ?? Infinity) - (b.queue_position ?? Infinity))
      .map((session, i) =>
        same(last?.queue[i], {
          session,
          number: isMine(session) ? this._numberOf(session) : 0,
          name: called.get(session.id)?.name ?? ''
        })
      );
    const list = (here: boolean, old: readonly IKernelRow[] | undefined) => {
      const found = mine
        .filter(session => session.here === here)
        // A restarted broker may send the sessions in another order.
        .sort((a, b) => this._numberOf(a) - this._numberOf(b))
        .map((session, i) =>
          same(old?.[i], {
            session,
            number: this._numberOf(session),
            name: called.get(session.id)?.name ?? '',
            path: called.get(session.id)?.path ?? '',
            closed: called.get(session.id)?.closed ?? false,
            active: session.kernel_id === active
          })
        );
      return sameList(old, found);
    };
    this._last = {
      rows: sameList(last?.rows, rows),
      queue: sameList(last?.queue, queue),
      kernels: list(true, last?.kernels),
      elsewhere: list(false, last?.elsewhere),
      devices: sameNumbers(last?.devices, view.devices),
      having: local.filter(session => session.granted_bytes > 0).length,
      waiting: queue.length,
      suspended: local
        .filter(isMine)
        .reduce((sum, session) => sum + session.suspended_bytes, 0)
    };
    return this._last;
  }

  private _slices(
    sessions: IPool['sessions'],
    called: ReadonlyMap<string, IName>,
    active: string | null
  ): Map<string, ISlice[]> {
    const found = new Map<string, ISlice[]>();
    const kept = new Map<string, ISlice>();
    for (const session of sessions) {
      const own = isMine(session) ? session : null;
      for (const has of having(session)) {
        const key = `${session.id} ${has.device}`;
        const slice = same(this._kept.get(key), {
          session,
          number: own ? this._numberOf(own) : 0,
          name: called.get(session.id)?.name ?? '',
          active: own !== null && own.kernel_id === active,
          bytes: has.granted_bytes,
          used: has.used_bytes ?? null
        });
        kept.set(key, slice);
        const on = found.get(has.device);
        if (on) {
          on.push(slice);
        } else {
          found.set(has.device, [slice]);
        }
      }
    }
    this._kept = kept;
    return found;
  }

  /**
   * Number my kernels. A kernel keeps its number until it ends; a restart does not
   * change it.
   */
  private _number(mine: readonly ISession[]): void {
    const there = new Set(mine.map(identity));
    for (const key of this._numbers.keys()) {
      if (!there.has(key)) {
        this._numbers.delete(key);
      }
    }
    const taken = new Set(this._numbers.values());
    let next = 1;
    for (const key of there) {
      if (!this._numbers.has(key)) {
        while (taken.has(next)) {
          next += 1;
        }
        this._numbers.set(key, next);
        taken.add(next);
      }
    }
  }

  private _numberOf(session: ISession): number {
    return this._numbers.get(identity(session)) ?? 0;
  }

  private _last: IArranged | null = null;
  private _kept = new Map<string, ISlice>();
  private readonly _numbers = new Map<string, number>();
}

/** An older server sends only the sum. */
type Told = Pick<IAnySession, 'devices' | 'granted_bytes'> &
  Partial<Pick<IAnySession, 'slices'>>;

/** The bytes of a session on each device. */
function having({ devices, granted_bytes: granted, slices }: Told): readonly IHas[] {
  if (slices) {
    return slices.filter(slice => slice.granted_bytes > 0);
  }
  // An older server sends only the sum of the slices. Assume equal slices on all
  // devices.
  return granted > 0
    ? devices.map(device => ({ device, granted_bytes: granted / devices.length }))
    : [];
}

function identity(session: ISession): string {
  return session.kernel_id || session.id;
}

function title(session: ISession): string {
  return session.label || identity(session).slice(0, 8);
}

/** Return `old` if its members are the same as those of `fresh`; otherwise `fresh`. */
function same<T extends object>(old: T | undefined, fresh: T): T {
  if (old === undefined) {
    return fresh;
  }
  for (const key in fresh) {
    if (fresh[key] !== old[key]) {
      return fresh;
    }
  }
  return old;
}

function sameList<T>(old: readonly T[] | undefined, fresh: readonly T[]): readonly T[] {
  return old?.length === fresh.length && fresh.every((entry, i) => entry === old[i])
    ? old
    : fresh;
}

function sameNumbers(
  old: readonly IDevice[] | undefined,
  fresh: readonly IDevice[]
): readonly IDevice[] {
  return old?.length === fresh.length &&
    fresh.every((device, i) => {
      const before = old[i];
      return device.uuid === before?.uuid && device.index === before.index;
    })
    ? old
    : fresh;
}
