// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Tokens and types that the parts of the user interface share. */
import { Token } from '@lumino/coreutils';
import type { IDisposable } from '@lumino/disposable';
import type { ISignal } from '@lumino/signaling';

import type {
  Delta,
  IAnySession,
  IIdleWarning,
  INotice,
  IPool,
  ISession,
  PoolClient
} from './api';

/** The pool's provisioner, by its name in kernelspecs. */
export const PROVISIONER = 'gpupool-provisioner';

/** The provisioner of kernels that start on another machine of a cluster. */
export const REMOTE_PROVISIONER = 'gpupool-remote-provisioner';

/** Whether the broker answers; `unknown` before the first request. */
export interface IBroker {
  readonly status: 'unknown' | 'up' | 'away';
  /** Why the broker is away, and what to do, in the server's words. */
  readonly message: string;
  readonly nextStep: string;
  /**
   * Why the broker is away, as a code such as `no-broker`; missing if there is no code.
   */
  readonly code?: string;
  /** Whether the server refuses the requests of this page; the pool itself may work. */
  readonly denied?: boolean;
}

/** The changed part of the model: `all`, or the changed members of the newest view. */
export type Change =
  { readonly all: true } | { readonly all: false; readonly delta: Delta };

/**
 * The newest view of the pool in this page.
 *
 * The model asks the server only while a Pooled GPU kernel runs on that server.
 * Otherwise `view` is as old as the last `refresh`, or null.
 */
export interface IPoolModel extends IDisposable {
  readonly client: PoolClient;
  /** The last known view; kept while the broker is away. */
  readonly view: IPool | null;
  readonly broker: IBroker;
  /** Whether a Pooled GPU kernel runs on this server, so that the view is kept fresh. */
  readonly live: boolean;
  /**
   * Whether this machine has a GPU, real or emulated, as far as the page knows. If it
   * has none, `reason` says why.
   */
  readonly found: {
    readonly found: boolean;
    readonly reason: string;
    /**
     * Whether the broker will emulate GPUs when it starts. Once it runs, the view says
     * whether it emulates GPUs.
     */
    readonly emulated: boolean;
  };
  readonly changed: ISignal<IPoolModel, Change>;
  /** The pool will soon take an idle slice of a kernel of this server. */
  readonly warned: ISignal<IPoolModel, IIdleWarning>;
  /** An admin has given an order about a kernel of this server. */
  readonly noticed: ISignal<IPoolModel, INotice>;
  /** The time now on the broker's clock, seconds since the epoch. */
  now(): number;
  /** Whether a kernelspec's kernels belong to the pool. */
  isPooled(kernelName: string): boolean;
  /** Whether a kernelspec's kernels start on the machine that the cluster chooses. */
  isRemote(kernelName: string): boolean;
  /** The user's session of a kernel; null if the view has none. */
  session(kernelId: string): ISession | null;
  /** Fetch the view once, now; also resolves if the broker is away. */
  refresh(): Promise<void>;
}

export const IPoolModel = new Token<IPoolModel>(
  '@jupyter-gpupool/labextension:IPoolModel',
  'The GPU pool as this page last heard of it.'
);

/** The user's settings; `schema/plugin.json` describes each. */
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

/** Whether a session is the user's own, so that it has all fields. */
export function isMine(session: ISession | IAnySession): session is ISession {
  return session.mine;
}
