// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import { act, render, screen, within } from '@testing-library/react';
import * as React from 'react';

import { PoolError } from '../../api';
import type { IMachine, IMachines, IPool } from '../../api';
import { History } from '../../history';
import { INTERVAL } from '../../machines';
import { Ticker } from '../../ticker';
import { Machines } from '../machines';
import type { ITools } from '../tools';
import { Tools } from '../tools';
import { FakeModel, FakePast, GIB, history as aHistory, pool, trans } from './fakes';

const machine = (name: string, more: Partial<IMachine> = {}): IMachine => ({
  ...{ name, here: false, state: 'reachable', age: 0.4, devices: 1, out: 0 },
  ...{ free: 11 * GIB, waiting: 0, mine: 0 },
  gpus: [{ name: 'NVIDIA A100', free: 11 * GIB }],
  ...more
});

const cluster = (
  machines: readonly IMachine[],
  more: Partial<IMachines> = {}
): IMachines => ({ connected: true, left_out: 0, machines, ...more });

function show(machines: IMachines | null) {
  const past = Object.assign(new FakePast(), { machines });
  const tools = {
    ...{ trans, past, model: new FakeModel(null), ticker: new Ticker() },
    folded: new Set<string>()
  } as unknown as ITools;
  render(
    <Tools.Provider value={tools}>
      <Machines />
    </Tools.Provider>
  );
  return past;
}

const rows = () =>
  within(screen.getByRole('region', { name: 'Machines' }))
    .getAllByRole('listitem')
    .map(row => [...row.children].map(part => part.textContent));

describe('the machines of a cluster', () => {
  it('machines are not shown without a cluster', () => {
    const past = show(null);
    expect(screen.queryByRole('region')).toBeNull();
    act(() => {
      past.machines = cluster([], { connected: null });
      past.changed.emit();
    });
    expect(screen.queryByRole('region')).toBeNull();
  });

  it('a machine shows GPUs, free memory, queue and my kernels', () => {
    const gpus = [
      { name: 'NVIDIA A100', free: 3 * GIB },
      { name: 'NVIDIA A100', free: 8 * GIB },
      { name: 'NVIDIA L4', free: 0 }
    ];
    const many = { devices: 4, out: 1, gpus, waiting: 3, mine: 2 };
    show(cluster([machine('gpu1', { here: true, mine: 1 }), machine('gpu2', many)]));
    expect(rows()).toEqual([
      [
        'gpu1 (this machine)reachable',
        '1 × NVIDIA A100 · 11 GiB free · nobody waits · 1 kernel of yours'
      ],
      [
        'gpu2reachable',
        '2 × NVIDIA A100 · 1 × NVIDIA L4 · 1 out of service · 11 GiB free · ' +
          'at most 8 GiB on one GPU · 3 kernels wait · 2 kernels of yours'
      ]
    ]);
  });

  it('a machine shows its state in words, not only by a colour', () => {
    const states = ['unreachable', 'draining', 'left', 'gone'] as const;
    show(cluster(states.map(state => machine(state, { state, age: 42 }))));
    expect(rows().map(([head]) => head)).toEqual([
      'unreachableunreachable for 42 s',
      'drainingdraining: no new slices',
      'lefthas left the cluster',
      'gonefenced by an administrator'
    ]);
  });

  it('a machine does not show an unknown figure as 0', () => {
    const nothing = { devices: null, out: null, free: null, waiting: null, gpus: null };
    show(
      cluster([
        machine('gpu1', { ...nothing, mine: null }),
        machine('gpu2', { gpus: null, mine: null, devices: 8 })
      ])
    );
    expect(rows().map(([, text]) => text)).toEqual([
      'Its GPUs are not known.',
      '8 GPUs · 11 GiB free · nobody waits · your kernels: not known'
    ]);
  });

  it('notes report a silent ledger and omitted machines', () => {
    show(cluster([machine('gpu1', { here: true })], { connected: false, left_out: 2 }));
    within(screen.getByRole('status')).getByText(
      /ledger does not answer, so only this/
    );
    screen.getByText('2 more machines are not shown.');
  });
});

describe('the requests for the machines', () => {
  beforeEach(() => void jest.useFakeTimers());
  afterEach(() => void jest.useRealTimers());

  function watch(view: IPool) {
    const model = new FakeModel(view);
    let asked = 0;
    const answer: { fails: boolean } = { fails: false };
    Object.assign(model.client, {
      machines: () => {
        asked += 1;
        return answer.fails
          ? Promise.reject(new PoolError('busy', 'Busy.', '', 503))
          : Promise.resolve(cluster([machine('gpu1')]));
      }
    });
    Object.assign(model.client, {
      history: () => Promise.resolve(aHistory()),
      hour: () => Promise.reject(new PoolError('old', '', '', 404))
    });
    const history = new History(model);
    return { model, history, answer, asked: () => asked };
  }

  it('requests are sent only in a cluster while a widget is shown', async () => {
    const { model, history, answer, asked } = watch(pool([]));
    const hold = history.hold();
    await jest.advanceTimersByTimeAsync(3 * INTERVAL);
    expect(asked()).toBe(0);
    model.change(pool([], [], { clustered: true }));
    await jest.advanceTimersByTimeAsync(INTERVAL + 100);
    expect(asked()).toBe(2);
    expect(history.machines?.machines).toHaveLength(1);
    answer.fails = true;
    await jest.advanceTimersByTimeAsync(INTERVAL);
    expect(history.machines).toBeNull();
    answer.fails = false;
    await jest.advanceTimersByTimeAsync(60_000);
    expect(history.machines).not.toBeNull();
    model.broker = { status: 'away', message: '', nextStep: '' };
    model.change(model.view);
    expect(history.machines).toBeNull();
    model.broker = { status: 'up', message: '', nextStep: '' };
    model.change(model.view);
    await jest.advanceTimersByTimeAsync(100);
    expect(history.machines).not.toBeNull();
    hold.dispose();
    const before = asked();
    await jest.advanceTimersByTimeAsync(5 * INTERVAL);
    expect(asked()).toBe(before);
    history.dispose();
  });

  it('one request is sent for each view while no kernel is open', async () => {
    const { model, history, answer, asked } = watch(pool([], [], { clustered: true }));
    model.live = false;
    answer.fails = true;
    const hold = history.hold();
    await jest.advanceTimersByTimeAsync(5 * INTERVAL);
    expect(asked()).toBe(1);
    model.change(model.view);
    expect(asked()).toBe(1);
    answer.fails = false;
    model.change(pool([], [], { clustered: true }));
    await jest.advanceTimersByTimeAsync(5 * INTERVAL);
    expect(asked()).toBe(2);
    expect(history.machines).not.toBeNull();
    hold.dispose();
    history.hold().dispose();
    expect(asked()).toBe(3);
    history.dispose();
  });
});
