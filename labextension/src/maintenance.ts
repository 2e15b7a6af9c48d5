// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** GPUs that admins have taken out of service, in words. Pure. */
import type { TranslationBundle } from '@jupyterlab/translation';

import type { IOrder, IPool } from './api';

/**
 * Return an admin's order if admins have taken all devices out of service; otherwise
 * null.
 */
export function pauseOf(view: IPool | null): IOrder | null {
  const orders = view?.maintenance ?? [];
  const whole = orders.find(order => order.device === '');
  if (whole !== undefined) {
    return whole;
  }
  const taken = new Set(orders.map(order => order.device));
  const devices = view?.devices ?? [];
  const all = devices.length > 0 && devices.every(device => taken.has(device.uuid));
  return (all && orders[0]) || null;
}

/** `the administrator has paused all GPUs (new driver)`, as a part of a sentence. */
export function byAdmin(trans: TranslationBundle, order: IOrder): string {
  const done =
    order.kind === 'pause'
      ? trans.__('the administrator has paused all GPUs')
      : trans.__('the administrator has drained all GPUs');
  return order.reason ? trans.__('%1 (%2)', done, order.reason) : done;
}

/**
 * Return a sentence about an order: which devices are out of service, since when and
 * why, and who gave the order.
 */
export function orderText(
  trans: TranslationBundle,
  order: IOrder,
  view: IPool,
  since: string
): string {
  const device = view.devices.find(one => one.uuid === order.device);
  const what = order.device
    ? trans.__('GPU %1', device?.index ?? '?')
    : trans.__('The pool');
  const done =
    order.kind === 'pause'
      ? trans.__('%1 has been paused by the administrator', what)
      : trans.__('%1 has been drained by the administrator', what);
  const said = trans.__('%1 (%2) since %3', done, order.by, since);
  return order.reason ? trans.__('%1: %2', said, order.reason) : trans.__('%1.', said);
}
