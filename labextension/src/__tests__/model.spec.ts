// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import { PageConfig } from '@jupyterlab/coreutils';

import type { IPool } from '../api';
import { PATIENCE } from '../api';
import { LAST_LOOK, PoolModel } from '../model';
import { HIDDEN_AFTER, HIDDEN_INTERVAL, LASTING, pause } from '../stream';
import type { Change, IPoolModel } from '../tokens';
import { aDevice, aPool, aSession, trans } from './defaults';
import { answer, asked, FakeServices, FakeSocket, reset, show } from './fake';

let services: FakeServices;
let model: PoolModel;
let changes: Change[];

function make(): void {
  model = new PoolModel(services.all, trans);
  changes = [];
  model.changed.connect((_, change) => changes.push(change));
}

/** Wait until all requests are answered, and one frame has passed. */
async function frame(): Promise<void> {
  await jest.advanceTimersByTimeAsync(20);
}

beforeEach(() => {
  jest.useFakeTimers();
  jest.spyOn(Math, 'random').mockReturnValue(0.5);
  reset();
  services = new FakeServices();
  make();
});

afterEach(() => {
  model.dispose();
  jest.useRealTimers();
});

/**
 * Start a pooled kernel, let the server send its snapshot, and return the websocket.
 */
async function live(): Promise<FakeSocket> {
  services.start('a');
  FakeSocket.one.snapshot();
  await frame();
  changes.length = 0;
  return FakeSocket.one;
}

describe('requests and kernels', () => {
  test('without a pooled kernel, the page sends nothing', async () => {
    services.start('a', 'python3');
    services.kernelspecs.specsChanged.emit();
    show('hidden');
    await jest.advanceTimersByTimeAsync(3_600_000);
    show('visible');
    window.dispatchEvent(new Event('online'));
    await jest.advanceTimersByTimeAsync(3_600_000);
    expect(asked).toEqual([]);
    expect(FakeSocket.all).toEqual([]);
    expect(model.live).toBe(false);
    expect(model.broker.status).toBe('unknown');
  });

  test('a kernel opens the websocket, and the kernel’s end closes it', async () => {
    services.start('a');
    expect(model.live).toBe(true);
    expect(FakeSocket.one.url).toBe('ws://server/gpupool/api/events?token=se%20cret');
    FakeSocket.one.snapshot();
    services.end();
    expect(model.live).toBe(false);
    answer.body = aPool({ now: 1001, sessions: [] });
    await jest.advanceTimersByTimeAsync(LAST_LOOK - 1);
    expect(asked).toEqual([]);
    expect(model.session('kernel-a')).not.toBeNull();
    await jest.advanceTimersByTimeAsync(3_600_000);
    expect(FakeSocket.all).toHaveLength(1);
    expect(FakeSocket.open).toEqual([]);
    // The page closed the websocket before the server reported the session's end. So
    // the page sends one more request, and removes the session after the answer.
    expect(asked).toEqual(['GET pool']);
    expect(model.session('kernel-a')).toBeNull();
  });

  test('no request follows a kernel’s end if a new kernel has started', async () => {
    services.start('a');
    services.end();
    services.start('b');
    await jest.advanceTimersByTimeAsync(10 * LAST_LOOK);
    expect(asked).toEqual([]);
  });

  test('after the last kernel, the page no longer retries', async () => {
    services.start('a');
    answer.status = 0;
    FakeSocket.one.drop();
    await frame();
    expect(model.broker.nextStep).toBe('This page tries again by itself.');
    services.end();
    await jest.advanceTimersByTimeAsync(LAST_LOOK + 20);
    expect(model.broker).toEqual({
      status: 'away',
      message: 'The Jupyter server does not answer.',
      nextStep: 'Choose Refresh to try again.',
      code: 'network'
    });
  });

  test('kernels without a document and wrapped kernels are pooled', () => {
    services.kernels.models = [{ id: 'x', name: 'gpupool-ir' }];
    services.kernels.runningChanged.emit();
    expect(model.live).toBe(true);
  });

  test('a kernel is pooled once its kernelspec is loaded', () => {
    const { specs } = services.kernelspecs;
    services.kernelspecs.specs = null as unknown as typeof specs;
    services.start('a');
    expect(model.live).toBe(false);
    services.kernelspecs.specs = specs;
    services.kernelspecs.specsChanged.emit();
    expect(model.live).toBe(true);
  });

  test('a kernel is pooled by its provisioner, not by its name', () => {
    expect(model.isPooled('gpupool-python3')).toBe(true);
    expect(model.isPooled('gpupool-ir')).toBe(true);
    expect(model.isPooled('gpupool-remote-python3')).toBe(true);
    expect(model.isRemote('gpupool-remote-python3')).toBe(true);
    expect(model.isRemote('gpupool-python3')).toBe(false);
    expect(model.isPooled('python3')).toBe(false);
    expect(model.isPooled('gpupool-none')).toBe(false);
  });
});

describe('messages of the server', () => {
  test('a snapshot becomes the view', async () => {
    services.start('a');
    FakeSocket.one.snapshot();
    expect(changes).toEqual([]);
    await frame();
    expect(changes).toEqual([{ all: true }]);
    expect(model.view).toEqual(aPool());
    expect(model.broker.status).toBe('up');
    expect(model.session('kernel-b')?.id).toBe('b');
    expect(model.session('kernel-c')).toBeNull();
  });

  test('a delta replaces only the changed parts', async () => {
    const socket = await live();
    const before = model.view!;
    const young = aSession({ id: 'b', state: 'idle' });
    socket.delta({
      now: 1001,
      queue_length: 3,
      sessions: [young, aSession({ id: 'c' })]
    });
    const after = model.view!;
    expect(after).not.toBe(before);
    expect(before.sessions).toHaveLength(2);
    expect(after.devices).toBe(before.devices);
    expect(after.sessions[0]).toBe(before.sessions[0]);
    expect(after.sessions.map(s => [s.id, s.state])).toEqual([
      ['a', 'active'],
      ['b', 'idle'],
      ['c', 'active']
    ]);
    expect([after.now, after.queue_length]).toEqual([1001, 3]);
    socket.delta({ now: 1002, removed: ['a', 'GPU-1'] });
    expect(model.view!.sessions.map(s => s.id)).toEqual(['b', 'c']);
    expect(model.view!.devices.map(d => d.uuid)).toEqual(['GPU-0']);
  });

  test('the model signals the deltas of one frame as one change', async () => {
    const socket = await live();
    socket.delta({ now: 1001, sessions: [aSession({ id: 'c' })], queue_length: 1 });
    socket.delta({ now: 1002, sessions: [aSession({ id: 'b', state: 'idle' })] });
    socket.delta({ now: 1003, devices: [aDevice({ utilisation: 7 })] });
    socket.delta({ now: 1004, removed: ['c', 'a'] });
    socket.delta({ now: 1005, sessions: [aSession({ id: 'a', state: 'queued' })] });
    expect(changes).toEqual([]);
    await frame();
    expect(changes).toHaveLength(1);
    const [change] = changes;
    if (!change || change.all) {
      throw new Error('a change of everything');
    }
    const { delta } = change;
    expect(delta.now).toBe(1005);
    expect(delta.queue_length).toBe(1);
    expect(delta.sessions?.map(s => [s.id, s.state])).toEqual([
      ['b', 'idle'],
      ['a', 'queued']
    ]);
    expect(delta.devices?.map(d => d.utilisation)).toEqual([7]);
    expect(delta.removed).toEqual(['c']);
    await frame();
    expect(changes).toHaveLength(1);
  });

  test('a snapshot among deltas is signalled as a full change', async () => {
    const socket = await live();
    socket.delta({ now: 1001, queue_length: 1 });
    socket.snapshot(aPool({ now: 1002 }));
    await frame();
    expect(changes).toEqual([{ all: true }]);
  });

  test.each([
    ['first', 800, 'a'],
    ['last', 950, 'z']
  ])('the newer session of a restarted kernel counts, sent %s', async (_, at, id) => {
    const socket = await live();
    const other = aSession({ id: 'z', kernel_id: 'kernel-a', opened_at: at });
    socket.delta({ now: 1001, sessions: [other] });
    expect(model.session('kernel-a')?.id).toBe(id);
  });

  test('the model never returns a session of another user', async () => {
    const socket = await live();
    const other = { ...aSession(), mine: false } as never;
    socket.delta({ now: 1001, sessions: [other] });
    expect(model.session('kernel-a')).toBeNull();
  });

  test('a warning is emitted at once', async () => {
    const socket = await live();
    const warned: unknown[] = [];
    model.warned.connect((_, data) => warned.push(data));
    const data = {
      kernel_id: 'kernel-a',
      seconds_left: 20,
      bytes: 1,
      resume_seconds: 3
    };
    socket.say({ type: 'idle', data });
    socket.say({ type: 'lease', data: {} });
    expect(warned).toEqual([data]);
  });
});

describe('the clock', () => {
  test('the model’s clock follows the broker’s, not this computer’s', async () => {
    await live();
    const at = model.now();
    await jest.advanceTimersByTimeAsync(5000);
    expect(model.now() - at).toBeCloseTo(5, 3);
    expect(model.now()).toBeGreaterThanOrEqual(1005);
    expect(model.now()).toBeLessThan(1006);
  });

  test('the model’s clock continues during sleep and never goes back', async () => {
    await live();
    const at = model.now();
    const wall = Date.now();
    // While a computer sleeps, the steady clock stops. Only the wall clock continues.
    const spy = jest.spyOn(Date, 'now').mockReturnValue(wall + 3_600_000);
    expect(model.now() - at).toBeCloseTo(3600, 1);
    spy.mockReturnValue(wall - 3_600_000);
    expect(model.now()).toBe(at);
  });
});

describe('a broker that is away', () => {
  test('without a broker, the model has the last view and a reason', async () => {
    const socket = await live();
    const before = model.view;
    const why = { message: 'The broker has ended.', next_step: 'Start it.' };
    socket.say({ type: 'broker', available: false, code: 'no-broker', ...why });
    await frame();
    expect(model.broker).toEqual({
      status: 'away',
      message: 'The broker has ended.',
      nextStep: 'Start it.',
      code: 'no-broker'
    });
    expect(model.view).toBe(before);
    expect(changes).toEqual([{ all: true }]);
    socket.say({ type: 'broker', available: true });
    expect(model.broker.status).toBe('away');
    socket.snapshot(aPool({ now: 2000 }));
    await frame();
    expect(model.broker).toEqual({ status: 'up', message: '', nextStep: '' });
    expect(model.view?.now).toBe(2000);
  });

  test('the next step says that the broker starts again', async () => {
    const socket = await live();
    const why = { message: 'It ended the connection.', next_step: 'See the doctor.' };
    socket.say({
      type: 'broker',
      available: false,
      code: 'broker-unavailable',
      ...why
    });
    expect(model.broker.nextStep).toMatch(
      /it starts again by itself.* See the doctor\.$/
    );
  });

  test('the page reopens a lost websocket with back-off', async () => {
    await live();
    answer.status = 0;
    for (const failures of [0, 1, 2, 3, 4, 5, 6, 100]) {
      const [low, high] = [pause(failures, 0), pause(failures, 0.999)];
      expect(low).toBeGreaterThanOrEqual(1000);
      expect(high).toBeLessThanOrEqual(30_000);
      expect(high).toBeGreaterThan(1.9 * low);
    }
    for (let failures = 0; failures < 12; failures++) {
      FakeSocket.one.drop();
      await jest.advanceTimersByTimeAsync(pause(failures, 0.5) - 1);
      expect(FakeSocket.open).toEqual([]);
      await jest.advanceTimersByTimeAsync(1);
    }
    // A websocket that is lost right after its snapshot counts as a failure, too.
    FakeSocket.one.snapshot();
    FakeSocket.one.drop();
    await jest.advanceTimersByTimeAsync(pause(12, 0.5) - 1);
    expect(FakeSocket.open).toEqual([]);
    await jest.advanceTimersByTimeAsync(1);
    const socket = FakeSocket.one;
    // After a connection that lasted for `LASTING`, the pauses begin with the shortest
    // one again.
    socket.snapshot();
    await jest.advanceTimersByTimeAsync(LASTING);
    socket.drop();
    await jest.advanceTimersByTimeAsync(pause(0, 0.5));
    expect(FakeSocket.one).not.toBe(socket);
  });

  test('the page sends a request only if its websocket is refused', async () => {
    (await live()).drop();
    expect(asked).toEqual([]);
    expect(model.broker.status).toBe('up');
    await jest.advanceTimersByTimeAsync(pause(0, 0.5));
    answer.status = 500;
    answer.body = { code: 'bug', message: 'It broke.', next_step: 'Read the log.' };
    FakeSocket.one.drop();
    await frame();
    expect(asked).toEqual(['GET pool']);
    expect(model.broker).toEqual({
      status: 'away',
      message: 'It broke.',
      nextStep: 'Read the log.',
      code: 'bug'
    });
    await jest.advanceTimersByTimeAsync(pause(1, 0.5));
    FakeSocket.one.snapshot();
    expect(model.broker.status).toBe('up');
  });

  test('requests keep the view fresh if websockets fail', async () => {
    services.start('a');
    FakeSocket.one.drop();
    await frame();
    expect(model.view).toEqual(aPool());
    expect(model.broker.status).toBe('up');
  });

  test('the page reports a stopped server and a disabled extension', async () => {
    answer.status = 0;
    await model.refresh();
    expect(model.broker.status).toBe('away');
    expect(model.broker.message).toMatch(/does not answer/);
    answer.status = 404;
    answer.body = { message: 'Not Found' };
    await model.refresh();
    expect(model.broker.message).toMatch(/switched off/);
    expect(model.broker.nextStep).toMatch(/server extension enable/);
  });

  test.each([401, 403])('with status %p, this page has no access', async status => {
    Object.assign(answer, { status, body: { message: 'Forbidden' } });
    await model.refresh();
    expect(model.broker).toEqual({
      status: 'away',
      message: 'The Jupyter server does not let this page use the GPU pool.',
      nextStep: 'Log in again, and reload the page.',
      code: 'unknown',
      denied: true
    });
  });

  test.each([
    ['fails', 0],
    ['is not answered', -1]
  ])('a request that %s shows that the websocket is dead', async (_, status) => {
    const dead = await live();
    answer.status = status;
    const asking = model.refresh();
    await jest.advanceTimersByTimeAsync(PATIENCE);
    await asking;
    expect(model.broker.status).toBe('away');
    expect(dead.closed).toBe(true);
    FakeSocket.one.snapshot();
    expect(model.broker.status).toBe('up');
  });

  test('the pool is away if the server answers with a login page', async () => {
    answer.body = null;
    await model.refresh();
    expect(model.broker.status).toBe('away');
    expect(model.broker.nextStep).toMatch(/log in/);
  });

  test('the page keeps its websocket after a refused request', async () => {
    const socket = await live();
    answer.status = 500;
    await model.refresh();
    expect(FakeSocket.one).toBe(socket);
    expect(model.broker.status).toBe('up');
  });

  test('the websocket reopens after sleep or on another network', async () => {
    const first = await live();
    await jest.advanceTimersByTimeAsync(60_000);
    expect(FakeSocket.one).toBe(first);
    jest.setSystemTime(Date.now() + 3_600_000);
    await jest.advanceTimersByTimeAsync(15_000);
    const second = FakeSocket.one;
    expect(second).not.toBe(first);
    window.dispatchEvent(new Event('online'));
    expect(FakeSocket.one).not.toBe(second);
  });
});

describe('hidden pages', () => {
  test('a short switch to another tab leaves the websocket open', async () => {
    const socket = await live();
    show('hidden');
    await jest.advanceTimersByTimeAsync(HIDDEN_AFTER - 1);
    show('visible');
    await jest.advanceTimersByTimeAsync(10 * HIDDEN_INTERVAL);
    expect(FakeSocket.one).toBe(socket);
    expect(asked).toEqual([]);
  });

  test('a hidden page sends few requests until it is visible', async () => {
    await live();
    show('hidden');
    await jest.advanceTimersByTimeAsync(HIDDEN_AFTER);
    expect(FakeSocket.open).toEqual([]);
    answer.body = aPool({ now: 5000 });
    await jest.advanceTimersByTimeAsync(3 * HIDDEN_INTERVAL + 1000);
    expect(asked.length).toBeGreaterThanOrEqual(3);
    expect(asked.length).toBeLessThanOrEqual(4);
    expect(model.view?.now).toBe(5000);
    // A hidden page draws no frames, but the model signals the change.
    expect(changes.length).toBeGreaterThan(0);
    const before = asked.length;
    show('visible');
    FakeSocket.one.snapshot(aPool({ now: 6000 }));
    await jest.advanceTimersByTimeAsync(3 * HIDDEN_INTERVAL);
    expect(asked).toHaveLength(before);
    expect(model.view?.now).toBe(6000);
  });

  test('a page that loads hidden also sends few requests', async () => {
    model.dispose();
    show('hidden');
    make();
    services.start('a');
    await jest.advanceTimersByTimeAsync(HIDDEN_AFTER + 1000);
    expect(FakeSocket.open).toEqual([]);
    expect(model.view).not.toBeNull();
  });
});

describe('the model’s field "found"', () => {
  function told(found: object | null): IPoolModel['found'] {
    PageConfig.setOption('gpupool', found ? JSON.stringify(found) : '');
    model.dispose();
    make();
    return model.found;
  }

  test('"found" comes from the page, and is true by default', () => {
    const none = { found: false, reason: 'No driver.', emulated: false };
    expect(told(none)).toEqual(none);
    const some = { found: true, reason: '', emulated: true };
    expect(told(some)).toEqual(some);
    expect(told(null)).toEqual({ found: true, reason: '', emulated: false });
    PageConfig.setOption('gpupool', 'not JSON');
    model.dispose();
    make();
    expect(model.found.found).toBe(true);
  });

  test('"found" comes from the newest view, if there is a view', async () => {
    told({ found: false, reason: 'No driver.' });
    await live();
    expect(model.found).toEqual({ found: true, reason: '', emulated: false });
    FakeSocket.one.snapshot(aPool({ devices: [], problem: 'They fell off the bus.' }));
    expect(model.found).toEqual({
      found: false,
      reason: 'They fell off the bus.',
      emulated: false
    });
    told(null);
  });
});

test('an answer older than the websocket’s view changes nothing', async () => {
  const socket = await live();
  answer.body = aPool({ now: 1 });
  const asking = model.refresh();
  socket.delta({ now: 1001, queue_length: 1 });
  await asking;
  expect(model.view?.now).toBe(1001);
});

test('a late answer does not replace a newer answer', async () => {
  let late: (view: IPool) => void = () => undefined;
  const ask = jest.spyOn(model.client, 'pool');
  ask.mockReturnValueOnce(new Promise(resolve => (late = resolve)));
  ask.mockResolvedValueOnce(aPool({ now: 2000 }));
  const [first, second] = [model.refresh(), model.refresh()];
  await second;
  late(aPool({ now: 1990 }));
  await first;
  expect(model.view?.now).toBe(2000);
});

test('the model accepts an earlier time from a restarted broker', async () => {
  await model.refresh();
  answer.status = 503;
  answer.body = { message: 'No broker.' };
  await model.refresh();
  expect(model.broker.status).toBe('away');
  answer.status = 200;
  answer.body = aPool({ now: 5 });
  await model.refresh();
  expect(model.view?.now).toBe(5);
});

test('a disposed model sends and signals nothing', async () => {
  const socket = await live();
  socket.delta({ now: 1001, queue_length: 1 });
  model.dispose();
  expect(socket.closed).toBe(true);
  show('hidden');
  show('visible');
  services.start('b');
  await jest.advanceTimersByTimeAsync(3_600_000);
  expect(FakeSocket.open).toEqual([]);
  expect(asked).toEqual([]);
  expect(changes).toEqual([]);
  expect(model.isDisposed).toBe(true);
});
