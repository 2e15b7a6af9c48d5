// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * Fakes of the pool's model and of a notebook's session context. Tests set the fields
 * of the fakes and emit their signals.
 */
import { Signal } from '@lumino/signaling';

import {
  aDevice,
  anOrder,
  aPool,
  aSession,
  GIB,
  NOTHING,
  trans
} from '../../__tests__/defaults';
import type { IIdleWarning, IPool, ISession, PoolClient } from '../../api';
import type { Change, IBroker, IPoolModel } from '../../tokens';
import type { Followed } from '../watch';

export { anOrder, GIB, trans };

/** The session of the notebook's kernel. */
export const session = (changes: Partial<ISession> = {}) =>
  aSession({
    id: 's1',
    kernel_id: 'k1',
    devices: ['GPU-1'],
    most_bytes: 24 * GIB,
    ...changes
  });

export const device = (index: number) => aDevice({ index, emulated: true });

export const detached: Partial<ISession> = { ...NOTHING, state: 'detached' };

export const queued: Partial<ISession> = {
  ...detached,
  state: 'queued',
  queue_position: 2,
  queue_length: 3,
  expected: { since: 1020, until: 1060 },
  wait_reason: 'all 39 GiB in use by running cells'
};

export class FakeModel {
  constructor(...sessions: ISession[]) {
    this.view = aPool({ devices: [device(1)], sessions });
  }

  view: IPool | null;
  broker: IBroker = { status: 'up', message: '', nextStep: '' };
  live = true;
  found = { found: true, reason: '', emulated: false };
  time = 1000;
  readonly client = {
    why: jest.fn<Promise<unknown>, []>(() => new Promise(() => undefined)),
    change: jest.fn(),
    release: jest.fn(() => Promise.resolve({ note: '' })),
    keep: jest.fn(),
    interrupt: jest.fn(() => Promise.resolve())
  };
  readonly changed = new Signal<IPoolModel, Change>(this.asModel());
  readonly warned = new Signal<IPoolModel, IIdleWarning>(this.asModel());
  isDisposed = false;
  dispose = jest.fn();
  refresh = jest.fn();

  now(): number {
    return this.time;
  }

  isRemote(): boolean {
    return false;
  }

  isPooled(name: string): boolean {
    return name === 'gpupool-python3';
  }

  session(kernelId: string): ISession | null {
    const own = (this.view?.sessions ?? []).filter((s): s is ISession => s.mine);
    return own.find(s => s.kernel_id === kernelId) ?? null;
  }

  /** Change the only session, and signal it. */
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

/** A fake session context of a notebook, whose kernel can change. */
export class FakeContext {
  constructor(name = 'gpupool-python3', id = 'k1') {
    this.session = { kernel: { name, id, isDisposed: false } };
  }

  session: { kernel: { name: string; id: string; isDisposed: boolean } } | null;
  readonly kernelChanged = new Signal<this, unknown>(this);
  readonly statusChanged = new Signal<this, unknown>(this);
  type = 'notebook';
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
