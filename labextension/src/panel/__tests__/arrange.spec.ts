// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import type { ISession } from '../../api';
import { Arranger } from '../arrange';
import { device, GIB, mine, NOTHING, other, pool } from './fakes';

const names = (id: string) => ({ name: `${id}.ipynb`, path: `a/${id}.ipynb` });

describe('Arranger', () => {
  it('the arranger returns unchanged parts as the same objects', () => {
    const arranger = new Arranger();
    const view = pool(
      [device(0), device(1)],
      [
        mine('a'),
        other('b', { devices: ['GPU-1'] }),
        mine('c', { ...NOTHING, state: 'queued', queue_position: 1 })
      ]
    );
    const before = arranger.arrange(view, names, null, true);
    const again = arranger.arrange({ ...view, now: 1 }, names, null, true);
    expect(again.rows).toBe(before.rows);
    expect(again.queue).toBe(before.queue);
    expect(again.kernels).toBe(before.kernels);
    expect(again.devices).toBe(before.devices);

    const busier = device(1, { utilisation: 90 });
    const after = arranger.arrange(
      { ...view, devices: [view.devices[0]!, busier] },
      names,
      null,
      true
    );
    expect(after.rows[0]).toBe(before.rows[0]);
    expect(after.rows[1]).not.toBe(before.rows[1]);
    expect(after.rows[1]!.slices).toBe(before.rows[1]!.slices);
    expect(after.kernels).toBe(before.kernels);
    expect(after.devices).toBe(before.devices);
  });

  it('a row changes if its name or the front document changes', () => {
    const arranger = new Arranger();
    const view = pool([device(0)], [mine('a'), mine('b')]);
    const before = arranger.arrange(view, () => null, null, true);
    expect(before.kernels[0]!.name).toBe('label of a');
    const after = arranger.arrange(view, names, 'kernel-a', true);
    expect(after.kernels.map(row => [row.name, row.active])).toEqual([
      ['kernel-a.ipynb', true],
      ['kernel-b.ipynb', false]
    ]);
    expect(after.rows[0]!.slices.map(slice => slice.active)).toEqual([true, false]);
  });

  it('a kernel keeps its number, and a new kernel gets a free one', () => {
    const arranger = new Arranger();
    const numbers = (...ids: string[]) =>
      arranger
        .arrange(
          pool(
            [device(0)],
            ids.map(id => mine(id))
          ),
          names,
          null,
          true
        )
        .kernels.map(row => `${row.number} ${row.session.id}`);
    expect(numbers('a', 'b', 'c')).toEqual(['1 a', '2 b', '3 c']);
    expect(numbers('c', 'a')).toEqual(['1 a', '3 c']);
    expect(numbers('d', 'c', 'a')).toEqual(['1 a', '2 d', '3 c']);
    const restarted = mine('z', { kernel_id: 'kernel-c' });
    const { kernels } = arranger.arrange(
      pool([device(0)], [restarted]),
      names,
      null,
      true
    );
    expect(kernels[0]!.number).toBe(3);
  });

  it('the arranger counts slices and waits, and sorts the queue', () => {
    const waits = { ...NOTHING, state: 'queued' } as const;
    const { having, waiting, queue, suspended } = new Arranger().arrange(
      pool(
        [device(0)],
        [
          other('x', { ...NOTHING, state: 'queued', queue_position: 2 }),
          mine('a', { ...waits, queue_position: 1, suspended_bytes: 2 * GIB }),
          mine('b'),
          mine('c', { ...NOTHING, state: 'detached', suspended_bytes: GIB })
        ]
      ),
      names,
      null,
      true
    );
    expect([having, waiting, suspended]).toEqual([1, 2, 3 * GIB]);
    expect(queue.map(row => row.session.id)).toEqual(['a', 'x']);
  });

  it('the arranger lists my kernels of other servers separately', () => {
    const { kernels, elsewhere, rows } = new Arranger().arrange(
      pool([device(0)], [mine('a', { here: false })]),
      () => null,
      null,
      true
    );
    expect(kernels).toEqual([]);
    expect(elsewhere.map(row => [row.number, row.name])).toEqual([[1, 'label of a']]);
    expect(rows[0]!.slices[0]!.name).toBe('label of a');
  });

  it('no kernel of this server is shown if the model is not live', () => {
    const view = pool(
      [device(0)],
      [
        mine('a', { suspended_bytes: GIB }),
        mine('q', { ...NOTHING, state: 'queued', queue_position: 1 }),
        mine('e', { here: false }),
        other('b')
      ]
    );
    const arranger = new Arranger();
    const before = arranger.arrange(view, names, null, true);
    expect([before.having, before.waiting, before.suspended]).toEqual([3, 1, GIB]);
    const after = arranger.arrange(view, names, null, false);
    expect([after.having, after.waiting, after.suspended]).toEqual([2, 0, 0]);
    expect(after.kernels).toEqual([]);
    expect(after.rows[0]!.slices.map(slice => slice.session.id)).toEqual(['e', 'b']);
    expect(after.elsewhere).toBe(before.elsewhere);
  });

  it('the arranger shows the bytes of a session on each device', () => {
    const grown = mine('a', {
      granted_bytes: 10 * GIB,
      used_bytes: 7 * GIB,
      devices: ['GPU-0', 'GPU-1', 'GPU-2'],
      slices: [
        { device: 'GPU-0', granted_bytes: 8 * GIB, used_bytes: 7 * GIB },
        { device: 'GPU-1', granted_bytes: 2 * GIB, used_bytes: null },
        { device: 'GPU-2', granted_bytes: 0, used_bytes: 0 }
      ]
    });
    const view = pool([device(0), device(1), device(2)], [grown]);
    const { rows } = new Arranger().arrange(view, names, null, true);
    expect(
      rows.map(row => row.slices.map(slice => [slice.bytes / GIB, slice.used]))
    ).toEqual([[[8, 7 * GIB]], [[2, null]], []]);
  });

  it('a session has a separate slice in the row of each device', () => {
    const has = (first: number) =>
      mine('a', {
        devices: ['GPU-0', 'GPU-1'],
        slices: [
          { device: 'GPU-0', granted_bytes: first, used_bytes: GIB },
          { device: 'GPU-1', granted_bytes: GIB, used_bytes: GIB }
        ]
      });
    const arranger = new Arranger();
    const devices = [device(0), device(1)];
    const one = has(GIB);
    const before = arranger.arrange(pool(devices, [one]), names, null, true);
    const again = arranger.arrange(pool(devices, [one]), names, null, true);
    expect(again.rows).toBe(before.rows);
    const after = arranger.arrange(pool(devices, [has(2 * GIB)]), names, null, true);
    expect(after.rows[0]!.slices[0]!.bytes).toBe(2 * GIB);
    expect(after.rows[1]!.slices[0]!.bytes).toBe(GIB);
  });

  it('the arranger adds no figures that an older server omits', () => {
    const { slices, ...old } = mine('a', { devices: ['GPU-0', 'GPU-1'] });
    expect(slices).toHaveLength(2);
    const view = pool([device(0), device(1)], [old as ISession]);
    const { rows } = new Arranger().arrange(view, names, null, true);
    expect(rows[1]!.slices.map(slice => [slice.bytes, slice.used])).toEqual([
      [4 * GIB, null]
    ]);
  });

  it('a kernel on another machine is listed only in "My kernels"', () => {
    // Emulated devices on two machines may have the same UUID, such as `GPU-0` here.
    const far = { machine: 'gpu2', suspended_bytes: GIB } as const;
    const view = pool(
      [device(0)],
      [
        mine('a', { ...far, devices: ['GPU-0'] }),
        mine('b', { ...far, ...NOTHING, state: 'queued', queue_position: 1 }),
        mine('c', { devices: ['GPU-0'], suspended_bytes: 0 })
      ]
    );
    const found = new Arranger().arrange(view, names, null, true);
    expect(found.kernels.map(row => row.session.id)).toEqual(['a', 'b', 'c']);
    expect(found.rows[0]!.slices.map(slice => slice.session.id)).toEqual(['c']);
    expect([found.queue.length, found.having, found.suspended]).toEqual([0, 1, 0]);
  });
});
