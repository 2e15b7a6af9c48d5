// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** A pool without a server: the interfaces that the panel is drawn from. */
import { nullTranslator } from '@jupyterlab/translation';
import { DisposableDelegate } from '@lumino/disposable';
import type { IDisposable } from '@lumino/disposable';
import { Signal } from '@lumino/signaling';

import type {
  IAnySession,
  IDevice,
  IHistory,
  IPool,
  ISession,
  ISlice
} from '../../api';
import type { PoolClient } from '../../api';
import type { Change, IBroker, IPoolModel, IPoolSettings } from '../../tokens';
import type { IIdleWarning } from '../../api';
import { isMine } from '../../tokens';
import type { IName } from '../arrange';
import type { IDocuments } from '../documents';
import type { IPast } from '../tools';

export const GIB = 1024 ** 3;
export const NOW = 1_790_000_000;

export const trans = nullTranslator.load('jupyter_gpupool');

export function device(index: number, changed: Partial<IDevice> = {}): IDevice {
  return {
    uuid: `GPU-${index}`,
    index,
    name: 'NVIDIA A100',
    emulated: false,
    tier: 'guarded',
    can_suspend: true,
    memory_total: 16 * GIB,
    memory_capacity: 15 * GIB,
    memory_granted: 0,
    memory_foreign: 0,
    memory_free: 15 * GIB,
    memory_used: null,
    utilisation: 43,
    drained_reason: '',
    ...changed
  };
}

export function other(id: string, changed: Partial<IAnySession> = {}): IAnySession {
  const session = {
    id,
    state: 'active',
    priority: 'batch',
    granted_bytes: 4 * GIB,
    device: 'GPU-0',
    devices: ['GPU-0'],
    queue_position: null,
    mine: false,
    here: false,
    ...changed
  } as const;
  return { slices: even(session), ...session };
}

export function mine(id: string, changed: Partial<ISession> = {}): ISession {
  const session = {
    id,
    state: 'active',
    priority: 'interactive',
    granted_bytes: 8 * GIB,
    device: 'GPU-0',
    devices: ['GPU-0'],
    queue_position: null,
    mine: true,
    here: true,
    label: `label of ${id}`,
    kernel_id: `kernel-${id}`,
    opened_at: NOW - 60,
    attach: 'lazy',
    footprint_bytes: null,
    used_bytes: 6 * GIB,
    suspended_bytes: 0,
    request: {
      memory: 8 * GIB,
      limit: 8 * GIB,
      devices: 1,
      compute: null,
      priority: 'interactive'
    },
    queue_length: null,
    eta_seconds: null,
    wait_reason: '',
    pinned_reason: '',
    idle_seconds: 0,
    leaves_at: null,
    stays_reason: '',
    most_bytes: 15 * GIB,
    keep_until: null,
    attached_seconds_total: 0,
    wait_seconds_total: 0,
    suspends: 0,
    resumes: 0,
    migrations: 0,
    ...changed
  } as const;
  const used = session.used_bytes;
  const slices = even(session).map(slice => ({
    ...slice,
    used_bytes: used === null ? null : used / session.devices.length
  }));
  return { slices, ...session };
}

/** As a session has them that did not grow. */
function even(session: {
  readonly devices: readonly string[];
  readonly granted_bytes: number;
}): ISlice[] {
  return session.devices.map(on => ({
    device: on,
    granted_bytes: session.granted_bytes / session.devices.length
  }));
}

export const NOTHING = {
  granted_bytes: 0,
  device: null,
  devices: [],
  used_bytes: null
} as const;

export function pool(
  devices: readonly IDevice[],
  sessions: IPool['sessions'] = [],
  changed: Partial<IPool> = {}
): IPool {
  return {
    version: '1',
    now: NOW,
    emulated: false,
    machine: 'm',
    devices,
    sessions,
    queue_length: sessions.filter(session => session.state === 'queued').length,
    host: { budget_bytes: 32 * GIB, used_bytes: 0, available_bytes: 64 * GIB },
    settings: {},
    limits: { memory: 15 * GIB, devices: 1, max_wait: null, priorities: [] },
    problem: '',
    ...changed
  };
}

export function history(changed: Partial<IHistory> = {}): IHistory {
  return {
    now: NOW,
    interval: 1,
    kernels: {},
    devices: {},
    usage: { since: NOW - 7560, attached_seconds: 1440, kernel_seconds: 7560 },
    ...changed
  };
}

export class FakeModel implements IPoolModel {
  constructor(public view: IPool | null) {}

  broker: IBroker = { status: 'up', message: '', nextStep: '' };
  live = true;
  found = { found: true, reason: '' };
  time = NOW;
  refreshed = 0;
  readonly asked: string[] = [];
  answer: () => Promise<{ note: string }> = () => Promise.resolve({ note: 'Done.' });
  readonly changed: Signal<IPoolModel, Change> = new Signal(this);
  readonly warned: Signal<IPoolModel, IIdleWarning> = new Signal(this);
  readonly isDisposed = false;

  readonly client = {
    release: (kernel: string) => {
      this.asked.push(`release ${kernel}`);
      return this.answer();
    },
    keep: (kernel: string, seconds: number) => {
      this.asked.push(`keep ${kernel} ${seconds}`);
      return this.answer();
    }
  } as unknown as PoolClient;

  /** Have another view, as after a delta: what is not named stays the same object. */
  change(view: IPool | null): void {
    this.view = view;
    this.changed.emit({ all: true });
  }

  now(): number {
    return this.time;
  }

  isPooled(): boolean {
    return true;
  }

  session(kernelId: string): ISession | null {
    return (
      this.view?.sessions.filter(isMine).find(s => s.kernel_id === kernelId) ?? null
    );
  }

  refresh(): Promise<void> {
    this.refreshed += 1;
    return Promise.resolve();
  }

  dispose(): void {
    Signal.clearData(this);
  }
}

export class FakePast implements IPast {
  latest: IHistory | null = null;
  holders = 0;
  readonly changed = new Signal<FakePast, void>(this);

  hold(): IDisposable {
    this.holders += 1;
    return new DisposableDelegate(() => {
      this.holders -= 1;
    });
  }

  change(latest: IHistory): void {
    this.latest = latest;
    this.changed.emit();
  }
}

export class FakeSettings implements Pick<IPoolSettings, 'keepMinutes' | 'changed'> {
  keepMinutes = 10;
  readonly changed = new Signal<IPoolSettings, void>(this as unknown as IPoolSettings);
}

export class FakeDocuments implements IDocuments {
  readonly names = new Map<string, IName>();
  active: string | null = null;
  readonly opened: string[] = [];
  readonly changed = new Signal<FakeDocuments, void>(this);

  name(kernelId: string): IName | null {
    return this.names.get(kernelId) ?? null;
  }

  open(kernelId: string): void {
    this.opened.push(kernelId);
  }
}

/** Numbers that look random and are the same each time. */
export function random(seed: number): (below: number) => number {
  let state = seed;
  return below => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * below);
  };
}
