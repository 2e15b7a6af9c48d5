// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * Divides the bar of a device into parts: shares of the device's whole memory. Pure.
 */
import type { IDevice } from '../api';
import type { ISlice } from './arrange';

/**
 * What the memory of a part is. `shut`: free memory of a device that is out of service.
 */
export type Kind = 'mine' | 'other' | 'foreign' | 'free' | 'shut' | 'reserved';

export interface IPart {
  readonly key: string;
  readonly kind: Kind;
  /** The session of the part; null if the part belongs to no session. */
  readonly slice: ISlice | null;
  readonly bytes: number;
  /** Share of the bar, 0 to 1. */
  readonly share: number;
}

/**
 * The parts of a device's bar from left to right; their shares sum to 1.
 *
 * The figures come from different moments, so their sum may exceed the memory. In that
 * case the part `reserved` shrinks first, because the memory of processes outside the
 * pool comes out of the reserve. If the sum is still too large, all other parts shrink
 * in proportion.
 */
export function parts(device: IDevice, slices: readonly ISlice[]): IPart[] {
  const claims: Omit<IPart, 'share'>[] = slices.map(slice => ({
    key: slice.session.id,
    kind: slice.session.mine ? 'mine' : 'other',
    slice,
    bytes: sound(slice.bytes)
  }));
  claims.push(nobodys('foreign', device.memory_foreign));
  const claimed = claims.reduce((sum, part) => sum + part.bytes, 0);
  const total = sound(device.memory_total) || Math.max(claimed, 1);
  const whole = Math.max(total, claimed);
  const reserve = Math.min(
    sound(total - sound(device.memory_capacity)),
    whole - claimed
  );
  const free = Math.max(0, whole - claimed - reserve);
  const rest = device.drained_reason ? 'shut' : 'free';
  return [...claims, nobodys(rest, free), nobodys('reserved', reserve)]
    .filter(part => part.bytes > 0)
    .map(part => ({ ...part, share: part.bytes / whole }));
}

/** How much of a slice is in use, 0 to 1; null if not known. */
export function fill(slice: ISlice): number | null {
  if (slice.used === null || slice.bytes <= 0) {
    return null;
  }
  return Math.min(1, sound(slice.used) / slice.bytes);
}

/**
 * A share as a percentage for CSS. It is rounded down, so that all parts fit into the
 * bar.
 */
export function percent(share: number): string {
  return `${Math.floor(share * 1e5) / 1e3}%`;
}

function nobodys(kind: Kind, bytes: number): Omit<IPart, 'share'> {
  return { key: kind, kind, slice: null, bytes: sound(bytes) };
}

function sound(value: number): number {
  return Number.isFinite(value) ? Math.max(0, value) : 0;
}
