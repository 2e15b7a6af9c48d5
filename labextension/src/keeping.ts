// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * How long an idle slice is kept: as long as the user wants, but at most the pool's
 * limit.
 */
import type { TranslationBundle } from '@jupyterlab/translation';

import type { IPool } from './api';

/**
 * Return for how many seconds a slice is kept; null if `minutes` is no positive number,
 * or if the pool's limit is 0.
 */
export function keepSeconds(minutes: unknown, view: IPool | null): number | null {
  const most = view?.limits.max_keep ?? Infinity;
  const wanted = typeof minutes === 'number' ? minutes * 60 : NaN;
  return Number.isFinite(wanted) && wanted > 0 && most > 0
    ? Math.min(wanted, most)
    : null;
}

/** `10 minutes`, `4 hours`, `90 seconds`: whole numbers, rounded down. */
export function duration(trans: TranslationBundle, seconds: number): string {
  if (seconds >= 3600 && seconds % 3600 === 0) {
    return trans._n('%1 hour', '%1 hours', seconds / 3600);
  }
  if (seconds >= 60) {
    return trans._n('%1 minute', '%1 minutes', Math.floor(seconds / 60));
  }
  return trans._n('%1 second', '%1 seconds', Math.floor(seconds));
}
