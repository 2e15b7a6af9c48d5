// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** The newest view of the pool in this page. */
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { PageConfig } from '@jupyterlab/coreutils';
import type { ServiceManager } from '@jupyterlab/services';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { ISignal } from '@lumino/signaling';
import { Signal } from '@lumino/signaling';

import type { Delta, IIdleWarning, INotice, IPool, ISession } from './api';
import { PoolClient, PoolError } from './api';
import { applyDelta, mergeChanges } from './delta';
import type { Message } from './stream';
import { EventStream } from './stream';
import { nextStep } from './tell';
import type { Change, IBroker } from './tokens';
import { IPoolModel, isMine, PROVISIONER, REMOTE_PROVISIONER } from './tokens';

/**
 * While the computer sleeps, the steady clock stops and the wall clock runs on. If the
 * wall clock gains more than this many milliseconds on the steady clock, the computer
 * was asleep.
 */
const SLEPT = 2000;

/**
 * The page sends one last request this many milliseconds after its last pooled kernel
 * has ended. In this time the broker learns that the kernel has ended.
 */
export const LAST_LOOK = 1000;

export class PoolModel implements IPoolModel {
  constructor(
    private readonly _services: PoolModel.Services,
    private readonly _trans: TranslationBundle
  ) {
    this.client = new PoolClient(_services.serverSettings);
    this._found = foundAtLoad();
    this._stream = new EventStream(_services.serverSettings, {
      message: message => this._onMessage(message),
      // A websocket that fails gives no reason. The answer to a request contains the
      // reason.
      failed: () => void this.refresh(),
      ask: () => this.refresh()
    });
    _services.kernels.runningChanged.connect(this._onRunning, this);
    _services.sessions.runningChanged.connect(this._onRunning, this);
    _services.kernelspecs.specsChanged.connect(this._onRunning, this);
    this._onRunning();
  }

  readonly client: PoolClient;

  get view(): IPool | null {
    return this._view;
  }

  get broker(): IBroker {
    return this._broker;
  }

  get live(): boolean {
    return this._stream.wanted;
  }

  get found(): IPoolModel['found'] {
    return this._found;
  }

  get changed(): ISignal<IPoolModel, Change> {
    return this._changed;
  }

  get warned(): ISignal<IPoolModel, IIdleWarning> {
    return this._warned;
  }

  get noticed(): ISignal<IPoolModel, INotice> {
    return this._noticed;
  }

  get isDisposed(): boolean {
    return this._stream.isDisposed;
  }

  dispose(): void {
    if (this.isDisposed) {
      return;
    }
    this._stream.dispose();
    cancelAnimationFrame(this._frame);
    clearTimeout(this._timer);
    clearTimeout(this._lastLook);
    Signal.clearData(this);
  }

  now(): number {
    if (this._view === null) {
      return Date.now() / 1000;
    }
    // Use the steady clock, because the wall clock jumps when it is set. If the
    // computer was asleep, use the wall clock, because the steady clock stopped.
    const steady = performance.now() - this._received.steady;
    const wall = Date.now() - this._received.wall;
    return this._view.now + (wall > steady + SLEPT ? wall : steady) / 1000;
  }

  isPooled(kernelName: string): boolean {
    return this._provisioner(kernelName) === PROVISIONER || this.isRemote(kernelName);
  }

  isRemote(kernelName: string): boolean {
    return this._provisioner(kernelName) === REMOTE_PROVISIONER;
  }

  private _provisioner(kernelName: string): string | undefined {
    const spec = this._services.kernelspecs.specs?.kernelspecs[kernelName];
    const stanza = spec?.metadata?.['kernel_provisioner'] as
      { provisioner_name?: string } | undefined;
    return stanza?.provisioner_name;
  }

  session(kernelId: string): ISession | null {
    // After a restart, a kernel has two sessions for a moment: the old one and the new
    // one.
    let newest: ISession | null = null;
    for (const session of this._view?.sessions ?? []) {
      if (
        isMine(session) &&
        session.kernel_id === kernelId &&
        (newest === null || session.opened_at >= newest.opened_at)
      ) {
        newest = session;
      }
    }
    return newest;
  }

  async refresh(): Promise<void> {
    const [before, was] = [this._view, this._broker];
    let view: IPool;
    try {
      view = await this.client.pool();
    } catch (error) {
      this._failed(error);
      return;
    }
    const other = this._view !== before || this._broker !== was;
    if (this.isDisposed || (this._stream.heard && other)) {
      return; // the websocket was faster, and its view is newer
    }
    const young = this._view === null || view.now >= this._view.now;
    if (this._view !== before && !young && this._broker.status === 'up') {
      return; // a later request was answered before this one
    }
    this._take(view);
  }

  private readonly _onRunning = (): void => {
    const wanted = this._anyPooled();
    if (!this.isDisposed && wanted !== this._stream.wanted) {
      this._stream.wanted = wanted;
      clearTimeout(this._lastLook);
      if (!wanted) {
        // The websocket closes before the broker reports the kernel's end. Without one
        // more request, the ended kernel would stay in the view.
        this._lastLook = setTimeout(() => void this.refresh(), LAST_LOOK);
      }
      this._emit({ all: true });
    }
  };

  private _anyPooled(): boolean {
    const { kernels, sessions } = this._services;
    for (const kernel of kernels.running()) {
      if (this.isPooled(kernel.name)) {
        return true;
      }
    }
    // If this page starts a kernel, JupyterLab lists its session at once, but lists the
    // kernel only after its next request to the server.
    for (const { kernel } of sessions.running()) {
      if (kernel && this.isPooled(kernel.name)) {
        return true;
      }
    }
    return false;
  }

  private _onMessage(message: Message): void {
    switch (message.type) {
      case 'snapshot':
        this._take(message.snapshot);
        break;
      case 'delta':
        this._apply(message.delta);
        break;
      case 'idle':
        this._warned.emit(message.data);
        break;
      case 'notice':
        this._noticed.emit(message.data);
        break;
      case 'broker':
        // If the broker is back, the server sends a snapshot, which updates the model.
        if (!message.available) {
          const { code = '', message: why = '', next_step: next = '' } = message;
          this._setAway(why, nextStep(this._trans, code, next), code);
        }
        break;
    }
  }

  private _take(view: IPool): void {
    this._broker = UP;
    this._set(view);
    this._emit({ all: true });
  }

  private _apply(delta: Delta): void {
    if (this._view !== null) {
      this._set(applyDelta(this._view, delta));
      this._emit({ all: false, delta });
    }
  }

  private _set(view: IPool): void {
    this._view = view;
    this._received = { steady: performance.now(), wall: Date.now() };
    const found = view.devices.length > 0;
    if (found !== this._found.found || (!found && view.problem)) {
      this._found = {
        found,
        reason: found ? '' : view.problem,
        emulated: view.emulated
      };
    }
  }

  private _failed(error: unknown): void {
    if (this.isDisposed) {
      return;
    }
    if (this._stream.heard && error instanceof PoolError && error.code === 'network') {
      // The server does not answer requests. So the websocket has most likely lost its
      // connection, too, although no event has reported that.
      this._stream.again();
    }
    if (!this._stream.heard) {
      const denied = error instanceof PoolError && DENIED.has(error.status);
      const code = error instanceof PoolError ? error.code : '';
      this._setAway(...this._why(error), code, denied);
    }
  }

  private _setAway(message: string, next: string, code: string, denied = false): void {
    this._broker = {
      status: 'away',
      message,
      nextStep: next,
      ...(code && { code }),
      ...(denied && { denied })
    };
    this._emit({ all: true });
  }

  private _why(error: unknown): [string, string] {
    const trans = this._trans;
    if (error instanceof PoolError && DENIED.has(error.status)) {
      return [
        trans.__('The Jupyter server does not let this page use the GPU pool.'),
        error.nextStep || trans.__('Log in again, and reload the page.')
      ];
    }
    if (error instanceof PoolError && error.status === 404) {
      return [
        trans.__('The GPU pool’s extension of the Jupyter server is switched off.'),
        trans.__(
          'Switch it on with `jupyter server extension enable jupyter_gpupool.server`, and restart the server.'
        )
      ];
    }
    if (error instanceof PoolError && error.code !== 'network') {
      return [error.message, nextStep(trans, error.code, error.nextStep)];
    }
    return [
      trans.__('The Jupyter server does not answer.'),
      this.live
        ? trans.__('This page tries again by itself.')
        : trans.__('Choose Refresh to try again.')
    ];
  }

  /** Emit `changed` in the next frame, once for all changes before that frame. */
  private _emit(change: Change): void {
    const waiting = this._pending !== null;
    this._pending = this._pending ? mergeChanges(this._pending, change) : change;
    if (waiting) {
      return;
    }
    if (document.visibilityState === 'hidden') {
      // A hidden page draws no frames, so use a timer.
      this._timer = setTimeout(this._flush, 0);
    } else {
      this._frame = requestAnimationFrame(this._flush);
    }
  }

  private readonly _flush = (): void => {
    const change = this._pending;
    this._pending = null;
    if (change !== null && !this.isDisposed) {
      this._changed.emit(change);
    }
  };

  private readonly _stream: EventStream;
  private readonly _changed = new Signal<IPoolModel, Change>(this);
  private readonly _warned = new Signal<IPoolModel, IIdleWarning>(this);
  private readonly _noticed = new Signal<IPoolModel, INotice>(this);
  private _view: IPool | null = null;
  private _broker: IBroker = { status: 'unknown', message: '', nextStep: '' };
  private _found: IPoolModel['found'];
  private _received = { steady: 0, wall: 0 };
  private _pending: Change | null = null;
  private _frame = 0;
  private _timer: ReturnType<typeof setTimeout> | undefined;
  private _lastLook: ReturnType<typeof setTimeout> | undefined;
}

export namespace PoolModel {
  export type Services = Pick<
    ServiceManager.IManager,
    'kernels' | 'kernelspecs' | 'serverSettings' | 'sessions'
  >;
}

/**
 * HTTP status codes: 401 if the user is not logged in, 403 if the user is not allowed.
 */
const DENIED: ReadonlySet<number> = new Set([401, 403]);

const UP: IBroker = { status: 'up', message: '', nextStep: '' };

/**
 * Return what the server wrote into this page about its GPU; defaults if it wrote
 * nothing.
 */
function foundAtLoad(): IPoolModel['found'] {
  try {
    const said = JSON.parse(PageConfig.getOption('gpupool') || '{}') as {
      found?: boolean;
      reason?: string;
      emulated?: boolean;
    };
    return {
      found: said.found ?? true,
      reason: said.reason ?? '',
      emulated: said.emulated ?? false
    };
  } catch {
    return { found: true, reason: '', emulated: false };
  }
}

export const modelPlugin: JupyterFrontEndPlugin<IPoolModel> = {
  id: '@jupyter-gpupool/labextension:model',
  description: 'Keeps the newest view of the GPU pool while a Pooled GPU kernel runs.',
  autoStart: true,
  optional: [ITranslator],
  provides: IPoolModel,
  activate: (app: JupyterFrontEnd, translator: ITranslator | null): IPoolModel =>
    new PoolModel(
      app.serviceManager,
      (translator ?? nullTranslator).load('jupyter_gpupool')
    )
};
