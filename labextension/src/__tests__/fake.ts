// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** A fake server. It gives the answers that a test sets, and records the requests. */
import { ServerConnection } from '@jupyterlab/services';
import { Signal } from '@lumino/signaling';

import type { Delta, IPool } from '../api';
import type { PoolModel } from '../model';
import { PROVISIONER, REMOTE_PROVISIONER } from '../tokens';
import { aPool } from './defaults';

/** One fake websocket, with methods for the page's side and for the server's side. */
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

  snapshot(view: IPool = aPool()): void {
    this.say({ type: 'snapshot', snapshot: view });
  }

  delta(delta: Delta): void {
    this.say({ type: 'delta', delta });
  }

  /** Act as if the server or the network had closed the websocket. */
  drop(): void {
    this.closed = true;
    this.onclose?.();
  }

  static all: FakeSocket[] = [];

  static get open(): FakeSocket[] {
    return FakeSocket.all.filter(socket => !socket.closed);
  }

  /** The only open websocket. */
  static get one(): FakeSocket {
    expect(FakeSocket.open).toHaveLength(1);
    return FakeSocket.open[0]!;
  }
}

/** The requests that the page has sent with fetch, each as `METHOD path body`. */
export const asked: string[] = [];

/**
 * The server's next answer. With the status 0, the request fails as on a broken
 * network. With the status -1, the request never gets an answer.
 */
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

/** Fake services of a server. A test starts and ends the kernels. */
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
        'gpupool-remote-python3': {
          metadata: { kernel_provisioner: { provisioner_name: REMOTE_PROVISIONER } }
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

  /**
   * This object, with the type of the real services. It has only some of their members.
   */
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

/** Reset the fake server and the page; each test calls this first. */
export function reset(): void {
  FakeSocket.all = [];
  asked.length = 0;
  answer.status = 200;
  answer.body = aPool();
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
