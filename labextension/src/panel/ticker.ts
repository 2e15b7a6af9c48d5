// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** One timer for all that counts down, and only while somebody can see it. */
import * as React from 'react';

export class Ticker {
  /** Whether there is somebody to see it. */
  set running(value: boolean) {
    this._running = value;
    this._sync();
  }

  /** Be told each second; returns how to be told no more. */
  readonly subscribe = (told: () => void): (() => void) => {
    this._told.add(told);
    this._sync();
    return () => {
      this._told.delete(told);
      this._sync();
    };
  };

  readonly count = (): number => this._count;

  private _sync(): void {
    const wanted = this._running && this._told.size > 0;
    if (wanted && this._timer === null) {
      this._timer = setInterval(() => {
        this._count += 1;
        this._told.forEach(told => told());
      }, 1000);
    } else if (!wanted && this._timer !== null) {
      clearInterval(this._timer);
      this._timer = null;
    }
  }

  private readonly _told = new Set<() => void>();
  private _count = 0;
  private _running = false;
  private _timer: ReturnType<typeof setInterval> | null = null;
}

const never = (): (() => void) => () => undefined;

/** Render each second while `wanted`. */
export function useTick(ticker: Ticker, wanted: boolean): void {
  React.useSyncExternalStore(wanted ? ticker.subscribe : never, ticker.count);
}
