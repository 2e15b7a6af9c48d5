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
 * Return the bytes that a text such as `12GiB`, `512 MiB` or `1,5` means; null if the
 * text is not a size. A number without a unit means GiB.
 *
 * A comma is a decimal mark. A text with a comma before three digits is not a size,
 * because some languages separate thousands with a comma.
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
 * `LEAST` is the smallest size that a user may type: 0.001 MiB. If a text means a size
 * above `MOST`, the result is `MOST`.
 */
const LEAST = Math.ceil(MIB / 1000);
export const MOST = Number.MAX_SAFE_INTEGER;

/**
 * Write a size for the field: a number of GiB without a unit, or a number with `MiB`
 * below 1 GiB. The number is rounded down to three decimals.
 */
export function editable(value: number): string {
  const amount = value >= GIB ? value / GIB : value / MIB;
  const text = String(Math.floor(amount * 1000) / 1000);
  return value >= GIB ? text : `${text} MiB`;
}

/**
 * Write a size for a sentence, always with its unit: `7.45 GiB`, `8 GiB`, `0.102 MiB`.
 */
export function exact(value: number): string {
  return value >= GIB ? `${editable(value)} GiB` : editable(value);
}

/** The step of the slider in bytes: half a GiB, or less if `most` is small. */
export function stepFor(most: number): number {
  let step = GIB / 2;
  while (step > 16 * MIB && most / step < 8) {
    step /= 2;
  }
  return step;
}

/**
 * Return the position of the slider for a size, as a number of steps. The last position
 * means exactly `most`, even if `most` is not a multiple of the step.
 */
export function positionOf(value: number, most: number): number {
  const step = stepFor(most);
  const last = Math.ceil(most / step);
  return value >= most ? last : Math.min(last, Math.max(1, Math.round(value / step)));
}

export function sizeAt(position: number, most: number): number {
  return Math.min(most, position * stepFor(most));
}

/**
 * Return the size that a typed text means, or a sentence about the error in the text.
 */
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
    // The page shows the limit with few digits. A user who types this shown limit means
    // the exact limit.
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
