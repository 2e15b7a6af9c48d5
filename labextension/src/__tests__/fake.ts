// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** A server that answers what tests say, and counts what it is asked. */
import { ServerConnection } from '@jupyterlab/services';
import { Signal } from '@lumino/signaling';

import type { Delta, IDevice, IPool, ISession } from '../api';
import type { PoolModel } from '../model';
import { PROVISIONER } from '../tokens';

const GIB = 1024 ** 3;

export function device(index: number, more: Partial<IDevice> = {}): IDevice {
  return {
    uuid: `GPU-${index}`,
    index,
    name: 'Emulated GPU',
    emulated: true,
    tier: 'suspend',
    can_suspend: true,
    memory_total: 8 * GIB,
    memory_capacity: 8 * GIB,
    memory_granted: 0,
    memory_foreign: 0,
    memory_free: 8 * GIB,
    memory_used: null,
    utilisation: null,
    drained_reason: '',
    ...more
  };
}

export function session(id: string, more: Partial<ISession> = {}): ISession {
  return {
    id,
    state: 'active',
    priority: 'interactive',
    granted_bytes: 8 * GIB,
    device: 'GPU-0',
    devices: ['GPU-0'],
    slices: [{ device: 'GPU-0', granted_bytes: 8 * GIB, used_bytes: 6 * GIB }],
    queue_position: null,
    mine: true,
    here: true,
    label: `${id}.ipynb`,
    kernel_id: `kernel-${id}`,
    opened_at: 900,
    attach: 'lazy',
    footprint_bytes: 6 * GIB,
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
    most_bytes: 8 * GIB,
    keep_until: null,
    attached_seconds_total: 0,
    wait_seconds_total: 0,
    suspends: 0,
    resumes: 0,
    migrations: 0,
    ...more
  };
}

export function pool(more: Partial<IPool> = {}): IPool {
  return {
    version: '0.1.0',
    now: 1000,
    emulated: true,
    machine: '2x8GiB',
    devices: [device(0), device(1)],
    sessions: [session('a'), session('b')],
    queue_length: 0,
    host: { budget_bytes: 16 * GIB, used_bytes: 0, available_bytes: null },
    settings: { idle_timeout: 60 },
    limits: { memory: 8 * GIB, devices: 2, max_wait: null, priorities: [] },
    problem: '',
    ...more
  };
}

/** One websocket: what the page opened, and the server's end of it. */
export class FakeSocket {
  onmessage: ((event: { data: string }) => void) | null = null;
  onclose: (() => void) | null = null;
  closed = false;

  constructor(readonly url: string) {
    FakeSocket.all.push(this);
  }

  close(): void {
    this.closed = true;
  }

  say(message: object): void {
    this.onmessage?.({ data: JSON.stringify(message) });
  }

  snapshot(view: IPool = pool()): void {
    this.say({ type: 'snapshot', snapshot: view });
  }

  delta(delta: Delta): void {
    this.say({ type: 'delta', delta });
  }

  /** The server's end, or the network, goes away. */
  drop(): void {
    this.closed = true;
    this.onclose?.();
  }

  static all: FakeSocket[] = [];

  static get open(): FakeSocket[] {
    return FakeSocket.all.filter(socket => !socket.closed);
  }

  /** The only one that is open. */
  static get one(): FakeSocket {
    expect(FakeSocket.open).toHaveLength(1);
    return FakeSocket.open[0]!;
  }
}

/** What the page asked for by fetch, as `METHOD path body`. */
export const asked: string[] = [];

/** What the server answers next; status 0 is a broken network, -1 one that swallows all. */
export const answer: { status: number; body: unknown } = { status: 200, body: {} };

class FakeHeaders extends Map<string, string> {
  append(name: string, value: string): void {
    this.set(name, value);
  }
}

class FakeRequest {
  readonly headers = new FakeHeaders();

  constructor(
    readonly url: string,
    readonly init: RequestInit
  ) {}
}

export function settings(): ServerConnection.ISettings {
  return ServerConnection.makeSettings({
    baseUrl: 'http://server/',
    wsUrl: 'ws://server/',
    token: 'se cret',
    appendToken: true,
    WebSocket: FakeSocket as unknown as typeof WebSocket,
    Request: FakeRequest as unknown as typeof Request,
    Headers: FakeHeaders as unknown as typeof Headers,
    fetch: (input: RequestInfo) => {
      const { url, init } = input as unknown as FakeRequest;
      const { method = 'GET', body } = init;
      const path = url
        .replace(/^http:\/\/server\/gpupool\/api\//, '')
        .replace(/\?.*/, '');
      asked.push(`${method} ${path} ${(body ?? '') as string}`.trim());
      if (answer.status === -1) {
        return new Promise((_, reject) => {
          const { signal } = init;
          signal?.addEventListener('abort', () => reject(signal.reason as Error));
        });
      }
      if (answer.status === 0) {
        return Promise.reject(new TypeError('Failed to fetch'));
      }
      const { status, body: said } = answer;
      return Promise.resolve({
        ok: status < 400,
        status,
        statusText: String(status),
        json: () => Promise.resolve(said)
      } as Response);
    }
  });
}

interface IKernel {
  id: string;
  name: string;
}

/** The services of a server with kernels that tests start and end. */
export class FakeServices {
  readonly serverSettings = settings();
  readonly kernelspecs = {
    specs: {
      default: 'python3',
      kernelspecs: {
        python3: { metadata: {} },
        'gpupool-python3': {
          metadata: { kernel_provisioner: { provisioner_name: PROVISIONER } }
        },
        'gpupool-ir': {
          metadata: {
            kernel_provisioner: { provisioner_name: PROVISIONER, config: {} },
            gpupool: { wraps: 'ir' }
          }
        }
      }
    },
    specsChanged: new Signal<object, void>({})
  };
  readonly kernels = {
    models: [] as IKernel[],
    running: () => this.kernels.models.values(),
    runningChanged: new Signal<object, void>({})
  };
  readonly sessions = {
    models: [] as { name: string; path: string; kernel: IKernel | null }[],
    running: () => this.sessions.models.values(),
    runningChanged: new Signal<object, void>({})
  };

  start(id: string, name = 'gpupool-python3', path = `work/${id}.ipynb`): void {
    const session = { name: `${id}.ipynb`, path, kernel: { id: `kernel-${id}`, name } };
    this.sessions.models = [...this.sessions.models, session];
    this.sessions.runningChanged.emit();
  }

  end(): void {
    this.sessions.models = [];
    this.sessions.runningChanged.emit();
  }

  /** As what they are not in full. */
  get all(): PoolModel.Services {
    return this as unknown as PoolModel.Services;
  }
}

let visibility: DocumentVisibilityState = 'visible';

/** Hide the page, or show it. */
export function show(state: DocumentVisibilityState): void {
  visibility = state;
  document.dispatchEvent(new Event('visibilitychange'));
}

/** Forget all; to be called before each test. */
export function reset(): void {
  FakeSocket.all = [];
  asked.length = 0;
  answer.status = 200;
  answer.body = pool();
  visibility = 'visible';
  Object.defineProperty(document, 'visibilityState', {
    configurable: true,
    get: () => visibility
  });
  Object.defineProperty(document, 'hidden', {
    configurable: true,
    get: () => visibility === 'hidden'
  });
}
