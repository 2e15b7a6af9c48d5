// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import type { IOrder } from '../api';
import { byAdmin, orderText, pauseOf } from '../maintenance';
import { anOrder, aPool, trans } from './defaults';

const on = (device: string): IOrder => anOrder({ device });

describe('the order that stops all grants of slices', () => {
  it.each<[string, IOrder[], string | undefined]>([
    ['none', [], undefined],
    ['of the whole pool', [on('GPU-1'), on('')], ''],
    ['of one device of two', [on('GPU-1')], undefined],
    ['of each device', [on('GPU-1'), on('GPU-0')], 'GPU-1']
  ])('is %s', (_, maintenance, device) => {
    expect(pauseOf(aPool({ maintenance }))?.device).toBe(device);
  });

  it('there is no order if an older server sends none', () => {
    expect(pauseOf(aPool())).toBeNull();
    expect(pauseOf(null)).toBeNull();
  });
});

describe('an order in words', () => {
  it('the text of an order has the admin’s reason, if any', () => {
    expect(byAdmin(trans, on(''))).toBe(
      'the administrator has paused all GPUs (new driver)'
    );
    const drained = anOrder({ kind: 'drain', reason: '' });
    expect(byAdmin(trans, drained)).toBe('the administrator has drained all GPUs');
  });

  it('the text of an order names admin, time and reason', () => {
    expect(orderText(trans, on('GPU-1'), aPool(), '12:00')).toBe(
      'GPU 1 has been paused by the administrator (root) since 12:00: new driver'
    );
    const drained = anOrder({ kind: 'drain', device: '', reason: '' });
    expect(orderText(trans, drained, aPool(), '12:00')).toBe(
      'The pool has been drained by the administrator (root) since 12:00.'
    );
  });
});
