// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** The sizes that people type and choose; pure. */
import type { TranslationBundle } from '@jupyterlab/translation';

import { bytes } from '../words';

export const GIB = 1024 ** 3;
export const MIB = 1024 ** 2;

const UNITS: Readonly<Record<string, number>> = {
  '': GIB,
  b: 1,
  k: 1024,
  kib: 1024,
  kb: 1000,
  m: MIB,
  mib: MIB,
  mb: 1000 ** 2,
  g: GIB,
  gib: GIB,
  gb: 1000 ** 3,
  t: 1024 * GIB,
  tib: 1024 * GIB,
  tb: 1000 ** 4
};

/**
 * Return the bytes of a text such as `12GiB`, `512 MiB` or `1,5`, or null. A number
 * without a unit means GiB.
 *
 * A comma before three digits is an error, because it separates thousands in some
 * languages.
 */
export function parseSize(text: string): number | null {
  const match = /^\s*(\d+(?:\.\d*|,\d{0,2})?|\.\d+)\s*([a-z]*)\s*$/i.exec(text);
  const unit = UNITS[(match?.[2] ?? '?').toLowerCase()];
  if (!match || unit === undefined) {
    return null;
  }
  const value = Math.floor(Number((match[1] ?? '').replace(',', '.')) * unit);
  return value >= LEAST ? Math.min(value, MOST) : null;
}

/**
 * `LEAST` is the smallest size that a user may type, 0.001 MiB. `MOST` is the result
 * for a text that means a larger size.
 */
const LEAST = Math.ceil(MIB / 1000);
export const MOST = Number.MAX_SAFE_INTEGER;

/** A size for the field: at most three decimals, rounded down. */
export function editable(value: number): string {
  const amount = value >= GIB ? value / GIB : value / MIB;
  const text = String(Math.floor(amount * 1000) / 1000);
  return value >= GIB ? text : `${text} MiB`;
}

/** The same size in a sentence: `7.45 GiB`, `8 GiB`, `0.102 MiB`. */
export function exact(value: number): string {
  return value >= GIB ? `${editable(value)} GiB` : editable(value);
}

/** The step of the slider: half a GiB, less on a small device. */
export function stepFor(most: number): number {
  let step = GIB / 2;
  while (step > 16 * MIB && most / step < 8) {
    step /= 2;
  }
  return step;
}

/**
 * A size's position on the slider, in steps. The last position means exactly `most`.
 */
export function positionOf(value: number, most: number): number {
  const step = stepFor(most);
  const last = Math.ceil(most / step);
  return value >= most ? last : Math.min(last, Math.max(1, Math.round(value / step)));
}

export function sizeAt(position: number, most: number): number {
  return Math.min(most, position * stepFor(most));
}

/** The size that a typed text means, or its error as a sentence. */
export function readSize(
  trans: TranslationBundle,
  text: string,
  most: number | null
): { readonly size: number; readonly fault: '' } | { readonly fault: string } {
  const size = parseSize(text);
  if (size === null) {
    const typed = text.trim().slice(0, 24);
    const fault = typed
      ? trans.__(
          '“%1” is not a size. Type a size such as 12, 12 GiB or 512 MiB.',
          typed
        )
      : trans.__('Type a size such as 12, 12 GiB or 512 MiB.');
    return { fault };
  }
  if (size >= MOST) {
    const typed = text.trim().slice(0, 24);
    const fault =
      most === null
        ? trans.__('“%1” is more than any GPU has.', typed)
        : trans.__('“%1” is too much. You may ask for at most %2.', typed, bytes(most));
    return { fault };
  }
  if (most !== null && size > most) {
    // A user who types the shown bound means the exact bound, which has more digits.
    return bytes(size) === bytes(most)
      ? { size: most, fault: '' }
      : {
          fault: trans.__(
            '%1 is too much. You may ask for at most %2.',
            exact(size),
            bytes(most)
          )
        };
  }
  return { size, fault: '' };
}
