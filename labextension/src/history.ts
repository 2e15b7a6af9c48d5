// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** The history of the last minutes, fetched while a widget shows it. */
import type { IDisposable } from '@lumino/disposable';
import { DisposableDelegate } from '@lumino/disposable';
import { Poll } from '@lumino/polling';
import type { ISignal } from '@lumino/signaling';
import { Signal } from '@lumino/signaling';

import type { IHistory, IHour, IMachines } from './api';
import { Machines } from './machines';
import type { IPoolModel } from './tokens';

/** Milliseconds between two requests. */
export const INTERVAL = 5000;

/** Milliseconds between two requests for the last hour: it has one point per minute. */
export const HOUR_INTERVAL = 30_000;

/**
 * Fetches the history while three conditions are met: a widget needs it (see `hold`), a
 * Pooled GPU kernel runs, and the page is visible.
 */
export class History implements IDisposable {
  constructor(private readonly _model: IPoolModel) {
    this._poll = new Poll({
      auto: false,
      name: '@jupyter-gpupool/labextension:History',
      factory: () => this._ask(),
      frequency: { interval: INTERVAL, backoff: true, max: 60_000 },
      standby: 'when-hidden'
    });
    this._machines = new Machines(_model, () => this._changed.emit());
    _model.changed.connect(this._update, this);
  }

  /** Fetch until the returned object is disposed. */
  hold(): IDisposable {
    this._holders++;
    this._update();
    const machines = this._machines.hold();
    return new DisposableDelegate(() => {
      machines.dispose();
      this._holders--;
      this._update();
    });
  }

  get latest(): IHistory | null {
    return this._latest;
  }

  get hour(): IHour | null {
    return this._hour;
  }

  get machines(): IMachines | null {
    return this._machines.latest;
  }

  get changed(): ISignal<History, void> {
    return this._changed;
  }

  get isDisposed(): boolean {
    return this._poll.isDisposed;
  }

  dispose(): void {
    if (this.isDisposed) {
      return;
    }
    this._poll.dispose();
    this._machines.dispose();
    Signal.clearData(this);
  }

  private readonly _update = (): void => {
    const asking = this._holders > 0 && this._model.live;
    if (asking !== this._asking && !this.isDisposed) {
      this._asking = asking;
      void (asking ? this._poll.start() : this._poll.stop());
    }
  };

  private async _ask(): Promise<void> {
    const latest = await this._model.client.history();
    const due = this._asked + HOUR_INTERVAL <= performance.now();
    // Ignore an error of this request. Older servers cannot answer it, and if the
    // broker is away, the model reports that.
    const hour = due ? await this._model.client.hour().catch(() => null) : this._hour;
    if (!this.isDisposed) {
      this._asked = due ? performance.now() : this._asked;
      this._latest = latest;
      this._hour = hour;
      this._changed.emit();
    }
  }

  private readonly _poll: Poll<void>;
  private readonly _changed = new Signal<History, void>(this);
  private readonly _machines: Machines;
  private _holders = 0;
  private _asking = false;
  private _latest: IHistory | null = null;
  private _hour: IHour | null = null;
  private _asked = -Infinity;
}
