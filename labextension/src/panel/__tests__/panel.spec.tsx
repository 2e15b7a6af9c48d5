// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import {
  act,
  cleanup,
  fireEvent,
  render,
  screen,
  within
} from '@testing-library/react';
import * as React from 'react';

import type { IPool } from '../../api';
import { PoolError } from '../../api';
import * as words from '../../words';
import { Arranger } from '../arrange';
import * as describing from '../describe';
import { OLD, OLD_REFUSAL, READ } from '../../toolbar/hooks';
import { Panel } from '../panel';
import { Ticker } from '../../ticker';
import {
  anOrder,
  device,
  FakeModel,
  FakePast,
  FakeSettings,
  GIB,
  history,
  mine,
  NOTHING,
  NOW,
  other,
  pool,
  trans
} from './fakes';

function show(
  view: IPool | null,
  changed: Partial<FakeModel> = {},
  folded = new Set<string>()
) {
  const model = Object.assign(new FakeModel(view), changed);
  const past = new FakePast();
  const opened: string[] = [];
  const ticker = new Ticker();
  ticker.shown = true;
  const open = (id: string) => void opened.push(id);
  const settings = new FakeSettings();
  const shutDown = (id: string) => {
    opened.push(`shut down ${id}`);
    return Promise.resolve({ note: 'The kernel has ended.' });
  };
  const gone: string[] = [];
  const links = () => [{ label: 'All sessions', go: () => void gone.push('admin') }];
  const tools = {
    ...{ trans, model, past, settings, ticker, open, folded },
    ...{ shutDown, links }
  };
  const arranger = new Arranger();
  const names = (id: string) => ({
    ...{ name: `${id}.ipynb`, path: `a/${id}.ipynb` },
    closed: id === 'kernel-b'
  });
  const element = () => (
    <Panel
      tools={tools}
      view={model.view}
      broker={model.broker}
      live={model.live}
      found={model.found}
      arranged={
        model.view && arranger.arrange(model.view, names, 'kernel-a', model.live)
      }
    />
  );
  const { rerender, container } = render(element());
  return {
    gone,
    model,
    past,
    settings,
    opened,
    container,
    again: (next: IPool | null) => {
      model.view = next;
      rerender(element());
    }
  };
}

/** Matches the pictures of devices, but not the graphs of the last minutes. */
const BARS = { name: /^GPU \d+, / };
const region = (name: string) => within(screen.getByRole('region', { name }));
/**
 * The text for the time of day that is `seconds` after now, on this machine's clock.
 */
const clockAt = (seconds: number) =>
  words.timeOfDay(trans, new Date(Date.now() + seconds * 1000));
const queued = { ...NOTHING, state: 'queued' } as const;

/**
 * The time at which each test starts. It is fixed, because the text of a time depends
 * on the day and the minute.
 */
const NOON = new Date(2026, 10, 21, 12, 0, 30);

beforeEach(() => {
  jest.useFakeTimers({
    now: NOON,
    doNotFake: [
      'cancelAnimationFrame',
      'clearImmediate',
      'clearInterval',
      'clearTimeout',
      'nextTick',
      'performance',
      'queueMicrotask',
      'requestAnimationFrame',
      'setImmediate',
      'setInterval',
      'setTimeout'
    ]
  });
});

afterEach(() => {
  jest.useRealTimers();
});

describe('the header', () => {
  it('the header gives the state of the pool in one sentence', () => {
    const waits = mine('w', { ...queued, queue_position: 1 });
    show(pool([device(0), device(1)], [mine('a'), other('b'), waits]));
    screen.getByText('2 GPUs · 2 kernels have a slice · 1 waits');
    expect(screen.queryByText('EMULATED')).toBeNull();
    expect(screen.queryByRole('button', { name: 'Refresh' })).toBeNull();
  });

  it('the header shows what is out of service, since when and why', () => {
    const more = {
      maintenance: [anOrder(), anOrder({ device: 'GPU-1', closed: false })]
    };
    show(pool([device(0), device(1)], [], more));
    const notices = within(screen.getByRole('list', { name: 'Notices' }));
    const [whole, one] = notices.getAllByRole('listitem');
    expect(whole!.textContent).toBe(
      `The pool has been paused by the administrator (root) since ${clockAt(-600)}: new driver`
    );
    expect(one!.textContent).toMatch(/^GPU 1 has been paused by .* finish their work/);
  });

  it('a notice says that broker and server options differ', () => {
    const configuration_notice = 'In force: c.GPUPool.idle_timeout is 5 s.';
    const { again } = show(pool([device(0)], [], { configuration_notice }));
    const notices = within(screen.getByRole('list', { name: 'Notices' }));
    notices.getByText('Another configuration is in force');
    notices.getByText(configuration_notice);
    again(pool([device(0)], [], { configuration_notice: '' }));
    expect(screen.queryByRole('list', { name: 'Notices' })).toBeNull();
  });

  it('the header and the bars mark emulated devices', () => {
    show(pool([device(0, { emulated: true })], [], { emulated: true }));
    expect(screen.getAllByText('EMULATED')).toHaveLength(2);
    screen.getByRole('img', { name: /^GPU 0, NVIDIA A100, EMULATED, / });
  });

  it('the header says why the broker is away and what happens', () => {
    const broker = {
      status: 'away',
      message: 'It was stopped.',
      nextStep: 'Start it.'
    } as const;
    const { again } = show(pool([device(0)]), { broker });
    const banner = within(
      screen.getByText('No answer from the GPU pool').parentElement!
    );
    banner.getByText('It was stopped.');
    banner.getByText('Start it.');
    banner.getByText('This panel tries again by itself.');
    screen.getByText(`Last update: ${clockAt(0)}.`);
    screen.getByRole('img', BARS);
    // A kernel runs, so the chip in its toolbar announces that the broker is away. The
    // panel does not announce it a second time.
    expect(banner.queryByRole('status')).toBeNull();
    expect(screen.queryByRole('alert')).toBeNull();
    again(null);
    screen.getByText('No answer from the GPU pool');
    expect(screen.queryByRole('region')).toBeNull();
  });

  it('the header announces no retry if the page does not retry', () => {
    const broker = { status: 'away', message: 'Off.', nextStep: '' } as const;
    show(null, { broker, live: false });
    // No kernel runs, so no toolbar announces that the broker is away. The panel
    // announces it.
    within(screen.getByRole('status')).getByText('No answer from the GPU pool');
    expect(screen.queryByText('This panel tries again by itself.')).toBeNull();
    screen.getByRole('button', { name: 'Refresh' });
  });

  it('the header does not warn while no kernel needs a broker', () => {
    const broker = {
      status: 'away',
      message: 'No GPU pool broker listens.',
      nextStep: 'Start one.',
      code: 'no-broker'
    } as const;
    const { container } = show(null, { broker, live: false });
    screen.getByText('The pool starts when the first Pooled GPU kernel starts.');
    expect(screen.queryByText('No answer from the GPU pool')).toBeNull();
    expect(container.querySelector('.jp-gpupool-alert')).toBeNull();
    screen.getByRole('button', { name: 'Refresh' });
  });

  it('the header warns of a missing broker and of a fault', () => {
    const away = { status: 'away', message: '', nextStep: '' } as const;
    show(null, { broker: { ...away, code: 'no-broker' } });
    screen.getByText('No answer from the GPU pool');
    cleanup();
    show(null, { broker: { ...away, code: 'bad-socket' }, live: false });
    screen.getByText('No answer from the GPU pool');
  });

  it('the header explains that there is no GPU', () => {
    show(pool([], [], { problem: 'No driver: `jupyter gpupool doctor`.' }));
    screen.getByText('No GPU found');
    expect(screen.getByText('jupyter gpupool doctor').tagName).toBe('CODE');
    screen.getByText(
      'Kernels of the pool cannot start on this machine, but other kernels can.'
    );
    expect(screen.queryByRole('region', { name: 'Devices' })).toBeNull();
    screen.getByRole('region', { name: 'Host memory' });
  });

  it('the header says that pooled kernels run on other machines', () => {
    const remote_kernels = { 'kernel-a': 'gpu2' };
    show(pool([], [], { problem: 'No driver.', remote_kernels }));
    screen.getByText('No GPU on this machine');
    screen.getByText(
      'Your pooled kernels run on other machines and use the GPUs there.'
    );
    expect(screen.queryByText('No GPU found')).toBeNull();
  });

  it('the header explains a missing GPU before the first request', () => {
    show(null, {
      live: false,
      found: { found: false, reason: 'No /dev/nvidia0.', emulated: false }
    });
    screen.getByText('No /dev/nvidia0.');
  });

  it('the header explains a missing GPU, not the missing broker', () => {
    const found = { found: false, reason: 'No /dev/nvidia0.', emulated: false };
    const broker = { status: 'away', message: 'No socket.', nextStep: '' } as const;
    show(null, { live: false, found, broker });
    screen.getByText('No GPU found');
    expect(screen.queryByText('No answer from the GPU pool')).toBeNull();
  });

  it('the header says that the user has no access to the pool', () => {
    const found = { found: false, reason: 'No /dev/nvidia0.', emulated: false };
    const broker = {
      status: 'away',
      message: 'No.',
      nextStep: '',
      denied: true
    } as const;
    show(null, { live: false, found, broker });
    screen.getByText('No access to the GPU pool');
  });

  it('the header shows the view’s age, and fetches on demand', async () => {
    // The view is 900 s old: the broker's clock now shows `NOW + 900`.
    const { model } = show(pool([device(0)]), { live: false, time: NOW + 900 });
    screen.getByText(`Last update: ${clockAt(-900)}.`);
    screen.getByText(/^No Pooled GPU kernel is open\./);
    expect(model.refreshed).toBe(0);
    await act(async () => {
      fireEvent.click(screen.getByRole('button', { name: 'Refresh' }));
      await Promise.resolve();
    });
    expect(model.refreshed).toBe(1);
  });

  it('the header says that it is asking the pool', () => {
    show(null);
    screen.getByText('Asking the pool…');
  });
});

describe('devices', () => {
  it.each([1, 2, 8])('the panel shows %d devices as full bars', count => {
    show(pool(Array.from({ length: count }, (_, i) => device(i))));
    expect(screen.getAllByRole('img', BARS)).toHaveLength(count);
  });

  it.each([9, 16, 64])('the panel shows %d devices as a grid that unfolds', count => {
    const devices = Array.from({ length: count }, (_, i) => device(i));
    const { opened } = show(pool(devices, [mine('a', { devices: ['GPU-8'] })]));
    expect(screen.queryByRole('img', BARS)).toBeNull();
    const cells = region('Devices').getAllByRole('button', { name: /^GPU \d+,/ });
    expect(cells).toHaveLength(count);
    expect(cells.map(cell => cell.tabIndex).filter(index => index === 0)).toHaveLength(
      1
    );
    expect(cells[8]!.getAttribute('aria-label')).toContain(
      '1 kernel-a.ipynb: 6 of 8 GiB used, in use (the open document)'
    );
    fireEvent.click(cells[8]!);
    expect(cells[8]!.getAttribute('aria-expanded')).toBe('true');
    screen.getByRole('img', { name: /^GPU 8,/ });
    fireEvent.click(cells[8]!);
    expect(screen.queryByRole('img', BARS)).toBeNull();
    fireEvent.click(screen.getByRole('button', { name: 'Show each GPU' }));
    expect(screen.getAllByRole('img', BARS)).toHaveLength(count);
    expect(opened).toEqual([]);
  });

  it('devices are in groups, one for each kind', () => {
    const devices = Array.from({ length: 12 }, (_, i) =>
      device(i, i < 4 ? { name: 'NVIDIA H100' } : { memory_granted: GIB })
    );
    show(pool(devices));
    expect(screen.getByRole('list', { name: 'NVIDIA H100' }).children).toHaveLength(4);
    expect(screen.getByRole('list', { name: 'NVIDIA A100' }).children).toHaveLength(8);
    screen.getByText('0 of 4 in use · 16 GiB');
    screen.getByText('8 of 8 in use · 16 GiB');
  });

  it('arrow keys move the focus between devices in the grid', () => {
    show(pool(Array.from({ length: 9 }, (_, i) => device(i))));
    const cells = region('Devices').getAllByRole('button', { name: /^GPU \d+,/ });
    act(() => cells[0]!.focus());
    fireEvent.keyDown(cells[0]!, { key: 'ArrowRight' });
    expect(document.activeElement).toBe(cells[1]);
    fireEvent.keyDown(cells[1]!, { key: 'End' });
    expect(document.activeElement).toBe(cells[8]);
    fireEvent.keyDown(cells[8]!, { key: 'ArrowRight' });
    expect(document.activeElement).toBe(cells[8]);
    expect([cells[0]!.tabIndex, cells[8]!.tabIndex]).toEqual([-1, 0]);
  });

  it('a device has a picture, and below it a line for each part', () => {
    const memory = { memory_granted: 12 * GIB, memory_foreign: GIB };
    const on = device(0, { ...memory, memory_free: 2 * GIB });
    const idle = { state: 'idle', granted_bytes: 4 * GIB } as const;
    const { opened } = show(pool([on], [mine('a'), other('b', idle)]));
    const bar = screen.getByRole('img', BARS);
    expect(bar.getAttribute('aria-label')).toBe(
      [
        'GPU 0, NVIDIA A100, 12 of 15 GiB in slices, 2 GiB free, 43 % busy',
        '1 kernel-a.ipynb: 6 of 8 GiB used, in use (the open document)',
        'Another user (batch): 4 GiB, idle',
        'Used outside the pool: 1 GiB',
        'Free: 2 GiB',
        'Reserved for the driver: 1 GiB'
      ].join('; ')
    );
    expect([...bar.children].map(part => (part as HTMLElement).style.width)).toEqual([
      '50%',
      '25%',
      '6.25%',
      '12.5%',
      '6.25%'
    ]);
    screen.getByText('12 of 15 GiB in slices, 2 GiB free');
    const lines = within(screen.getByRole('list', { name: 'On GPU 0' }));
    expect(lines.getAllByRole('listitem').map(line => line.textContent)).toEqual([
      '1kernel-a.ipynb6 of 8 GiB used · in use',
      'Another user (batch)4 GiB · idle',
      'Used outside the pool: 1 GiB'
    ]);
    fireEvent.click(lines.getByRole('button', { name: 'kernel-a.ipynb' }));
    expect(opened).toEqual(['kernel-a']);
  });

  it('an admin sees the owners of others’ slices', () => {
    const named = other('b', { owner: 'bob', label: 'fit.ipynb' });
    show(pool([device(0)], [named, other('c', { owner: 'other' })]));
    const lines = within(screen.getByRole('list', { name: 'On GPU 0' }));
    expect(lines.getAllByRole('listitem').map(line => line.textContent)).toEqual([
      'fit.ipynb (bob)4 GiB · in use',
      'Another user (batch)4 GiB · in use'
    ]);
  });

  it('a device shows that it is drained, and its limits', () => {
    show(
      pool([
        device(0, { drained_reason: 'The admin took it out.' }),
        device(1, { tier: 'unguarded', can_suspend: false })
      ])
    );
    screen.getByText('Not used: The admin took it out.');
    screen.getByText('The pool does not enforce the size of slices on this GPU.');
    screen.getByText(
      'A kernel keeps its slice of this GPU until the kernel frees its GPU memory.'
    );
    screen.getByRole('img', { name: /^GPU 0,.*; Out of service: 15 GiB;/ });
    screen.getByRole('img', { name: /^GPU 1,.*; Free: 15 GiB;/ });
  });

  it('each device shows the session’s slice on that device', () => {
    const slices = [
      { device: 'GPU-0', granted_bytes: 8 * GIB, used_bytes: 6 * GIB },
      { device: 'GPU-1', granted_bytes: 2 * GIB, used_bytes: null }
    ];
    show(
      pool([device(0), device(1)], [mine('a', { devices: ['GPU-0', 'GPU-1'], slices })])
    );
    screen.getByRole('img', {
      name: /^GPU 0,.*; 1 kernel-a.ipynb: 6 of 8 GiB used, in use/
    });
    screen.getByRole('img', { name: /^GPU 1,.*; 1 kernel-a.ipynb: 2 GiB, in use/ });
  });

  it('a device shows no number for an unknown figure', () => {
    const { container } = show(
      pool([device(0, { utilisation: null })], [mine('a', { used_bytes: null })])
    );
    screen.getByText('busy: not known');
    screen.getByRole('img', { name: /; 1 kernel-a.ipynb: 8 GiB, in use/ });
    expect(container.querySelector('.jp-gpupool-bar .jp-gpupool-used')).toBeNull();
    expect(screen.queryByText(/\b0 %/)).toBeNull();
  });
});

describe('the queue', () => {
  const waits = (id: string, place: number) =>
    mine(id, { ...queued, queue_position: place, label: `${id}.ipynb` });

  it('the queue offers buttons for my waiting kernels', async () => {
    const plan = {
      ...{ lines: [], standing: [], starts_with_bytes: 4 * GIB },
      holders: [{ session: 'a', own: true, bytes: 6 * GIB, use: 'busy' as const }]
    };
    const view = pool([device(0)], [mine('a', { label: 'a.ipynb' }), waits('w', 1)]);
    const { model } = show(view, { plan });
    const press = async (name: string) => {
      fireEvent.click(await screen.findByRole('button', { name }));
      await act(async () => Promise.resolve());
    };
    await press('Start now with 4 GiB: kernel-w.ipynb');
    await press('Release the GPU of a.ipynb');
    await press('Stop waiting: kernel-w.ipynb');
    expect(model.asked.filter(text => !text.startsWith('why'))).toEqual([
      `change kernel-w ${4 * GIB}`,
      'release kernel-a',
      'interrupt kernel-w'
    ]);
    region('Queue').getByRole('button', { name: /^Tell me when it starts/ });
  });

  it('the queue asks for the plans of only a few of my kernels', async () => {
    const there = mine('x', { ...queued, queue_position: 6, here: false });
    const many = ['a', 'b', 'c'].map((id, i) => waits(id, i + 1));
    const { model } = show(
      pool([device(0)], [...many, other('o', { ...queued, queue_position: 5 }), there])
    );
    await act(async () => Promise.resolve());
    expect(model.asked).toEqual(['why kernel-a', 'why kernel-b']);
    const more = region('Queue').getByRole('button', { name: /^What can I do\?/ });
    expect(more.getAttribute('aria-expanded')).toBe('false');
    fireEvent.click(more);
    await act(async () => Promise.resolve());
    expect(model.asked).toContain('why kernel-c');
    expect(more.getAttribute('aria-expanded')).toBe('true');
  });

  it('the queue shows my kernels’ names and the others’ classes', () => {
    show(
      pool(
        [device(0)],
        [
          other('b', {
            ...queued,
            queue_position: 1,
            asks: { memory: 12 * GIB, devices: 2 },
            waits_for: 'GPU memory that is in use',
            queued_at: NOW - 43
          }),
          mine('a', {
            ...queued,
            queue_position: 2,
            expected: { since: NOW + 24, until: NOW + 58 },
            wait_reason: 'No device has 8 GiB free.'
          })
        ]
      )
    );
    const items = region('Queue').getAllByRole('listitem');
    expect(items[0]!.textContent).toBe(
      '1stAnother user (batch)12 GiB on each of 2 GPUsHas waited 40 s for GPU memory that is in use.'
    );
    expect(items[1]!.textContent).toBe(
      '2nd1kernel-a.ipynb8 GiB · 20 to 60 s leftNo device has 8 GiB free.Stop waitingTell me when it starts'
    );
  });

  it.each([
    [{ queued_at: NOW - 0.5, waits_for: 'GPU memory' }, 'Waits for GPU memory.'],
    [{ waits_for: 'GPU memory' }, 'Waits for GPU memory.'],
    [{ queued_at: NOW - 4 }, 'Has waited 4 s.'],
    [{}, '']
  ])('the queue says how long others’ kernels have waited: %o', (known, said) => {
    show(pool([device(0)], [other('b', { ...queued, queue_position: 1, ...known })]));
    const row = region('Queue').getByRole('listitem');
    expect(row.querySelector('.jp-gpupool-why')?.textContent ?? '').toBe(said);
  });

  it('the panel says why an idle slice was taken', () => {
    const lost = {
      state: 'detached',
      suspended_bytes: GIB,
      taken_reason: 'another kernel waits for memory'
    } as const;
    show(pool([device(0)], [mine('a', lost)]));
    region('My kernels on this server').getByText(
      'The pool took this kernel’s slice while the kernel was idle: another kernel waits for memory; the next CUDA call brings it back.'
    );
  });

  it('the queue shows an unknown place and time as unknown', () => {
    show(pool([device(0)], [mine('a', queued)]));
    expect(region('Queue').getByRole('listitem').textContent).toBe(
      '?1kernel-a.ipynb8 GiB · no estimate yetStop waitingTell me when it starts'
    );
  });

  it('the queue is short, but always lists my kernels', () => {
    const many = Array.from({ length: 50 }, (_, i) =>
      other(`${i}`, { ...queued, queue_position: i + 1 })
    );
    show(pool([device(0)], [...many, mine('a', { ...queued, queue_position: 51 })]));
    expect(region('Queue').getAllByRole('listitem')).toHaveLength(21);
    region('Queue').getByText('30 more kernels wait.');
  });

  it('the queue says that nobody waits', () => {
    show(pool([device(0)]));
    region('Queue').getByText('Nobody waits for a GPU.');
  });
});

describe('my kernels', () => {
  it('my kernel shows that it was preempted, and why', () => {
    const preempted = 'a kernel of a higher priority class needs the GPU';
    show(pool([device(0)], [mine('a', { ...queued, preempted, queue_position: 1 })]));
    const kernels = region('My kernels on this server');
    kernels.getByText('Preempted: 1st, no estimate yet');
    kernels.getByText(
      `The pool took this kernel’s slice while the kernel was working: ${preempted}`
    );
  });

  const kernels = () => region('My kernels on this server');
  /** Press a button, and wait for the answer. */
  const press = (name: RegExp) =>
    act(() => {
      fireEvent.click(kernels().getByRole('button', { name }));
      return Promise.resolve();
    });

  it('my kernel shows its state, and opens its document', () => {
    const { opened } = show(
      pool(
        [device(0)],
        [
          mine('a'),
          mine('b', { state: 'idle', leaves_at: NOW + 42 }),
          mine('c', { ...NOTHING, state: 'detached', suspended_bytes: 6 * GIB }),
          mine('d', { state: 'idle', pinned_reason: 'it is shared memory' }),
          mine('e', { state: 'idle', stays_reason: 'Host memory is full.' }),
          mine('f', { state: 'idle', leaves_at: NOW - 10 })
        ]
      )
    );
    kernels().getByText('6 of 8 GiB on GPU 0');
    kernels().getByText('Idle, back to the pool in 0:42');
    kernels().getByText('In host memory: 6 GiB');
    kernels().getByText('The kernel’s state cannot leave the GPU: it is shared memory');
    kernels().getByText('Idle on GPU 0, stays');
    kernels().getByText('The kernel keeps its slice: Host memory is full.');
    expect(kernels().getAllByText('tab closed')).toHaveLength(1);
    kernels().getByText('Idle on GPU 0, about to leave');
    const link = kernels().getByRole('button', { name: 'kernel-b.ipynb' });
    expect(link.title).toBe('a/kernel-b.ipynb');
    fireEvent.click(link);
    expect(opened).toEqual(['kernel-b']);
    const front = kernels().getByRole('button', { name: 'kernel-a.ipynb' });
    expect(front.getAttribute('aria-current')).toBe('true');
  });

  it('a count-down redraws only its own text', () => {
    jest.useFakeTimers({ now: NOON });
    try {
      const { model } = show(
        pool(
          [device(0)],
          [mine('a'), mine('b', { state: 'idle', leaves_at: NOW + 42 })]
        )
      );
      const say = jest.spyOn(words, 'say');
      const summary = jest.spyOn(describing, 'summary');
      model.time += 1;
      act(() => jest.advanceTimersByTime(1000));
      kernels().getByText('Idle, back to the pool in 0:41');
      expect(say.mock.calls.map(([, session]) => session?.id)).toEqual(['b']);
      expect(summary).not.toHaveBeenCalled();
    } finally {
      jest.useRealTimers();
    }
  });

  it('my kernel of another server has no buttons', () => {
    show(pool([device(0)], [mine('a', { here: false })]));
    kernels().getByText('No kernel of this server is in the pool.');
    kernels().getByText(/^You have these kernels on another server/);
    expect(kernels().getByRole('listitem').textContent).toBe(
      '1kernel-a.ipynb6 of 8 GiB on GPU 0'
    );
    expect(kernels().queryByRole('button')).toBeNull();
    screen.getByRole('img', { name: /in use \(yours, on another server\);/ });
  });

  it('no timer runs while nothing counts down', () => {
    jest.useFakeTimers({ now: NOON });
    try {
      show(pool([device(0)], [mine('a')]));
      expect(jest.getTimerCount()).toBe(0);
    } finally {
      jest.useRealTimers();
    }
  });

  it('my kernel shows the answer to a release and to a keep', async () => {
    const { model } = show(pool([device(0)], [mine('a')]));
    await press(/^Release/);
    expect(kernels().getByRole('status').textContent).toBe('Done.');
    model.answer = () =>
      Promise.reject(new PoolError('It is in use.', 'busy', 'Wait for the cell.', 409));
    await press(/^Keep for 10 minutes/);
    expect(kernels().getByRole('status').textContent).toBe(
      'It is in use. Wait for the cell.'
    );
    expect(model.asked).toEqual(['release kernel-a', 'keep kernel-a 600']);
  });

  it('a slice can be kept for the minutes of the settings', async () => {
    jest.useFakeTimers({ now: NOON });
    try {
      const view = pool([device(0)], [mine('a')]);
      const { again, model, settings } = show(view);
      const button = () => kernels().getByRole('button', { name: /[Kk]eep/ });
      expect(button().textContent).toBe('Keep for 10 minutes');
      settings.keepMinutes = 25;
      act(() => settings.changed.emit());
      expect(button().textContent).toBe('Keep for 25 minutes');
      expect(button().getAttribute('aria-label')).toContain('Keep for 25 minutes');
      await press(/^Keep for 25 minutes/);
      // The answer and its timer disappear.
      act(() => jest.advanceTimersByTime(OLD));

      again(pool([device(0)], [mine('a', { keep_until: NOW + 1500 })]));
      kernels().getByText(
        `The slice is kept until ${clockAt(1500)}, even while the kernel is idle.`
      );
      model.time = NOW + 1501;
      act(() => jest.advanceTimersByTime(1000));
      expect(button().textContent).toBe('Keep for 25 minutes');
      expect(kernels().queryByText(/^The slice is kept until/)).toBeNull();
      expect(jest.getTimerCount()).toBe(0);
    } finally {
      jest.useRealTimers();
    }
  });

  it('a slice can be kept no longer than the pool allows', async () => {
    const view = pool([device(0)], [mine('a')]);
    const limits = { ...view.limits, max_keep: 300 };
    const { model } = show({ ...view, limits });
    await press(/^Keep for 5 minutes/);
    expect(model.asked).toEqual(['keep kernel-a 300']);
    act(() => model.change({ ...view, limits: { ...limits, max_keep: 0 } }));
    expect(kernels().queryByRole('button', { name: /^Keep/ })).toBeNull();
  });

  it('a second click ends a keep', async () => {
    const { model } = show(pool([device(0)], [mine('a', { keep_until: NOW + 60 })]));
    const button = kernels().getByRole('button', { name: /^Stop keeping/ });
    expect(button.textContent).toBe('Stop keeping');
    await press(/^Stop keeping/);
    expect(model.asked).toEqual(['keep kernel-a 0']);
  });

  it('my kernel shows an answer only while the answer is valid', async () => {
    jest.useFakeTimers({ now: NOON });
    try {
      const { model, again } = show(pool([device(0)], [mine('a', { state: 'idle' })]));
      const said = () => kernels().getByRole('status').textContent;
      await press(/^Release/);
      again(pool([device(0)], [mine('a', { state: 'detaching' })]));
      expect(said()).toBe('Done.');
      act(() => jest.advanceTimersByTime(READ));
      expect(said()).toBe('');

      again(pool([device(0)], [mine('a')]));
      model.answer = () => Promise.reject(new PoolError('No.', 'busy', 'Wait.', 409));
      await press(/^Release/);
      act(() => jest.advanceTimersByTime(OLD_REFUSAL - 1));
      expect(said()).toBe('No. Wait.');
      model.answer = () => Promise.resolve({ note: 'Done.' });
      await press(/^Release/);
      expect(said()).toBe('Done.');
    } finally {
      jest.useRealTimers();
    }
  });

  it('my kernel shows that a release is pending', () => {
    const { model } = show(pool([device(0)], [mine('a', { release_asked: true })]));
    kernels().getByText(
      'Goes back to the pool when its work on the GPU is done. To cancel this, keep the slice.'
    );
    const button = kernels().getByRole('button', { name: /^Release/ });
    expect(button.getAttribute('aria-disabled')).toBe('true');
    fireEvent.click(button);
    expect(model.asked).toEqual([]);
  });

  it('my kernel sends one request at a time', () => {
    const { model } = show(pool([device(0)], [mine('a')]), {
      answer: () => new Promise(() => undefined)
    });
    const button = kernels().getByRole('button', { name: /^Release/ });
    fireEvent.click(button);
    expect(button.getAttribute('aria-disabled')).toBe('true');
    fireEvent.click(button);
    expect(model.asked).toHaveLength(1);
  });

  it('without a slice, the buttons say why they do nothing', async () => {
    const { model } = show(
      pool([device(0)], [mine('a', { ...NOTHING, state: 'detached' })])
    );
    const button = kernels().getByRole('button', { name: /^Release/ });
    expect(button.getAttribute('aria-disabled')).toBe('true');
    fireEvent.click(button);
    expect(model.asked).toEqual([]);
    expect(kernels().getByRole('status').textContent).toBe(
      'This kernel has no slice of a GPU now.'
    );
    await press(/^Keep for 10 minutes/);
    expect(model.asked).toEqual([]);
  });

  it('my kernel can be shut down, and shows an admin’s recall', async () => {
    const { opened } = show(pool([device(0)], [mine('a', { recall_at: NOW + 300 })]));
    kernels().getByText(
      `The administrator will take this kernel’s slice back at ${clockAt(300)}. Nothing is lost.`
    );
    await press(/^Shut down the kernel of kernel-a/);
    expect(opened).toEqual(['shut down kernel-a']);
    expect(kernels().getByRole('status').textContent).toBe('The kernel has ended.');
  });

  it('my kernel shows its last minutes, if these are known', () => {
    const { past } = show(pool([device(0)], [mine('a')]));
    expect(kernels().queryByRole('img')).toBeNull();
    const columns = { time: [NOW - 1, NOW], used: [GIB, 2 * GIB], busy: [0.2, null] };
    act(() => past.change(history({ kernels: { 'kernel-a': columns } })));
    kernels().getByRole('img', {
      name: 'Memory in the last 5 minutes: least 1 GiB, most 2 GiB, now 2 GiB'
    });
    kernels().getByRole('img', {
      name: 'Share of time in which the kernel used CUDA in the last 5 minutes: least 20 %, most 20 %, now not known'
    });
  });
});

describe('the totals', () => {
  it('the totals show the host memory of all kernels, and my part', () => {
    show(
      pool(
        [device(0)],
        [mine('a', { ...NOTHING, state: 'detached', suspended_bytes: 4 * GIB })],
        { host: { budget_bytes: 32 * GIB, used_bytes: 8 * GIB, available_bytes: null } }
      )
    );
    const host = region('Host memory');
    host.getByText('8 of 32 GiB used by suspended kernels · yours: 4 GiB');
    host.getByText('Free on this machine: ?');
    const meter = host.getByRole('meter');
    expect(meter.getAttribute('aria-valuenow')).toBe('25');
    expect([...meter.children].map(part => (part as HTMLElement).style.width)).toEqual([
      '12.5%',
      '12.5%'
    ]);
  });

  it('the totals never show more than 100 % of the budget', () => {
    const host = { budget_bytes: GIB, used_bytes: 3 * GIB, available_bytes: GIB };
    show(pool([device(0)], [], { host }));
    expect(region('Host memory').getByRole('meter').getAttribute('aria-valuenow')).toBe(
      '100'
    );
  });

  it('the totals show the share of time with a slice', () => {
    const { past } = show(pool([device(0)]));
    region('Use').getByText(
      'Not known. To see your use of the GPUs, open a Pooled GPU kernel.'
    );
    act(() => past.change(history()));
    expect(region('Use').getByRole('meter').getAttribute('aria-valuenow')).toBe('19');
    region('Use').getByText(
      'Since the server started, your kernels ran for 2.1 h and had a GPU for 24 min (19 % of this time).'
    );
    const nothing = { since: NOW, attached_seconds: 0, kernel_seconds: 0 };
    act(() => past.change(history({ usage: nothing })));
    region('Use').getByText('None of your kernels has run since the server started.');
    expect(region('Use').queryByRole('meter')).toBeNull();
  });
});

describe('the last hour', () => {
  it('the last hour has one graph per device and one for the queue', () => {
    const { past } = show(pool([device(0)]));
    region('Last hour').getByText('To see the last hour, open a Pooled GPU kernel.');
    past.hour = {
      now: NOW,
      step: 60,
      devices: {
        'GPU-0': { granted: [null, GIB, 2 * GIB], used: [], utilisation: [null, 3, 50] }
      },
      queue: [null, 0, 2]
    };
    act(() => past.changed.emit());
    const names = region('Last hour')
      .getAllByRole('img')
      .map(image => image.getAttribute('aria-label'));
    expect(names).toEqual([
      'GPU 0, memory in slices in the last hour: least 1 GiB, most 2 GiB, now 2 GiB',
      'GPU 0, busy in the last hour: least 3 %, most 50 %, now 50 %',
      'Kernels that waited in the last hour: least 0, most 2, now 2'
    ]);
  });
});

describe('the last hour of many devices', () => {
  it('many devices share a graph, and a button shows separate ones', () => {
    const devices = Array.from({ length: 9 }, (_, i) => device(i));
    const { past } = show(pool(devices));
    const one = { granted: [null, GIB], used: [], utilisation: [null, 50] };
    past.hour = {
      now: NOW,
      step: 60,
      devices: Object.fromEntries(devices.map(({ uuid }) => [uuid, one])),
      queue: [null, 0]
    };
    act(() => past.changed.emit());
    const names = () =>
      region('Last hour')
        .getAllByRole('img')
        .map(image => image.getAttribute('aria-label'));
    expect(names().slice(0, 2)).toEqual([
      'All, memory in slices in the last hour: least 9 GiB, most 9 GiB, now 9 GiB',
      'All, busy in the last hour: least 50 %, most 50 %, now 50 %'
    ]);
    expect(names()).toHaveLength(3);
    fireEvent.click(region('Last hour').getByRole('button', { name: 'Each GPU' }));
    expect(names()).toHaveLength(19);
  });
});

describe('the links', () => {
  it('the links open other places of the user interface', () => {
    const { gone } = show(pool([device(0)]));
    fireEvent.click(screen.getByRole('button', { name: 'All sessions' }));
    expect(gone).toEqual(['admin']);
  });
});

describe('my share', () => {
  const standing = [
    'Your group is bio.',
    'Group bio has 70 of 100 GPU-seconds left today.'
  ];
  const budgets = [{ group: 'bio', seconds: 100, left: 70, spent: false }];

  it('"My share" has the broker’s lines, and a meter per budget', () => {
    show(pool([device(0)], [mine('a'), mine('b', { standing, budgets })]));
    const share = region('My share');
    standing.forEach(line => share.getByText(line));
    const meter = share.getByRole('meter', {
      name: 'GPU-seconds used by group bio today'
    });
    expect(meter.getAttribute('aria-valuenow')).toBe('30');
    expect(meter.getAttribute('aria-valuetext')).toBe('30 of 100 GPU-seconds');
  });

  it('"My share" is not shown without groups and budgets', () => {
    show(pool([device(0)], [mine('a', { standing: [], budgets: [] })]));
    expect(screen.queryByRole('region', { name: 'My share' })).toBeNull();
  });
});

describe('a delta', () => {
  it('a delta draws only changed parts again', () => {
    const devices = Array.from({ length: 8 }, (_, i) => device(i));
    const sessions = Array.from({ length: 50 }, (_, i) =>
      i % 2 === 0
        ? mine(`${i}`, { devices: [`GPU-${i % 8}`], granted_bytes: GIB })
        : other(`${i}`, { devices: [`GPU-${i % 8}`], granted_bytes: GIB })
    );
    const view = pool(devices, sessions);
    const { again } = show(view);
    const summary = jest.spyOn(describing, 'summary');
    const say = jest.spyOn(words, 'say');

    again({ ...view, now: NOW + 1 });
    expect(summary).not.toHaveBeenCalled();
    expect(say).not.toHaveBeenCalled();

    const busier = devices.map((d, i) => (i === 3 ? device(3, { utilisation: 1 }) : d));
    again({ ...view, devices: busier });
    expect(summary.mock.calls.map(([, on]) => on.index)).toEqual([3]);
    expect(say).not.toHaveBeenCalled();

    summary.mockClear();
    const idle = mine('4', { state: 'idle', devices: ['GPU-4'], granted_bytes: GIB });
    const changed = sessions.map(s => (s.id === '4' ? idle : s));
    again({ ...view, devices: busier, sessions: changed });
    expect(summary.mock.calls.map(([, on]) => on.index)).toEqual([4]);
    expect(say.mock.calls.map(([, session]) => session?.id)).toEqual(['4']);
  });

  it('a delta redraws no graphs, and a history redraws no bars', () => {
    const view = pool([device(0)], [mine('a')]);
    const { again, past } = show(view);
    const columns = { time: [NOW], used: [GIB], busy: [null] };
    act(() => past.change(history({ kernels: { 'kernel-a': columns } })));
    const line = screen.getByRole('img', { name: /^Memory/ });
    const bytes = jest.spyOn(words, 'bytes');
    const summary = jest.spyOn(describing, 'summary');
    act(() => past.change(history({ kernels: { 'kernel-a': columns } })));
    expect(bytes).toHaveBeenCalled();
    expect(summary).not.toHaveBeenCalled();
    bytes.mockClear();
    again({ ...view, devices: [device(0, { utilisation: 1 })] });
    expect(summary).toHaveBeenCalledTimes(1);
    expect(line.isConnected).toBe(true);
  });
});

describe('a section', () => {
  it('a section is not drawn while it is folded', () => {
    show(pool([device(0)]));
    const details = screen.getByRole('region', { name: 'Devices' }).firstElementChild!;
    (details as HTMLDetailsElement).open = false;
    fireEvent(details, new Event('toggle'));
    expect(screen.queryByRole('img', BARS)).toBeNull();
    screen.getByRole('heading', { name: 'Devices' });
  });

  it('a section stays folded when the panel is drawn again', () => {
    const folded = new Set<string>();
    show(pool([device(0)]), {}, folded);
    const details = screen.getByRole('region', { name: 'Devices' }).firstElementChild!;
    (details as HTMLDetailsElement).open = false;
    fireEvent(details, new Event('toggle'));
    cleanup();
    show(pool([device(0)]), {}, folded);
    expect(screen.queryByRole('img', BARS)).toBeNull();
    expect([...folded]).toEqual(['devices']);
  });
});
