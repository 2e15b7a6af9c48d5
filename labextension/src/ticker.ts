// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** One timer for all count-downs: it runs only while one of them is visible. */
import { DisposableDelegate, type IDisposable } from '@lumino/disposable';
import * as React from 'react';

/**
 * The timer that all tickers share. With separate timers, two places on the page would
 * count down at different moments.
 */
class Beat {
  start(tick: () => void): void {
    this._ticks.add(tick);
    this._timer ??= window.setInterval(() => {
      for (const one of [...this._ticks]) {
        one();
      }
    }, 1000);
  }

  stop(tick: () => void): void {
    this._ticks.delete(tick);
    if (this._ticks.size === 0 && this._timer !== null) {
      window.clearInterval(this._timer);
      this._timer = null;
    }
  }

  private readonly _ticks = new Set<() => void>();
  private _timer: number | null = null;
}

const beat = new Beat();

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

  /**
   * Whether the ticker's owner shows its count-downs. While the page is hidden, the
   * ticker stops in any case.
   */
  set shown(value: boolean) {
    this._shown = value;
    this._adjust();
  }

  /** Whether the timer runs. */
  get running(): boolean {
    return this._running;
  }

  /** How often the ticker has ticked. */
  get count(): number {
    return this._count;
  }

  private _adjust(): void {
    const seen = this._shown && document.visibilityState !== 'hidden';
    const wanted = this._ticks.size > 0 && seen;
    if (wanted !== this._running) {
      this._running = wanted;
      if (wanted) {
        beat.start(this._tick);
      } else {
        beat.stop(this._tick);
      }
    }
  }

  private readonly _onVisibility = (): void => {
    this._adjust();
    if (this.running) {
      // Update the count-downs at once: they did not change while the page was hidden.
      this._tick();
    }
  };

  private readonly _tick = (): void => {
    this._count += 1;
    for (const tick of [...this._ticks]) {
      tick();
    }
  };

  private readonly _ticks = new Set<() => void>();
  private _count = 0;
  private _shown = true;
  private _running = false;
}

/** The page's only ticker. */
export const ticker = new Ticker();

/** Render the component each second while `wanted` is true. */
export function useTick(ticker: Ticker, wanted: boolean): void {
  const subscribe = React.useCallback(
    (told: () => void) => {
      const added = wanted ? ticker.add(told) : null;
      return () => added?.dispose();
    },
    [ticker, wanted]
  );
  React.useSyncExternalStore(subscribe, () => ticker.count);
}
