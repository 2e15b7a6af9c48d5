// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** A pool and a notebook in memory: their views are set, their signals emitted by hand. */
import { nullTranslator } from '@jupyterlab/translation';
import { Signal } from '@lumino/signaling';

import type { IDevice, IIdleWarning, IPool, ISession, PoolClient } from '../../api';
import type { Change, IBroker, IPoolModel } from '../../tokens';
import type { Followed } from '../watch';

export const GIB = 1024 ** 3;
export const trans = nullTranslator.load('jupyter_gpupool');

export function device(changes: Partial<IDevice> = {}): IDevice {
  return {
    uuid: 'GPU-1',
    index: 1,
    name: 'Emulated A100',
    emulated: true,
    tier: 'slice',
    can_suspend: true,
    memory_total: 40 * GIB,
    memory_capacity: 39 * GIB,
    memory_granted: 8 * GIB,
    memory_foreign: 0,
    memory_free: 31 * GIB,
    memory_used: null,
    utilisation: null,
    drained_reason: '',
    ...changes
  };
}

export function session(changes: Partial<ISession> = {}): ISession {
  return {
    id: 's1',
    state: 'active',
    mine: true,
    here: true,
    label: 'a.ipynb',
    kernel_id: 'k1',
    opened_at: 900,
    attach: 'lazy',
    priority: 'normal',
    granted_bytes: 8 * GIB,
    footprint_bytes: null,
    used_bytes: 6 * GIB,
    suspended_bytes: 0,
    device: 'GPU-1',
    devices: ['GPU-1'],
    slices: [{ device: 'GPU-1', granted_bytes: 8 * GIB, used_bytes: 6 * GIB }],
    request: {
      memory: 8 * GIB,
      limit: 8 * GIB,
      devices: 1,
      compute: null,
      priority: 'normal'
    },
    queue_position: null,
    queue_length: null,
    eta_seconds: null,
    wait_reason: '',
    pinned_reason: '',
    idle_seconds: 0,
    leaves_at: null,
    stays_reason: '',
    most_bytes: 24 * GIB,
    keep_until: null,
    attached_seconds_total: 0,
    wait_seconds_total: 0,
    suspends: 0,
    resumes: 0,
    migrations: 0,
    ...changes
  };
}

export const detached: Partial<ISession> = {
  state: 'detached',
  granted_bytes: 0,
  used_bytes: null,
  device: null,
  devices: [],
  slices: []
};

export const queued: Partial<ISession> = {
  ...detached,
  state: 'queued',
  queue_position: 2,
  queue_length: 3,
  eta_seconds: 40,
  wait_reason: 'all 39 GiB in use by running cells'
};

export class FakeModel {
  constructor(...sessions: ISession[]) {
    this.view = {
      version: '0.1.0',
      now: 1000,
      emulated: true,
      machine: 'a100',
      devices: [device()],
      sessions,
      queue_length: 0,
      host: { budget_bytes: 64 * GIB, used_bytes: 0, available_bytes: null },
      settings: { idle_timeout: 60 },
      limits: { memory: 24 * GIB, devices: 1, max_wait: null, priorities: ['normal'] },
      problem: ''
    };
  }

  view: IPool | null;
  broker: IBroker = { status: 'up', message: '', nextStep: '' };
  live = true;
  found = { found: true, reason: '' };
  time = 1000;
  readonly client = {
    wait: jest.fn<Promise<unknown>, []>(() => new Promise(() => undefined)),
    change: jest.fn(),
    release: jest.fn(),
    keep: jest.fn()
  };
  readonly changed = new Signal<IPoolModel, Change>(this.asModel());
  readonly warned = new Signal<IPoolModel, IIdleWarning>(this.asModel());
  isDisposed = false;
  dispose = jest.fn();
  refresh = jest.fn();

  now(): number {
    return this.time;
  }

  isPooled(name: string): boolean {
    return name === 'gpupool-python3';
  }

  session(kernelId: string): ISession | null {
    const own = (this.view?.sessions ?? []).filter((s): s is ISession => s.mine);
    return own.find(s => s.kernel_id === kernelId) ?? null;
  }

  /** Change the only session, and say so. */
  becomes(changes: Partial<ISession>): void {
    this.shows({ sessions: [session(changes)] });
  }

  shows(changes: Partial<IPool>): void {
    this.view = { ...this.view!, ...changes };
    this.changed.emit({ all: true });
  }

  away(message = 'No broker at its socket.', nextStep = 'Start it.'): void {
    this.broker = { status: 'away', message, nextStep };
    this.changed.emit({ all: true });
  }

  back(): void {
    this.broker = { status: 'up', message: '', nextStep: '' };
    this.changed.emit({ all: true });
  }

  asModel(): IPoolModel {
    return this as unknown as IPoolModel & { client: PoolClient };
  }
}

/** What a notebook's session context does when its kernel changes. */
export class FakeContext {
  constructor(name = 'gpupool-python3', id = 'k1') {
    this.session = { kernel: { name, id, isDisposed: false } };
  }

  session: { kernel: { name: string; id: string; isDisposed: boolean } } | null;
  readonly kernelChanged = new Signal<this, unknown>(this);
  readonly statusChanged = new Signal<this, unknown>(this);
  readonly propertyChanged = new Signal<this, unknown>(this);
  readonly disposed = new Signal<this, void>(this);

  choose(name: string, id = 'k2'): void {
    this.session = { kernel: { name, id, isDisposed: false } };
    this.kernelChanged.emit(undefined);
  }

  asContext(): Followed {
    return this as unknown as Followed;
  }
}
