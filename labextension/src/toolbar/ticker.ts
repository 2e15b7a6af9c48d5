// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** One timer for all that counts down: it runs only while somebody counts and the page is seen. */
import { DisposableDelegate, type IDisposable } from '@lumino/disposable';

export class Ticker {
  /** Call `tick` each second until disposed. */
  add(tick: () => void): IDisposable {
    this._ticks.add(tick);
    if (this._ticks.size === 1) {
      document.addEventListener('visibilitychange', this._onVisibility);
    }
    this._adjust();
    return new DisposableDelegate(() => {
      this._ticks.delete(tick);
      if (this._ticks.size === 0) {
        document.removeEventListener('visibilitychange', this._onVisibility);
      }
      this._adjust();
    });
  }

  /** Whether the timer runs. */
  get running(): boolean {
    return this._timer !== null;
  }

  private _adjust(): void {
    const wanted = this._ticks.size > 0 && document.visibilityState !== 'hidden';
    if (wanted && this._timer === null) {
      this._timer = window.setInterval(this._tick, 1000);
    } else if (!wanted && this._timer !== null) {
      window.clearInterval(this._timer);
      this._timer = null;
    }
  }

  private readonly _onVisibility = (): void => {
    this._adjust();
    if (this.running) {
      // What was counted meanwhile is shown at once.
      this._tick();
    }
  };

  private readonly _tick = (): void => {
    for (const tick of [...this._ticks]) {
      tick();
    }
  };

  private readonly _ticks = new Set<() => void>();
  private _timer: number | null = null;
}

/** The one of this page. */
export const ticker = new Ticker();
