// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * The server extension's websocket: open while wanted, and reopened after it is lost.
 */
import { URLExt } from '@jupyterlab/coreutils';
import type { ServerConnection } from '@jupyterlab/services';
import type { IDisposable } from '@lumino/disposable';
import { Poll } from '@lumino/polling';

import type { Delta, IIdleWarning, INotice, IPool } from './api';

/** The server's messages that this user interface needs. */
export type Message =
  | { readonly type: 'snapshot'; readonly snapshot: IPool }
  | { readonly type: 'delta'; readonly delta: Delta }
  | { readonly type: 'idle'; readonly data: IIdleWarning }
  | { readonly type: 'notice'; readonly data: INotice }
  | {
      readonly type: 'broker';
      readonly available: boolean;
      readonly code?: string;
      readonly message?: string;
      readonly next_step?: string;
    }
  | { readonly type: 'lease' | 'queue' };

export interface IListener {
  message(message: Message): void;
  /**
   * Called if the websocket could not be opened, or closed before the first message.
   */
  failed(): void;
  /**
   * Called repeatedly while the page is hidden. The websocket is closed in this time,
   * so the listener sends a request.
   */
  ask(): Promise<void>;
}

/** Milliseconds after which a hidden page closes its websocket. */
export const HIDDEN_AFTER = 10_000;

/** Milliseconds between two requests of a hidden page. */
export const HIDDEN_INTERVAL = 60_000;

/**
 * A websocket counts as stable this many milliseconds after its first message. When a
 * stable websocket closes, the back-off starts again from the shortest pause.
 */
export const LASTING = 30_000;

/**
 * The clock is checked every `LOOK_INTERVAL` milliseconds. If the clock has advanced by
 * more than `SLEPT` milliseconds between two checks, the computer was asleep.
 */
const LOOK_INTERVAL = 15_000;
const SLEPT = 45_000;

/**
 * Return the milliseconds to the next attempt after `failures` failed attempts in a
 * row. The pause is 1 to 2 s at first, and grows to 15 to 30 s.
 */
export function pause(failures: number, random: number): number {
  return 1000 * Math.min(2 ** failures, 15) * (1 + random);
}

/**
 * Keeps the websocket open while `wanted` is true and the page is visible.
 *
 * When the page has been hidden for `HIDDEN_AFTER` milliseconds, the websocket closes.
 * From then on, a request is sent every `HIDDEN_INTERVAL` milliseconds, until the page
 * is visible again. While `wanted` is false, nothing is sent.
 */
export class EventStream implements IDisposable {
  constructor(
    private readonly _settings: ServerConnection.ISettings,
    private readonly _listener: IListener
  ) {
    document.addEventListener('visibilitychange', this._onVisibility);
    window.addEventListener('online', this._onOnline);
    this._poll = new Poll({
      auto: false,
      name: '@jupyter-gpupool/labextension:EventStream#hidden',
      factory: () => this._listener.ask(),
      frequency: { interval: HIDDEN_INTERVAL, backoff: false },
      standby: 'never'
    });
    this._onVisibility();
  }

  get isDisposed(): boolean {
    return this._poll.isDisposed;
  }

  /** Whether the server's messages are wanted. */
  get wanted(): boolean {
    return this._wanted;
  }
  set wanted(value: boolean) {
    if (value !== this._wanted && !this.isDisposed) {
      this._wanted = value;
      this._failures = 0;
      this._update();
    }
  }

  /** Whether a message has come since the websocket was opened. */
  get heard(): boolean {
    return this._heard;
  }

  /** Reopen the websocket at once if it is wanted. */
  again(): void {
    clearTimeout(this._retry);
    this._retry = undefined;
    this._failures = 0;
    this._close();
    this._update();
  }

  dispose(): void {
    if (this.isDisposed) {
      return;
    }
    this.wanted = false;
    document.removeEventListener('visibilitychange', this._onVisibility);
    window.removeEventListener('online', this._onOnline);
    clearTimeout(this._hiding);
    this._poll.dispose();
  }

  /** Open or close the websocket, as required now. */
  private _update(): void {
    if (!this._wanted || this._hidden) {
      clearTimeout(this._retry);
      this._retry = undefined;
      this._close();
    } else if (this._socket === null && this._retry === undefined) {
      this._open();
    }
    const asking = this._wanted && this._hidden;
    if (asking !== this._asking) {
      this._asking = asking;
      void (asking ? this._poll.start() : this._poll.stop());
    }
  }

  private _open(): void {
    const { appendToken, token, WebSocket, wsUrl } = this._settings;
    let url = URLExt.join(wsUrl, 'gpupool', 'api', 'events');
    if (appendToken && token !== '') {
      url += `?token=${encodeURIComponent(token)}`;
    }
    const socket = (this._socket = new WebSocket(url));
    let since = Infinity;
    socket.onmessage = (event: MessageEvent<string>) => {
      since = Math.min(since, Date.now());
      this._heard = true;
      this._listener.message(JSON.parse(event.data) as Message);
    };
    socket.onclose = () => {
      const failed = !this._heard;
      if (Date.now() - since >= LASTING) {
        this._failures = 0;
      }
      this._close();
      this._retry = setTimeout(
        () => {
          this._retry = undefined;
          this._update();
        },
        pause(this._failures++, Math.random())
      );
      if (failed) {
        this._listener.failed();
      }
    };
    let last = Date.now();
    this._look = setInterval(() => {
      const slept = Date.now() - last > SLEPT;
      last = Date.now();
      if (slept) {
        // While the computer was asleep, the server has most likely closed the
        // connection. No event has reported that.
        this.again();
      }
    }, LOOK_INTERVAL);
  }

  private _close(): void {
    clearInterval(this._look);
    this._heard = false;
    const socket = this._socket;
    if (socket !== null) {
      this._socket = null;
      socket.onmessage = socket.onclose = null;
      socket.close();
    }
  }

  private readonly _onOnline = (): void => {
    if (this._wanted) {
      this.again();
    }
  };

  private readonly _onVisibility = (): void => {
    clearTimeout(this._hiding);
    if (document.visibilityState === 'hidden') {
      this._hiding = setTimeout(() => {
        this._hidden = true;
        this._update();
      }, HIDDEN_AFTER);
      return;
    }
    this._hidden = false;
    if (this._wanted && this._socket === null) {
      this.again();
    } else {
      this._update();
    }
  };

  private readonly _poll: Poll;
  private _wanted = false;
  private _hidden = false;
  private _asking = false;
  private _heard = false;
  private _failures = 0;
  private _socket: WebSocket | null = null;
  private _retry: ReturnType<typeof setTimeout> | undefined;
  private _hiding: ReturnType<typeof setTimeout> | undefined;
  private _look: ReturnType<typeof setInterval> | undefined;
}
