// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import { GIB, NOW, trans } from '../../__tests__/defaults';
import { MOST_MINUTES, readMinutes } from '../orders';
import { duration, row, rows, stateText, wasteText } from '../rows';
import { session, view } from './sessions';

describe('rows', () => {
  const hog = session({
    id: 'bb',
    owner: 'bob',
    label: 'hog.ipynb',
    state: 'idle',
    granted_bytes: 8 * GIB,
    busy_seconds: 0.5,
    counted_seconds: 700,
    idle_since: NOW - 600
  });
  const waits = session({
    id: 'cc',
    state: 'queued',
    granted_bytes: 0,
    devices: [],
    busy_seconds: null,
    counted_seconds: 0,
    queued_at: NOW - 40
  });
  const ids = (...args: Parameters<typeof rows>) =>
    rows(...args).map(found => found.session.id);

  it('rows can be sorted by waste, which is size times unused time', () => {
    expect(ids(view([waits, session(), hog]), 'waste', false)).toEqual([
      'bb',
      'aa',
      'cc'
    ]);
    expect(wasteText(trans, row(hog, NOW))).toBe('8 GiB for 12 min');
  });

  it('rows with unknown figures come last in both orders', () => {
    const all = view([waits, session(), hog]);
    expect(ids(all, 'busy', false)).toEqual(['aa', 'bb', 'cc']);
    expect(ids(all, 'busy', true)).toEqual(['bb', 'aa', 'cc']);
    expect(ids(all, 'name', false)).toEqual(['bb', 'aa', 'cc']);
  });

  it('rows show only figures that are known', () => {
    const unknown = row(session({ busy_seconds: null, used_bytes: null }), NOW);
    expect([unknown.busy, unknown.waste, unknown.used]).toEqual([null, null, null]);
    expect(wasteText(trans, unknown)).toBe('not known');
    expect([row(waits, NOW).waits, row(hog, NOW).idle]).toEqual([40, 600]);
    expect(stateText(trans, row(waits, NOW))).toBe('Waits for 4 GiB');
    const two = { ...waits, request: { memory: GIB, devices: 2 } };
    expect(stateText(trans, row(two, NOW))).toBe('Waits for 1 GiB on each of 2 GPUs');
    const away = session({ state: 'detached', suspended_bytes: 3 * GIB });
    expect(stateText(trans, row(away, NOW))).toBe('In host memory: 3 GiB');
  });

  it.each([
    [0, '0 s'],
    [89, '89 s'],
    [90, '2 min'],
    [5400, '1.5 h'],
    [7200, '2 h']
  ])('rows show %d seconds as %s', (seconds, text) => {
    expect(duration(trans, seconds)).toBe(text);
  });
});

describe('readMinutes', () => {
  it.each(['', ' ', '0', '-5', '+5', 'ten', '5 min', '1.5', '1e3', 'NaN', '10081'])(
    'the text %p is no number of minutes',
    text => {
      expect(readMinutes(text)).toBeNull();
    }
  );

  it.each([
    ['1', 1],
    [' 5 ', 5],
    ['10080', MOST_MINUTES]
  ])('the text %p is a number of minutes', (text, value) => {
    expect(readMinutes(text)).toBe(value);
  });
});
