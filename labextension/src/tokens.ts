// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** What the parts of the user interface share. */
import { Token } from '@lumino/coreutils';
import type { IDisposable } from '@lumino/disposable';
import type { ISignal } from '@lumino/signaling';

import type {
  Delta,
  IAnySession,
  IIdleWarning,
  IPool,
  ISession,
  PoolClient
} from './api';

/** The provisioner that makes a kernel one of the pool, as its kernelspec names it. */
export const PROVISIONER = 'gpupool-provisioner';

/** Whether the broker answers; `unknown` until it was asked. */
export interface IBroker {
  readonly status: 'unknown' | 'up' | 'away';
  /** Why it is away, and what to do, in the server's words. */
  readonly message: string;
  readonly nextStep: string;
  /** Why it is away, as a code such as `no-broker`; missing if there is none. */
  readonly code?: string;
  /** Away for this page only: the server does not let it ask. */
  readonly denied?: boolean;
}

/** What a change of the model was about: `all`, or the changed members of the newest view. */
export type Change =
  { readonly all: true } | { readonly all: false; readonly delta: Delta };

/**
 * The newest view of the pool in this page.
 *
 * It asks the server only while a Pooled GPU kernel runs on it; otherwise `view` is as old as the
 * last `refresh`, or null.
 */
export interface IPoolModel extends IDisposable {
  readonly client: PoolClient;
  /** The pool as last heard; kept, grown old, while the broker is away. */
  readonly view: IPool | null;
  readonly broker: IBroker;
  /** Whether a Pooled GPU kernel runs on this server, so that the view is kept fresh. */
  readonly live: boolean;
  /** Whether this machine has a GPU, real or emulated, as far as is known; and if not, why. */
  readonly found: { readonly found: boolean; readonly reason: string };
  readonly changed: ISignal<IPoolModel, Change>;
  /** An idle slice of a kernel of this server leaves soon. */
  readonly warned: ISignal<IPoolModel, IIdleWarning>;
  /** The time now on the broker's clock, seconds since the epoch. */
  now(): number;
  /** Whether a kernelspec's kernels are of the pool. */
  isPooled(kernelName: string): boolean;
  /** The session of a kernel, if it has one that is shown here. */
  session(kernelId: string): ISession | null;
  /** Ask once, now; resolves when answered, also if the answer is that the broker is away. */
  refresh(): Promise<void>;
}

export const IPoolModel = new Token<IPoolModel>(
  '@jupyter-gpupool/labextension:IPoolModel',
  'The GPU pool as this page last heard of it.'
);

/** The user's settings; `schema/plugin.json` says what each does. */
export interface IPoolSettings {
  readonly idleWarning: boolean;
  readonly statusBar: boolean;
  readonly keepMinutes: number;
  readonly changed: ISignal<IPoolSettings, void>;
}

export const IPoolSettings = new Token<IPoolSettings>(
  '@jupyter-gpupool/labextension:IPoolSettings',
  'The settings of the GPU pool’s user interface.'
);

/** Whether a session is shown in full. */
export function isMine(session: ISession | IAnySession): session is ISession {
  return session.mine;
}
