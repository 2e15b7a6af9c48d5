// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** The machines of the cluster, fetched while a widget shows them. */
import type { IDisposable } from '@lumino/disposable';
import { DisposableDelegate } from '@lumino/disposable';
import { Poll } from '@lumino/polling';

import type { IMachines, IPool } from './api';
import type { IPoolModel } from './tokens';

/**
 * Milliseconds between two requests. Each request may cost the server a message to the
 * cluster's ledger.
 */
export const INTERVAL = 10_000;

/**
 * Fetches the machines of the cluster while a widget needs them (see `hold`). While a
 * Pooled GPU kernel runs and the page is visible, they are fetched repeatedly. While no
 * Pooled GPU kernel runs, they are fetched once for each new view of the pool.
 */
export class Machines implements IDisposable {
  constructor(
    private readonly _model: IPoolModel,
    private readonly _told: () => void
  ) {
    this._poll = new Poll({
      auto: false,
      name: '@jupyter-gpupool/labextension:Machines',
      factory: () => this._ask(),
      frequency: { interval: INTERVAL, backoff: true, max: 60_000 },
      standby: 'when-hidden'
    });
    _model.changed.connect(this._update, this);
  }

  /** Fetch until the returned object is disposed. */
  hold(): IDisposable {
    this._holders++;
    this._update();
    return new DisposableDelegate(() => {
      this._holders--;
      this._update();
    });
  }

  /** Null outside a cluster, before the first answer, and after a failed request. */
  get latest(): IMachines | null {
    return this._latest;
  }

  get isDisposed(): boolean {
    return this._poll.isDisposed;
  }

  dispose(): void {
    if (!this.isDisposed) {
      this._model.changed.disconnect(this._update, this);
      this._poll.dispose();
    }
  }

  private readonly _update = (): void => {
    const { view } = this._model;
    const there = this._there();
    const held = this._holders > 0 && there;
    const asking = held && this._model.live;
    if (!there) {
      this._set(null);
    }
    if (held && !asking && view !== this._seen) {
      this._ask().catch(() => undefined); // the model reports why the broker is away
    }
    this._seen = held ? view : null;
    if (asking !== this._asking && !this.isDisposed) {
      this._asking = asking;
      void (asking ? this._poll.start() : this._poll.stop());
    }
  };

  private _there(): boolean {
    const { view, broker } = this._model;
    return view?.clustered === true && broker.status === 'up';
  }

  private async _ask(): Promise<void> {
    try {
      const found = await this._model.client.machines();
      // The broker may have gone away during the request. In that case show no figures,
      // because no later event would remove them.
      this._set(this._there() ? found : null);
    } catch (error) {
      // Show no figures, because old figures would look like new figures.
      this._set(null);
      throw error; // after an error, the poll asks less often
    }
  }

  private _set(latest: IMachines | null): void {
    if (!this.isDisposed && (latest ?? this._latest) !== null) {
      this._latest = latest;
      this._told();
    }
  }

  private readonly _poll: Poll<void>;
  private _holders = 0;
  private _asking = false;
  /**
   * The view that `_update` has handled last. Null if it had nothing to fetch then: no
   * widget needed the machines, this machine was in no cluster, or the broker was away.
   */
  private _seen: IPool | null = null;
  private _latest: IMachines | null = null;
}
