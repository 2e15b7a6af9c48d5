// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Devices and their parts in words, for labels, tooltips and screen readers. Pure. */
import type { TranslationBundle } from '@jupyterlab/translation';

import type { IAnySession, IDevice } from '../api';
import { bytes, part } from '../words';
import type { ISlice } from './arrange';
import type { IPart } from './geometry';

/** `2 GPUs · 6 kernels have a slice · 2 wait`: the pool in one line. */
export function inShort(
  trans: TranslationBundle,
  devices: number,
  having: number,
  waiting: number
): string {
  return trans.__(
    '%1 · %2 · %3',
    trans._n('%1 GPU', '%1 GPUs', devices),
    trans._n('%1 kernel has a slice', '%1 kernels have a slice', having),
    trans._n('%1 waits', '%1 wait', waiting)
  );
}

/**
 * `12 of 15.5 GiB in slices, 3 GiB free`. For a device out of service, the text leaves
 * out the free memory.
 */
export function granted(trans: TranslationBundle, device: IDevice): string {
  const { memory_granted, memory_capacity, memory_free: free } = device;
  const slices = trans.__('%1 in slices', part(trans, memory_granted, memory_capacity));
  return free === null || device.drained_reason
    ? slices
    : trans.__('%1, %2 free', slices, bytes(free));
}

/** `43 % busy`, as the driver reports it. */
export function utilisation(trans: TranslationBundle, device: IDevice): string {
  return device.utilisation === null
    ? trans.__('busy: not known')
    : trans.__('%1 % busy', device.utilisation);
}

/** True for an emulated device whose name does not say that it is emulated. */
export function unsaid(device: IDevice): boolean {
  return device.emulated && !device.name.toUpperCase().includes('EMULATED');
}

/** What a user should know about this device: why it is out of service, or its limits. */
export function notes(trans: TranslationBundle, device: IDevice): string[] {
  if (device.drained_reason) {
    return [trans.__('Not used: %1', device.drained_reason)];
  }
  const said: string[] = [];
  if (device.tier === 'unguarded') {
    said.push(trans.__('The pool does not enforce the size of slices on this GPU.'));
  }
  if (!device.can_suspend) {
    said.push(
      trans.__(
        'A kernel keeps its slice of this GPU until the kernel frees its GPU memory.'
      )
    );
  }
  return said;
}

/** A device in one sentence: name, memory, utilisation and notes, but no sessions. */
export function summary(trans: TranslationBundle, device: IDevice): string {
  const said = [
    trans.__('GPU %1', device.index),
    device.name,
    ...(unsaid(device) ? [trans.__('EMULATED')] : []),
    granted(trans, device),
    utilisation(trans, device),
    ...notes(trans, device)
  ];
  return said.reduce((list, entry) => trans.__('%1, %2', list, entry));
}

/** The full text of one part of a bar. */
export function partText(trans: TranslationBundle, shown: IPart): string {
  const size = bytes(shown.bytes);
  switch (shown.kind) {
    case 'free':
      return trans.__('Free: %1', size);
    case 'shut':
      return trans.__('Out of service: %1', size);
    case 'reserved':
      return trans.__('Reserved for the driver: %1', size);
    case 'foreign':
      return trans.__('Used outside the pool: %1', size);
    default:
  }
  const slice = shown.slice;
  if (slice === null) {
    return size;
  }
  const doing = activity(trans, slice.session);
  const amount = sizeText(trans, slice);
  if (!slice.session.mine) {
    return trans.__('%1: %2, %3', somebody(trans, slice.session), amount, doing);
  }
  const said = trans.__('%1 %2: %3, %4', slice.number, slice.name, amount, doing);
  if (!slice.session.here) {
    return trans.__('%1 (yours, on another server)', said);
  }
  return slice.active ? trans.__('%1 (the open document)', said) : said;
}

/** `6 of 8 GiB used`, or only the size of the slice if its use is not known. */
export function sizeText(trans: TranslationBundle, slice: ISlice): string {
  return slice.used === null
    ? bytes(slice.bytes)
    : trans.__('%1 used', part(trans, slice.used, slice.bytes));
}

/**
 * Return the text for another user's session. An admin sees `fit.ipynb (bob)`. Other
 * users see `Another user (batch)`, which names only the priority class.
 */
export function somebody(trans: TranslationBundle, session: IAnySession): string {
  const { owner, label, priority } = session;
  if (owner !== undefined && owner !== 'other') {
    return label ? trans.__('%1 (%2)', label, owner) : owner;
  }
  return priority ? trans.__('Another user (%1)', priority) : trans.__('Another user');
}

/** What a session does with its slice. */
export function activity(trans: TranslationBundle, session: IAnySession): string {
  switch (session.state) {
    case 'attaching':
      return trans.__('moving to the GPU');
    case 'idle':
      return trans.__('idle');
    case 'detaching':
      return trans.__('moving to host memory');
    default:
      return trans.__('in use');
  }
}
