// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import type { IDevice } from '../../api';
import type { ISlice } from '../arrange';
import { Arranger } from '../arrange';
import { fill, parts, percent } from '../geometry';
import { device, GIB, mine, other, pool, random } from './fakes';

function slicesOf(
  on: IDevice,
  sessions: Parameters<typeof pool>[1]
): readonly ISlice[] {
  return new Arranger().arrange(pool([on], sessions), () => null, null, true).rows[0]!
    .slices;
}

function sum(values: readonly number[]): number {
  return values.reduce((a, b) => a + b, 0);
}

describe('parts', () => {
  it('the parts are shares of the memory, in the bar’s order', () => {
    const on = device(0, { memory_foreign: GIB });
    const shown = parts(on, slicesOf(on, [mine('a'), other('b')]));
    expect(shown.map(part => [part.kind, part.bytes / GIB, part.share])).toEqual([
      ['mine', 8, 0.5],
      ['other', 4, 0.25],
      ['foreign', 1, 0.0625],
      ['free', 2, 0.125],
      ['reserved', 1, 0.0625]
    ]);
  });

  it('an empty device has only free memory and the reserve', () => {
    expect(parts(device(0), []).map(part => part.kind)).toEqual(['free', 'reserved']);
  });

  it('the reserve shrinks first if the figures are too large', () => {
    const on = device(0, { memory_foreign: 4 * GIB });
    const tight = parts(on, slicesOf(on, [mine('a', { granted_bytes: 12 * GIB })]));
    expect(tight.map(part => part.kind)).toEqual(['mine', 'foreign']);
    const over = parts(on, slicesOf(on, [mine('a', { granted_bytes: 28 * GIB })]));
    expect(over.map(part => part.share)).toEqual([28 / 32, 4 / 32]);
  });

  it('a part has the size of the slice on its own device', () => {
    const two = [device(0), device(1)];
    const slices = [
      { device: 'GPU-0', granted_bytes: 8 * GIB, used_bytes: 6 * GIB },
      { device: 'GPU-1', granted_bytes: 2 * GIB, used_bytes: 0 }
    ];
    const view = pool(two, [mine('a', { devices: ['GPU-0', 'GPU-1'], slices })]);
    const { rows } = new Arranger().arrange(view, () => null, null, true);
    const shown = rows.map(row => parts(row.device, row.slices)[0]!);
    expect(shown.map(part => [part.bytes / GIB, fill(part.slice!)])).toEqual([
      [8, 0.75],
      [2, 0]
    ]);
  });

  it('a device out of service has no free memory', () => {
    const on = device(0, { drained_reason: 'The admin took it out.' });
    expect(parts(on, slicesOf(on, [mine('a')])).map(part => part.kind)).toEqual([
      'mine',
      'shut',
      'reserved'
    ]);
  });

  it('the shares of the parts sum to 1 for any figures', () => {
    const next = random(4);
    const states = ['attaching', 'active', 'idle', 'detaching'] as const;
    for (let round = 0; round < 500; round++) {
      const count = 1 + next(4);
      const devices = Array.from({ length: count }, (_, i) =>
        device(i, {
          memory_total: next(3) === 0 ? 0 : next(80 * GIB),
          memory_capacity: next(90 * GIB),
          memory_foreign: next(2) * next(40 * GIB)
        })
      );
      const sessions = Array.from({ length: next(9) }, (_, i) => {
        const changed = {
          state: states[next(4)]!,
          granted_bytes: next(60 * GIB),
          devices: devices.slice(0, 1 + next(count)).map(found => found.uuid)
        };
        return next(2) ? mine(`${i}`, changed) : other(`${i}`, changed);
      });
      const { rows } = new Arranger().arrange(
        pool(devices, sessions),
        () => null,
        null,
        true
      );
      for (const row of rows) {
        const shown = parts(row.device, row.slices);
        const shares = shown.map(part => part.share);
        expect(shares.every(share => share > 0 && share <= 1)).toBe(true);
        expect(sum(shares)).toBeCloseTo(shown.length === 0 ? 0 : 1, 9);
        expect(sum(shares.map(share => parseFloat(percent(share))))).toBeLessThan(
          100.0001
        );
        expect(new Set(shown.map(part => part.key)).size).toBe(shown.length);
      }
    }
  });
});

describe('fill', () => {
  const slice = slicesOf(device(0), [mine('a')])[0]!;

  it('the fill is unknown if the use is unknown', () => {
    expect(fill({ ...slice, used: null })).toBeNull();
  });

  it('the fill is never more than the slice', () => {
    expect(fill({ ...slice, used: 9 * GIB })).toBe(1);
    expect(fill({ ...slice, used: 0 })).toBe(0);
  });
});
