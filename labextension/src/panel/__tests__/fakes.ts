// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Fakes of the interfaces that the panel draws, without a server. */
import { DisposableDelegate } from '@lumino/disposable';
import type { IDisposable } from '@lumino/disposable';
import { Signal } from '@lumino/signaling';

import {
  aDevice,
  anOrder,
  anotherSession,
  aPool,
  aSession,
  GIB,
  NOTHING,
  NOW,
  trans
} from '../../__tests__/defaults';
import type {
  IAnySession,
  IDevice,
  IExplanation,
  IHistory,
  IHour,
  IIdleWarning,
  IMachines,
  INotice,
  IPool,
  ISession,
  PoolClient
} from '../../api';
import type { Change, IBroker, IPoolModel, IPoolSettings } from '../../tokens';
import { isMine } from '../../tokens';
import type { IName } from '../arrange';
import type { IDocuments } from '../documents';
import type { IPast } from '../tools';

export { anOrder, GIB, NOTHING, NOW, trans };

export const device = (index: number, more: Partial<IDevice> = {}) =>
  aDevice({ index, ...more });

export const mine = (id: string, more: Partial<ISession> = {}) =>
  aSession({ id, ...more });

export const other = (id: string, more: Partial<IAnySession> = {}) =>
  anotherSession({ id, ...more });

export const pool = (
  devices: readonly IDevice[],
  sessions: IPool['sessions'] = [],
  more: Partial<IPool> = {}
) => aPool({ devices, sessions, ...more });

export function history(changed: Partial<IHistory> = {}): IHistory {
  return {
    now: NOW,
    interval: 1,
    kernels: {},
    devices: {},
    usage: { since: 0, attached_seconds: 1440, kernel_seconds: 7560 },
    ...changed
  };
}

export class FakeModel implements IPoolModel {
  constructor(public view: IPool | null) {}

  broker: IBroker = { status: 'up', message: '', nextStep: '' };
  live = true;
  found = { found: true, reason: '', emulated: false };
  time = NOW;
  refreshed = 0;
  readonly asked: string[] = [];
  /** The answer to each request for a plan; null if the broker does not answer. */
  plan: IExplanation | null = null;
  answer: () => Promise<{ note: string }> = () => Promise.resolve({ note: 'Done.' });
  readonly changed: Signal<IPoolModel, Change> = new Signal(this);
  readonly warned: Signal<IPoolModel, IIdleWarning> = new Signal(this);
  readonly noticed: Signal<IPoolModel, INotice> = new Signal(this);
  readonly isDisposed = false;

  readonly client = {
    release: (kernel: string) => {
      this.asked.push(`release ${kernel}`);
      return this.answer();
    },
    keep: (kernel: string, seconds: number) => {
      this.asked.push(`keep ${kernel} ${seconds}`);
      return this.answer();
    },
    change: (kernel: string, { memory }: { memory: number }) => {
      this.asked.push(`change ${kernel} ${memory}`);
      return this.answer();
    },
    interrupt: (kernel: string) => {
      this.asked.push(`interrupt ${kernel}`);
      return Promise.resolve();
    },
    why: (kernel: string) => {
      this.asked.push(`why ${kernel}`);
      return this.plan ? Promise.resolve(this.plan) : new Promise(() => undefined);
    }
  } as unknown as PoolClient;

  /** Set a new view and signal a change. */
  change(view: IPool | null): void {
    this.view = view;
    this.changed.emit({ all: true });
  }

  now(): number {
    return this.time;
  }

  isRemote(): boolean {
    return false;
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
  hour: IHour | null = null;
  machines: IMachines | null = null;
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

  shutDown(kernelId: string): Promise<void> {
    this.opened.push(`shut down ${kernelId}`);
    return Promise.resolve();
  }
}

/** Returns numbers that look random but are the same in each run. */
export function random(seed: number): (below: number) => number {
  let state = seed;
  return below => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * below);
  };
}
