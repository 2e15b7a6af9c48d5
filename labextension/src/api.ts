// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * The server extension's REST schema as types, and a client of it.
 *
 * Sizes are in bytes. Durations are in seconds. A point in time is in seconds since the
 * epoch, on the broker's clock. A value that could not be measured is null, never 0.
 * The source of this schema is the server's `openapi.yaml`.
 */
import { URLExt } from '@jupyterlab/coreutils';
import { KernelAPI, ServerConnection } from '@jupyterlab/services';

export type State =
  'detached' | 'queued' | 'attaching' | 'active' | 'idle' | 'detaching' | 'ended';

export interface IDevice {
  readonly uuid: string;
  readonly index: number;
  readonly name: string;
  readonly emulated: boolean;
  readonly tier: string;
  readonly can_suspend: boolean;
  /** The device's own memory. */
  readonly memory_total: number;
  /**
   * The bytes that the pool may grant. The driver and the admin reserve the rest of
   * `memory_total`.
   */
  readonly memory_capacity: number;
  readonly memory_granted: number;
  /** Used by processes outside the pool. */
  readonly memory_foreign: number;
  /**
   * Null while the device is out of service, but older servers also send a number then.
   */
  readonly memory_free: number | null;
  readonly memory_used: number | null;
  /** Percent. */
  readonly utilisation: number | null;
  /** Why the device is out of service; empty if it is in service. */
  readonly drained_reason: string;
}

/** The fields that are needed to name a device. */
export type INamedDevice = Pick<IDevice, 'uuid' | 'index' | 'name' | 'emulated'>;

export interface IRequest {
  readonly memory: number;
  readonly limit: number;
  readonly devices: number;
  readonly compute: number | null;
  readonly priority: string;
}

/** A session's slice on one device. */
export interface ISlice {
  /** The device's UUID. */
  readonly device: string;
  readonly granted_bytes: number;
  /** Null if not known; missing for another user's session. */
  readonly used_bytes?: number | null;
}

/** The fields of every session, also of other users' sessions. */
export interface IAnySession {
  readonly id: string;
  readonly state: State;
  readonly priority?: string;
  /** The sum over all devices of the session. */
  readonly granted_bytes: number;
  readonly device: string | null;
  readonly devices: readonly string[];
  /** The session's slice on each of its devices. These slices grow separately. */
  readonly slices: readonly ISlice[];
  readonly queue_position: number | null;
  /**
   * What the session asks for: the bytes on each device, and the number of devices.
   * Older servers omit this field.
   */
  readonly asks?: { readonly memory: number; readonly devices: number };
  /**
   * What the session waits for, in words that every user may read; empty if the session
   * does not wait. Older servers omit this field.
   */
  readonly waits_for?: string;
  /**
   * When the present wait began. Older servers omit this field for other users'
   * sessions.
   */
  readonly queued_at?: number | null;
  /**
   * The owner's name. Admins see the names of all owners. Other users see their own
   * name, and the word `other` for the sessions of other owners.
   */
  readonly owner?: string;
  readonly label?: string;
  readonly mine: boolean;
  /** Whether the session belongs to a kernel of this server. */
  readonly here: boolean;
}

/** A daily budget of GPU-seconds. */
export interface IBudget {
  /** The group that has this budget; empty if it is the user's own budget. */
  readonly group: string;
  readonly seconds: number;
  readonly left: number;
  readonly spent: boolean;
}

/** The two ends of an expected wait. */
export interface IExpected {
  readonly since: number;
  readonly until: number;
}

/** A session of this server's user. */
export interface ISession extends IAnySession {
  readonly mine: true;
  readonly label: string;
  readonly kernel_id: string;
  /**
   * If a kernel has two sessions, the extension uses the session that was opened later.
   */
  readonly opened_at: number;
  readonly attach: 'lazy' | 'cell' | 'manual';
  readonly priority: string;
  readonly footprint_bytes: number | null;
  readonly used_bytes: number | null;
  readonly suspended_bytes: number;
  readonly request: IRequest;
  readonly queue_length: number | null;
  /**
   * The earliest and the latest time at which the wait will probably end; null if not
   * known.
   */
  readonly expected: IExpected | null;
  /** When the present wait began. */
  readonly queued_at: number | null;
  readonly wait_reason: string;
  /**
   * Why the pool preempted the session, as a sentence; missing or empty if the pool did
   * not preempt it.
   */
  readonly preempted?: string;
  /**
   * Sentences about the guarantees, shares and daily budgets of the user and their
   * groups.
   * Older servers omit this field and `budgets`.
   */
  readonly standing?: readonly string[];
  readonly budgets?: readonly IBudget[];
  readonly pinned_reason: string;
  readonly idle_seconds: number | null;
  /**
   * When the pool takes the idle slice back. Null if the pool does not take it, or if
   * this depends on more than the time: for example, if other kernels wait.
   */
  readonly leaves_at: number | null;
  /**
   * Why the pool has taken the idle slice of the session; missing or empty if the pool
   * has not taken it.
   */
  readonly taken_reason?: string;
  /** Whether other sessions wait for the idle slice. */
  readonly wanted: boolean;
  /**
   * Why the slice does not leave although it has been idle for long enough, or why it
   * cannot leave at all. One sentence: for example, host memory is full. Empty if there
   * is no such reason.
   */
  readonly stays_reason: string;
  /**
   * The most bytes that the session may ask for on each device if it keeps its present
   * number of devices; null if not known.
   */
  readonly most_bytes: number | null;
  readonly keep_until: number | null;
  /**
   * Whether the user has released the slice, but the slice cannot leave the GPU yet.
   * Older servers omit this field.
   */
  readonly release_asked?: boolean;
  /**
   * When the pool takes the slice back because an admin has ordered it. The pool takes
   * it even if it is in use. Null or missing without such an order.
   */
  readonly recall_at?: number | null;
  readonly attached_seconds_total: number;
  readonly wait_seconds_total: number;
  readonly suspends: number;
  readonly resumes: number;
  readonly migrations: number;
  /**
   * The machine on which the kernel runs; missing if the kernel runs on this machine.
   */
  readonly machine?: string;
  /** The GPUs that the kernel uses on `machine`. */
  readonly gpus?: readonly INamedDevice[];
  /**
   * Why `machine` does not answer. If this field is not empty, all fields of the
   * session are old.
   */
  readonly unreachable?: string;
}

export interface ILimits {
  /** The most bytes on each device that a session may ask for; null if not known. */
  readonly memory: number | null;
  readonly devices: number;
  readonly max_wait: number | null;
  /**
   * The longest time, in seconds, for which a user may keep an idle slice. Older
   * servers omit this field.
   */
  readonly max_keep?: number;
  readonly priorities: readonly string[];
}

/** GPUs that an admin has taken out of service. */
export interface IOrder {
  readonly kind: 'pause' | 'drain';
  /** UUID of the GPU; empty for the whole pool. */
  readonly device: string;
  /** The reason in the admin's words; may be empty. */
  readonly reason: string;
  readonly by: string;
  /** On the broker's clock. */
  readonly since: number;
  /** Whether all slices on these GPUs have been given back. */
  readonly closed: boolean;
}

export interface IPool {
  readonly version: string;
  readonly now: number;
  readonly emulated: boolean;
  readonly machine: string;
  /**
   * Whether this machine belongs to a cluster. `PoolClient.machines` fetches the
   * machines of the cluster. Older servers omit this field.
   */
  readonly clustered?: boolean;
  readonly devices: readonly IDevice[];
  readonly sessions: readonly (ISession | IAnySession)[];
  readonly queue_length: number;
  /**
   * Maps a kernel's id to the name of its machine. The map has only the kernels that
   * this server runs on another machine.
   */
  readonly remote_kernels?: Readonly<Record<string, string>>;
  readonly host: {
    readonly budget_bytes: number;
    readonly used_bytes: number;
    readonly available_bytes: number | null;
  };
  readonly settings: {
    readonly idle_timeout?: number | null;
    readonly attach?: string;
    readonly attach_reason?: string;
  };
  readonly limits: ILimits;
  /** Why there is no device; empty if there is one. */
  readonly problem: string;
  /** Older servers omit this field and the next one. */
  readonly maintenance?: readonly IOrder[];
  /** Whether the user of this server is an admin of the pool. */
  readonly admin?: boolean;
  /**
   * Which of this server's `c.GPUPool` options are not in force, where the options in
   * force come from, and how to change them. Empty if all are in force.
   */
  readonly configuration_notice?: string;
}

/** The changed members of the pool. Changed devices and sessions are sent in full. */
export type Delta = Partial<IPool> & {
  readonly now: number;
  /** Ids of sessions and UUIDs of devices that are gone. */
  readonly removed?: readonly string[];
};

/** Another session's slice, on a device that the waiting kernel could use. */
export interface IHolder {
  /** The id of the session that holds the slice. */
  readonly session: string;
  /** Whether that session belongs to the user of the waiting kernel. */
  readonly own: boolean;
  readonly bytes: number;
  readonly use: 'busy' | 'idle' | 'leaving';
}

/**
 * The broker's plan for a kernel. The type has only the fields that this extension
 * uses.
 */
export interface IExplanation {
  /** Sentences that say why the kernel waits, or who may take its slice. */
  readonly lines: readonly string[];
  /**
   * The one of `lines` that gives the time of the wait. The page updates this line each
   * second. Empty or missing if no line gives the time.
   */
  readonly time_line?: string;
  /**
   * Sentences about the guarantees, shares and daily budgets of the kernel's user and
   * groups.
   */
  readonly standing: readonly string[];
  /**
   * Sentences about what the other machines of the cluster have and what they lack.
   * Only the plan for a kernel that waits in a cluster has this field.
   */
  readonly machines?: readonly string[];
  /**
   * If the waiting kernel asked for only this many bytes on each GPU, it could start
   * now. Null if it could start with no size. Older servers omit this field and
   * `holders`.
   */
  readonly starts_with_bytes?: number | null;
  readonly holders?: readonly IHolder[];
}

export interface IHistory {
  readonly now: number;
  readonly interval: number;
  readonly kernels: Readonly<
    Record<
      string,
      {
        readonly time: readonly number[];
        readonly used: readonly (number | null)[];
        /**
         * For each point: the share (0 to 1) of the time since the previous point in
         * which the kernel used its device.
         */
        readonly busy: readonly (number | null)[];
      }
    >
  >;
  /** The server sends this field only on request. */
  readonly devices?: Readonly<
    Record<
      string,
      {
        readonly time: readonly number[];
        /** Percent. */
        readonly utilisation: readonly (number | null)[];
      }
    >
  >;
  readonly usage: {
    /** When the server started. */
    readonly since: number;
    readonly attached_seconds: number;
    readonly kernel_seconds: number;
  };
}

/**
 * A machine of the cluster, as its last report describes it. A figure that is not known
 * is null.
 */
export interface IMachine {
  readonly name: string;
  /** Whether this is the machine of the page's server. */
  readonly here: boolean;
  readonly state: 'reachable' | 'unreachable' | 'draining' | 'left' | 'gone';
  /** Seconds since the machine's last report. */
  readonly age: number;
  readonly devices: number | null;
  /** Number of GPUs out of service. */
  readonly out: number | null;
  readonly free: number | null;
  readonly waiting: number | null;
  /**
   * For each GPU in service: its model, and the bytes that the pool could grant on it
   * without a preemption.
   */
  readonly gpus: readonly { readonly name: string; readonly free: number }[] | null;
  /** Number of this user's sessions on that machine. */
  readonly mine: number | null;
}

export interface IMachines {
  /** Whether the cluster's ledger has answered; null if there is no cluster. */
  readonly connected: boolean | null;
  /** Number of machines that the answer leaves out, because its size is limited. */
  readonly left_out: number;
  /** The first entry is this machine. */
  readonly machines: readonly IMachine[];
}

/** The last hour, one point for each minute; null where the broker measured nothing. */
export interface IHour {
  readonly now: number;
  /** Seconds between two points. */
  readonly step: number;
  /** By UUID: the mean of each minute, oldest first. */
  readonly devices: Readonly<
    Record<
      string,
      {
        readonly granted: readonly (number | null)[];
        readonly used: readonly (number | null)[];
        /** Percent. */
        readonly utilisation: readonly (number | null)[];
      }
    >
  >;
  /** The most sessions that waited at once. */
  readonly queue: readonly (number | null)[];
}

/** A session as an admin sees it. */
export interface IAdminSession {
  readonly id: string;
  readonly owner: string;
  readonly group: string;
  readonly label: string;
  readonly state: State;
  readonly priority: string;
  readonly devices: readonly string[];
  readonly granted_bytes: number;
  readonly used_bytes: number | null;
  readonly footprint_bytes: number | null;
  readonly suspended_bytes: number;
  /**
   * For how many of the `counted_seconds` the session used CUDA; null without a guard.
   */
  readonly busy_seconds: number | null;
  readonly counted_seconds: number;
  readonly idle_since: number | null;
  readonly keep_until: number | null;
  readonly recall_at: number | null;
  readonly queued_at: number | null;
  readonly queue_position: number | null;
  readonly expected: ISession['expected'];
  readonly wait_reason: string;
  readonly pinned_reason: string;
  readonly request: { readonly memory: number; readonly devices: number };
}

export interface IAdmin {
  readonly now: number;
  readonly devices: readonly IDevice[];
  readonly priorities: readonly string[];
  readonly maintenance: readonly {
    readonly kind: 'pause' | 'drain';
    readonly device: string;
    readonly text: string;
  }[];
  readonly sessions: readonly IAdminSession[];
}

/** An admin has given an order about a kernel of this server. */
export interface INotice {
  readonly kernel_id: string;
  readonly message: string;
}

/**
 * A warning that the pool will soon take an idle slice. The server sends a warning only
 * if the later resume will be slow, or if the time that the resume needs is not known.
 */
export interface IIdleWarning {
  readonly kernel_id: string;
  readonly seconds_left: number;
  readonly bytes: number | null;
  readonly resume_seconds: number | null;
}

/** The answer to an order: it says what happens now. */
export interface INote {
  readonly note: string;
}

export interface IChanges {
  readonly memory?: number;
  readonly limit?: number;
  readonly devices?: number;
  readonly priority?: string;
}

/** Why a request failed, in the server's words. */
export class PoolError extends Error {
  constructor(
    message: string,
    /** A stable word, such as `quota`; `network` if the server did not answer. */
    readonly code: string,
    readonly nextStep: string,
    readonly status: number
  ) {
    super(message);
    this.name = 'PoolError';
  }
}

/**
 * Milliseconds after which a query without an answer fails. The browser does not always
 * report that the network is lost.
 */
export const PATIENCE = 20_000;

/** A client of the server extension. All methods reject with a {@link PoolError}. */
export class PoolClient {
  constructor(readonly settings: ServerConnection.ISettings) {}

  pool(): Promise<IPool> {
    return this._ask('pool');
  }

  history(): Promise<IHistory> {
    return this._ask('history');
  }

  hour(): Promise<IHour> {
    return this._ask('hour');
  }

  machines(): Promise<IMachines> {
    return this._ask('machines');
  }

  /** For admins of the pool only, like all methods whose names begin with `admin`. */
  admin(): Promise<IAdmin> {
    return this._ask('admin');
  }

  adminRecall(session: string, minutes: number, reason: string): Promise<INote> {
    return this._ask(`${anySession(session)}/recall`, 'POST', { minutes, reason });
  }

  adminKeep(session: string): Promise<INote> {
    return this._ask(`${anySession(session)}/recall`, 'POST', { cancel: true });
  }

  adminPriority(session: string, priority: string, reason: string): Promise<INote> {
    return this._ask(`${anySession(session)}/priority`, 'POST', { priority, reason });
  }

  adminEnd(session: string, reason: string): Promise<INote> {
    return this._ask(`${anySession(session)}/end`, 'POST', { reason });
  }

  adminDevice(
    uuid: string,
    action: 'drain' | 'pause' | 'resume',
    reason: string
  ): Promise<INote> {
    const path = `admin/devices/${encodeURIComponent(uuid)}`;
    return this._ask(path, 'POST', { action, reason });
  }

  why(kernel: string): Promise<IExplanation> {
    return this._ask(`${session(kernel)}/why`);
  }

  change(
    kernel: string,
    changes: IChanges
  ): Promise<{ readonly request: IRequest; readonly note: string }> {
    return this._ask(session(kernel), 'PATCH', changes);
  }

  release(kernel: string): Promise<{ readonly note: string }> {
    return this._ask(`${session(kernel)}/release`, 'POST', {});
  }

  keep(kernel: string, seconds: number): Promise<{ readonly note: string }> {
    return this._ask(`${session(kernel)}/keep`, 'POST', { seconds });
  }

  /**
   * Interrupt a kernel of this server. A cell that waits for a slice then stops
   * waiting.
   */
  async interrupt(kernel: string): Promise<void> {
    try {
      await KernelAPI.interruptKernel(kernel, this.settings);
    } catch (error) {
      const text = error instanceof Error ? error.message : String(error);
      throw new PoolError(text, 'network', '', 0);
    }
  }

  private async _ask<T>(path: string, method = 'GET', body?: object): Promise<T> {
    const url = URLExt.join(this.settings.baseUrl, 'gpupool', 'api', path);
    const given = new AbortController();
    // Only a query (GET) has a time-out, because the page can repeat a query. An action
    // may take long.
    const giveUp = () => given.abort(new Error(`No answer in ${PATIENCE / 1000} s.`));
    const timer = method === 'GET' ? setTimeout(giveUp, PATIENCE) : undefined;
    const init = {
      method,
      signal: given.signal,
      ...(body && { body: JSON.stringify(body) })
    };
    let response: Response;
    try {
      response = await ServerConnection.makeRequest(url, init, this.settings);
    } catch (error) {
      throw new PoolError(
        error instanceof Error ? error.message : String(error),
        'network',
        '',
        0
      );
    } finally {
      clearTimeout(timer);
    }
    const answer: unknown = await response.json().catch(() => null);
    if (response.ok && answer !== null) {
      return answer as T;
    }
    if (response.ok) {
      // The answer is not JSON. Probably the server has redirected the request to its
      // login page, so the answer is that page.
      throw new PoolError(
        'The answer of the Jupyter server is not one of the GPU pool.',
        'unknown',
        'Reload the page, and log in if you are asked to.',
        response.status
      );
    }
    const said = (answer ?? {}) as {
      message?: string;
      code?: string;
      next_step?: string;
    };
    throw new PoolError(
      said.message ?? response.statusText,
      said.code ?? 'unknown',
      said.next_step ?? '',
      response.status
    );
  }
}

function session(kernel: string): string {
  return `sessions/${encodeURIComponent(kernel)}`;
}

function anySession(id: string): string {
  return `admin/sessions/${encodeURIComponent(id)}`;
}
