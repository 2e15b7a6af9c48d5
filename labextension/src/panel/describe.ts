// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Devices and their parts in words, for labels, tooltips and screen readers. Pure. */
import type { TranslationBundle } from '@jupyterlab/translation';

import type { IAnySession, IDevice } from '../api';
import { bytes, part } from '../words';
import type { IPart } from './geometry';

/** `12 of 15.5 GiB granted`. */
export function granted(trans: TranslationBundle, device: IDevice): string {
  return trans.__(
    '%1 granted',
    part(trans, device.memory_granted, device.memory_capacity)
  );
}

/** `utilisation 43 %`, as NVML reports it; `utilisation ?` if not known. */
export function utilisation(trans: TranslationBundle, device: IDevice): string {
  return device.utilisation === null
    ? trans.__('utilisation ?')
    : trans.__('utilisation %1 %', device.utilisation);
}

/** Whether a device must be marked as emulated besides its name. */
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
    said.push(trans.__('Unguarded: the size of a slice is not enforced'));
  }
  if (!device.can_suspend) {
    said.push(trans.__('Slices cannot be moved off it'));
  }
  return said;
}

/** A whole device in one sentence, without its parts. */
export function summary(trans: TranslationBundle, device: IDevice): string {
  const said = [
    trans.__('GPU %1', device.index),
    device.name,
    ...(unsaid(device) ? [trans.__('EMULATED')] : []),
    granted(trans, device),
    device.utilisation === null
      ? trans.__('utilisation not known')
      : utilisation(trans, device),
    ...notes(trans, device)
  ];
  return said.reduce((list, entry) => trans.__('%1, %2', list, entry));
}

/** One part of a bar, in full. */
export function partText(trans: TranslationBundle, shown: IPart): string {
  const size = bytes(shown.bytes);
  switch (shown.kind) {
    case 'free':
      return trans.__('Free: %1', size);
    case 'shut':
      return trans.__('Not granted to any kernel now: %1', size);
    case 'reserved':
      return trans.__('Reserved, never granted: %1', size);
    case 'foreign':
      return trans.__('Used outside every slice: %1', size);
    default:
  }
  const slice = shown.slice;
  if (slice === null) {
    return size;
  }
  const doing = activity(trans, slice.session);
  if (!slice.session.mine) {
    return trans.__(
      '%1: %2, %3',
      somebody(trans, slice.session),
      bytes(slice.bytes),
      doing
    );
  }
  const amount =
    slice.used === null
      ? trans.__('%1, used: ?', bytes(slice.bytes))
      : trans.__('%1 used', part(trans, slice.used, slice.bytes));
  const said = trans.__('%1 %2: %3, %4', slice.number, slice.name, amount, doing);
  if (!slice.session.here) {
    return trans.__('%1 (yours on another server)', said);
  }
  return slice.active ? trans.__('%1 (the open document)', said) : said;
}

/** `somebody (batch)`: the description of other people's sessions. */
export function somebody(trans: TranslationBundle, session: IAnySession): string {
  return session.priority
    ? trans.__('Somebody (%1)', session.priority)
    : trans.__('Somebody');
}

function activity(trans: TranslationBundle, session: IAnySession): string {
  switch (session.state) {
    case 'attaching':
      return trans.__('attaching');
    case 'idle':
      return trans.__('idle');
    case 'detaching':
      return trans.__('moving to host memory');
    default:
      return trans.__('at work');
  }
}
