// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import { Arranger } from '../arrange';
import { device, GIB, mine, NOTHING, other, pool } from './fakes';

const names = (id: string) => ({ name: `${id}.ipynb`, path: `a/${id}.ipynb` });

describe('Arranger', () => {
  it('gives what did not change as the same object', () => {
    const arranger = new Arranger();
    const view = pool(
      [device(0), device(1)],
      [
        mine('a'),
        other('b', { devices: ['GPU-1'] }),
        mine('c', { ...NOTHING, state: 'queued', queue_position: 1 })
      ]
    );
    const before = arranger.arrange(view, names, null);
    const again = arranger.arrange({ ...view, now: 1 }, names, null);
    expect(again.rows).toBe(before.rows);
    expect(again.queue).toBe(before.queue);
    expect(again.kernels).toBe(before.kernels);
    expect(again.devices).toBe(before.devices);

    const busier = device(1, { utilisation: 90 });
    const after = arranger.arrange(
      { ...view, devices: [view.devices[0]!, busier] },
      names,
      null
    );
    expect(after.rows[0]).toBe(before.rows[0]);
    expect(after.rows[1]).not.toBe(before.rows[1]);
    expect(after.rows[1]!.slices).toBe(before.rows[1]!.slices);
    expect(after.kernels).toBe(before.kernels);
    expect(after.devices).toBe(before.devices);
  });

  it('changes what is drawn of a kernel with its name and the document in front', () => {
    const arranger = new Arranger();
    const view = pool([device(0)], [mine('a'), mine('b')]);
    const before = arranger.arrange(view, () => null, null);
    expect(before.kernels[0]!.name).toBe('label of a');
    const after = arranger.arrange(view, names, 'kernel-a');
    expect(after.kernels.map(row => [row.name, row.active])).toEqual([
      ['kernel-a.ipynb', true],
      ['kernel-b.ipynb', false]
    ]);
    expect(after.rows[0]!.slices.map(slice => slice.active)).toEqual([true, false]);
  });

  it('keeps the number of a kernel while it is there, and gives it again after', () => {
    const arranger = new Arranger();
    const numbers = (...ids: string[]) =>
      arranger
        .arrange(
          pool(
            [device(0)],
            ids.map(id => mine(id))
          ),
          names,
          null
        )
        .kernels.map(row => `${row.number} ${row.session.id}`);
    expect(numbers('a', 'b', 'c')).toEqual(['1 a', '2 b', '3 c']);
    expect(numbers('c', 'a')).toEqual(['1 a', '3 c']);
    expect(numbers('d', 'c', 'a')).toEqual(['1 a', '2 d', '3 c']);
    const restarted = mine('z', { kernel_id: 'kernel-c' });
    const { kernels } = arranger.arrange(pool([device(0)], [restarted]), names, null);
    expect(kernels[0]!.number).toBe(3);
  });

  it('counts who has a slice and who waits, in the order of the queue', () => {
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
      null
    );
    expect([having, waiting, suspended]).toEqual([1, 2, 3 * GIB]);
    expect(queue.map(row => row.session.id)).toEqual(['a', 'x']);
  });

  it('lists my kernels of other servers on the devices alone', () => {
    const { kernels, rows } = new Arranger().arrange(
      pool([device(0)], [mine('a', { here: false })]),
      () => null,
      null
    );
    expect(kernels).toEqual([]);
    expect(rows[0]!.slices[0]!.name).toBe('label of a');
  });
});
