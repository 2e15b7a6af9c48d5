// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import { Ticker } from '../../ticker';
import { KernelWatch } from '../watch';
import {
  anOrder,
  detached,
  FakeContext,
  FakeModel,
  GIB,
  queued,
  session,
  trans
} from './fakes';

const made: KernelWatch[] = [];

// All tickers share one timer. So dispose the watches after each test; otherwise they
// would still tick in the next test.
afterEach(() => made.splice(0).forEach(watch => watch.dispose()));

function watching(
  model: FakeModel,
  context = new FakeContext(),
  ticker = new Ticker()
) {
  const watch = new KernelWatch(model.asModel(), context.asContext(), trans, ticker);
  let changes = 0;
  watch.changed.connect(() => {
    changes += 1;
  });
  made.push(watch);
  return { watch, context, ticker, changes: () => changes };
}

const idle = { state: 'idle', leaves_at: 1042 } as const;

describe('KernelWatch', () => {
  it('a watch has no situation for a kernel outside the pool', () => {
    const { watch, context } = watching(
      new FakeModel(session()),
      new FakeContext('python3')
    );
    expect(watch.situation).toBeNull();
    context.choose('gpupool-python3', 'k1');
    expect(watch.situation?.said.text).toBe('6 of 8 GiB on GPU 1');
    context.choose('python3', 'k3');
    expect(watch.situation).toBeNull();
    expect(watch.kernelId).toBeNull();
  });

  it.each([
    [{}, '6 of 8 GiB on GPU 1', 'This notebook uses 6 of 8 GiB on GPU 1 (emulated).'],
    [
      { used_bytes: null },
      '8 GiB on GPU 1',
      'This notebook has 8 GiB on GPU 1 (emulated).'
    ],
    [detached, 'No GPU', 'This notebook has no GPU.'],
    [
      { ...detached, suspended_bytes: 6 * GIB },
      'In host memory: 6 GiB',
      '6 GiB of this notebook is in host memory.'
    ],
    [queued, 'Waiting: 2nd, 20 to 60 s left', 'This notebook waits for a GPU.'],
    [
      { ...detached, state: 'attaching' as const },
      'Attaching…',
      'This notebook is getting a GPU.'
    ],
    [
      { ...detached, state: 'attaching' as const, suspended_bytes: 6 * GIB },
      'Restoring 6 GiB…',
      '6 GiB of this notebook is moving from host memory to the GPU.'
    ],
    [
      { state: 'detaching' as const },
      'Moving to host memory…',
      'The state of this notebook is moving to host memory.'
    ],
    [
      idle,
      'Idle, back to the pool in 0:42',
      'This notebook is idle with 8 GiB on GPU 1 (emulated).'
    ]
  ])('a watch describes a session with %p', (changes, text, headline) => {
    const { watch } = watching(new FakeModel(session(changes)));
    expect(watch.situation?.said.text).toBe(text);
    expect(watch.situation?.headline).toBe(headline);
  });

  it.each([
    ['console', 'This console has no GPU.'],
    ['file', 'This kernel has no GPU.']
  ])('a watch names a %s', (type, headline) => {
    const context = new FakeContext();
    context.type = type;
    const { watch } = watching(new FakeModel(session(detached)), context);
    expect(watch.situation?.headline).toBe(headline);
  });

  it('a watch reports an absent pool, and keeps the last state', () => {
    const model = new FakeModel(session());
    const { watch } = watching(model);
    model.away();
    expect(watch.situation?.said.text).toBe('No answer from the GPU pool');
    expect(watch.situation?.session?.id).toBe('s1');
    model.back();
    expect(watch.situation?.said.text).toBe('6 of 8 GiB on GPU 1');
  });

  it('"No GPU found" is for a machine, "No GPU" for a kernel', () => {
    const model = new FakeModel();
    model.view = { ...model.view!, devices: [] };
    expect(watching(model).watch.situation?.said.text).toBe('No GPU found');
    model.view = null;
    expect(watching(model).watch.situation?.kind).toBe('asking');
    expect(watching(new FakeModel()).watch.situation?.said.text).toBe('No GPU');
  });

  it('a watch ignores changes of other kernels', () => {
    const model = new FakeModel(session());
    const { changes } = watching(model);
    model.shows({ now: 1005 });
    expect(changes()).toBe(0);
    model.becomes({ used_bytes: 7 * GIB });
    expect(changes()).toBe(1);
  });

  it('the announced text of a watch has no seconds', () => {
    const model = new FakeModel(session(idle));
    const { watch } = watching(model);
    const before = watch.situation!;
    model.time += 5;
    watch.refresh();
    expect(watch.situation!.said.text).not.toBe(before.said.text);
    expect(watch.situation!.news).toBe(before.news);
    model.becomes(detached);
    expect(watch.situation!.news).not.toBe(before.news);
  });
});

describe('the count-down', () => {
  beforeEach(() => {
    jest.useFakeTimers();
  });

  afterEach(() => {
    jest.useRealTimers();
  });

  it('the ticker ticks only while a text counts down', () => {
    const model = new FakeModel(session(idle));
    const { watch, ticker, changes } = watching(model);
    expect(ticker.running).toBe(true);
    model.time += 1;
    jest.advanceTimersByTime(1000);
    expect(watch.situation?.said.text).toBe('Idle, back to the pool in 0:41');
    expect(changes()).toBe(1);
    model.becomes({});
    expect(ticker.running).toBe(false);
  });

  it('all watches share one timer, which ends with the last watch', () => {
    const ticker = new Ticker();
    const timer = jest.spyOn(window, 'setInterval');
    const model = new FakeModel(session(idle));
    const one = watching(model, new FakeContext(), ticker).watch;
    const other = watching(model, new FakeContext(), ticker).watch;
    expect(timer).toHaveBeenCalledTimes(1);
    one.dispose();
    expect(ticker.running).toBe(true);
    other.dispose();
    expect(ticker.running).toBe(false);
  });

  it('two tickers tick at the same moment', () => {
    const ticks: string[] = [];
    const first = new Ticker().add(() => ticks.push('chip'));
    jest.advanceTimersByTime(700);
    const second = new Ticker().add(() => ticks.push('panel'));
    jest.advanceTimersByTime(300);
    expect(ticks).toEqual(['chip', 'panel']);
    first.dispose();
    second.dispose();
  });

  it('the ticker stops while the page is hidden, and catches up', () => {
    const model = new FakeModel(session(idle));
    const { watch, ticker } = watching(model);
    const visibility = jest.spyOn(document, 'visibilityState', 'get');
    visibility.mockReturnValue('hidden');
    document.dispatchEvent(new Event('visibilitychange'));
    expect(ticker.running).toBe(false);
    model.time += 10;
    visibility.mockReturnValue('visible');
    document.dispatchEvent(new Event('visibilitychange'));
    expect(ticker.running).toBe(true);
    expect(watch.situation?.said.text).toBe('Idle, back to the pool in 0:32');
    watch.dispose();
  });
});

describe('a kernel on another machine', () => {
  const far = {
    ...{ machine: 'gpu2', unreachable: '', devices: ['GPU-9'] },
    gpus: [{ uuid: 'GPU-9', index: 3, name: 'H100', emulated: false }]
  };

  function at(changes: object, more: object = {}) {
    const model = new FakeModel(session({ ...far, ...changes }));
    // The kernel runs on another machine. It does not matter that the server's own
    // machine has no GPU and that its pool is paused.
    model.view = {
      ...model.view!,
      devices: [],
      maintenance: [anOrder()],
      remote_kernels: { k1: 'gpu2' },
      ...more
    };
    return watching(model, new FakeContext('gpupool-python3', 'k1')).watch.situation!;
  }

  it('a watch names the other machine that has the kernel’s slice', () => {
    const it = at({});
    expect([it.kind, it.said.text, it.headline, it.emulated]).toEqual([
      'ours',
      '6 of 8 GiB on GPU 3 of gpu2',
      'This notebook uses 6 of 8 GiB on GPU 3 of gpu2.',
      false
    ]);
  });

  it('a pause on this machine does not affect a kernel elsewhere', () => {
    const it = at({ ...queued, devices: [], gpus: [] });
    expect(it.said.text).toBe('Waiting: 2nd, 20 to 60 s left');
  });

  it('a kernel elsewhere says that its machine does not answer', () => {
    const it = at({ unreachable: 'gpu2 does not answer: silent.' });
    expect([it.said.text, it.said.tone, it.headline]).toEqual([
      'gpu2 does not answer',
      'away',
      'gpu2 does not answer. This notebook probably still runs there.'
    ]);
  });

  it('a kernel elsewhere shows that its machine has not answered', () => {
    const it = at({}, { sessions: [] });
    expect([it.kind, it.said.text]).toEqual(['asking', 'Asking gpu2…']);
  });
});
