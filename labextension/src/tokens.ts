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

/** The name that kernelspecs use for the pool's provisioner. */
export const PROVISIONER = 'gpupool-provisioner';

/**
 * The name of the provisioner whose kernels start on a machine that the cluster
 * chooses.
 */
export const REMOTE_PROVISIONER = 'gpupool-remote-provisioner';

/** Whether the broker answers; `unknown` before the first request. */
export interface IBroker {
  readonly status: 'unknown' | 'up' | 'away';
  /** The server's texts: why the broker is away, and what the user can do. */
  readonly message: string;
  readonly nextStep: string;
  /**
   * Why the broker is away, as a code such as `no-broker`; missing if there is no code.
   */
  readonly code?: string;
  /**
   * Whether the server refuses this page's requests: for example, the user is not
   * logged in. The pool itself may work.
   */
  readonly denied?: boolean;
}

/**
 * What has changed in the model: everything (`all`), or only the members of the view
 * that `delta` contains.
 */
export type Change =
  { readonly all: true } | { readonly all: false; readonly delta: Delta };

/**
 * The pool as this page knows it.
 *
 * While a Pooled GPU kernel runs on the server, the model keeps `view` up to date.
 * While none runs, `view` is as old as the last `refresh`, or null.
 */
export interface IPoolModel extends IDisposable {
  readonly client: PoolClient;
  /** The last known view; kept while the broker is away. */
  readonly view: IPool | null;
  readonly broker: IBroker;
  /**
   * Whether a Pooled GPU kernel runs on this server. If one runs and the broker
   * answers, the model keeps `view` up to date.
   */
  readonly live: boolean;
  /**
   * What the page knows about GPUs on this machine: whether the machine has a GPU, real
   * or emulated, and if it has none, the reason.
   */
  readonly found: {
    readonly found: boolean;
    readonly reason: string;
    /**
     * Whether a broker that starts now would emulate GPUs. For a running broker, use
     * `view.emulated`.
     */
    readonly emulated: boolean;
  };
  readonly changed: ISignal<IPoolModel, Change>;
  /** Emitted if the pool will soon take an idle slice of a kernel of this server. */
  readonly warned: ISignal<IPoolModel, IIdleWarning>;
  /** Emitted when an admin has given an order about a kernel of this server. */
  readonly noticed: ISignal<IPoolModel, INotice>;
  /** The time now on the broker's clock, seconds since the epoch. */
  now(): number;
  /** Whether a kernelspec's kernels belong to the pool. */
  isPooled(kernelName: string): boolean;
  /** Whether a kernelspec's kernels start on the machine that the cluster chooses. */
  isRemote(kernelName: string): boolean;
  /** Return this user's session for a kernel; null if the view has no such session. */
  session(kernelId: string): ISession | null;
  /** Fetch the view now. The promise resolves even if the broker is away. */
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

/**
 * Whether a session belongs to this user. Only the user's own sessions have all fields
 * of `ISession`.
 */
export function isMine(session: ISession | IAnySession): session is ISession {
  return session.mine;
}
