// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import type { JupyterFrontEnd } from '@jupyterlab/application';
import { Notification } from '@jupyterlab/apputils';
import { PageConfig } from '@jupyterlab/coreutils';
import { LauncherModel } from '@jupyterlab/launcher';
import { CommandRegistry } from '@lumino/commands';
import { Signal } from '@lumino/signaling';

import type { IPool, ISession } from '../api';
import { PoolClient } from '../api';
import { History, INTERVAL } from '../history';
import { explanation, launcherPlugin, otherKernel, ownItem, tile } from '../launcher';
import { PoolModel } from '../model';
import { IdleWarnings, warning } from '../notify';
import { RunningSlices } from '../running';
import { PoolSettings } from '../settings';
import { localTime, timeOfDay } from '../words';
import { aDevice, aPool, aSession, GIB, trans } from './defaults';
import { answer, asked, FakeServices, FakeSocket, reset, show } from './fake';

let services: FakeServices;
let model: PoolModel;

beforeEach(() => {
  jest.useFakeTimers();
  reset();
  Notification.dismiss();
  services = new FakeServices();
  model = new PoolModel(services.all, trans);
});

afterEach(() => {
  model.dispose();
  jest.useRealTimers();
});

/** Start the kernel `a` on a server with these sessions; return the websocket. */
async function live(...sessions: ISession[]): Promise<FakeSocket> {
  services.start('a');
  FakeSocket.one.snapshot(aPool({ sessions }));
  await frame();
  return FakeSocket.one;
}

async function frame(): Promise<void> {
  await jest.advanceTimersByTimeAsync(20);
}

const name = (kernelId: string) =>
  services.sessions.models.find(s => s.kernel?.id === kernelId) ?? null;

describe('the idle warning', () => {
  const idle = aSession({ id: 'a', state: 'idle', leaves_at: 1020 });
  const said = {
    kernel_id: 'kernel-a',
    seconds_left: 20,
    bytes: 6 * GIB,
    resume_seconds: 3.2
  };
  let settings: PoolSettings;
  let warnings: IdleWarnings;

  beforeEach(() => {
    settings = new PoolSettings();
    warnings = new IdleWarnings(model, settings, id => name(id)?.name ?? null, trans);
  });

  afterEach(() => warnings.dispose());

  const shown = () => Notification.manager.notifications;

  async function warn(data: object = said): Promise<FakeSocket> {
    const socket = await live(idle);
    socket.say({ type: 'idle', data });
    return socket;
  }

  test('the warning names document, time, and duration of the resume', async () => {
    await warn();
    // The text does not count down, so it names a time of day.
    const at = timeOfDay(trans, localTime(model, 1020), true);
    expect(shown().map(n => [n.type, n.message])).toEqual([
      [
        'warning',
        `a.ipynb: its GPU slice goes back to the pool at ${at}. It takes ~3 s to restore 6 GiB.`
      ]
    ]);
    expect(shown()[0]!.options.autoClose).toBe(20_000);
    expect(shown()[0]!.options.actions?.map(a => a.label)).toEqual([
      'Keep for 10 minutes',
      'Release now'
    ]);
  });

  test('the warning omits unknown seconds and shortens a long name', () => {
    const unknown = { ...said, seconds_left: 5000, bytes: null, resume_seconds: null };
    const late = new Date(2026, 10, 21, 23, 59, 59);
    const text = warning(trans, `${'long'.repeat(30)}.ipynb`, unknown, late);
    expect(text).toMatch(/11:59:59\sPM/);
    expect(text).toMatch(/The time to restore its data is not known yet\.$/);
    expect(text.length).toBeLessThanOrEqual(140);
    const known = { ...unknown, bytes: 999 * GIB, resume_seconds: 5300 };
    const longest = warning(trans, 'long'.repeat(30), known, late);
    expect(longest.length).toBeLessThanOrEqual(140);
  });

  test.each([
    ['Keep for 10 minutes', 'POST sessions/kernel-a/keep {"seconds":600}'],
    ['Release now', 'POST sessions/kernel-a/release {}']
  ])('the button "%s" sends a request and shows the answer', async (label, request) => {
    await warn();
    answer.body = { note: 'As you wish.' };
    const action = shown()[0]!.options.actions?.find(a => a.label === label);
    action?.callback(new MouseEvent('click'));
    await frame();
    expect(asked).toEqual([request]);
    expect(shown().find(n => n.type === 'success')?.message).toBe('As you wish.');
  });

  test('a refusal after a click in the warning is shown with its next step', async () => {
    await warn();
    answer.status = 409;
    answer.body = { code: 'quota', message: 'Too long.', next_step: 'Ask for less.' };
    shown()[0]!.options.actions?.[0]?.callback(new MouseEvent('click'));
    await frame();
    expect(shown().find(n => n.type === 'error')?.message).toBe(
      'Too long. Ask for less.'
    );
  });

  test.each([
    ['is active again', aSession()],
    ['is kept', { ...idle, leaves_at: 1600 }],
    ['cannot leave', { ...idle, stays_reason: 'Full.', leaves_at: null }],
    ['is pinned', { ...idle, pinned_reason: 'shared memory', leaves_at: null }],
    ['has left', aSession({ id: 'a', state: 'detaching' })]
  ])('the warning disappears when the kernel %s', async (_, now) => {
    const socket = await warn();
    socket.delta({ now: 1001, sessions: [aSession({ id: 'b' })] });
    await frame();
    expect(shown()).toHaveLength(1);
    socket.delta({ now: 1002, sessions: [now] });
    await frame();
    expect(shown()).toEqual([]);
  });

  test('the warning is removed when the kernel or the page ends', async () => {
    const socket = await warn();
    socket.delta({ now: 1002, removed: ['a'] });
    await frame();
    expect(shown()).toEqual([]);
    socket.delta({ now: 1003, sessions: [idle] });
    socket.say({ type: 'idle', data: said });
    expect(shown()).toHaveLength(1);
    warnings.dispose();
    expect(shown()).toEqual([]);
  });

  test('a warning that is sent again is not shown again', async () => {
    const socket = await warn();
    const [first] = shown();
    socket.snapshot(aPool({ now: 1011, sessions: [idle] }));
    socket.say({ type: 'idle', data: { ...said, seconds_left: 9 } });
    await frame();
    expect(shown().map(n => n.id)).toEqual([first!.id]);
    Notification.dismiss(first!.id);
    socket.say({ type: 'idle', data: { ...said, seconds_left: 8 } });
    expect(shown()).toEqual([]);
  });

  test('a warning with another time replaces the earlier warning', async () => {
    const socket = await warn();
    const [first] = shown();
    socket.delta({ now: 1002, sessions: [{ ...idle, leaves_at: 1090 }] });
    socket.say({ type: 'idle', data: { ...said, seconds_left: 88 } });
    await frame();
    expect(shown()).toHaveLength(1);
    expect(shown()[0]!.id).not.toBe(first!.id);
  });

  test('the minutes of a keep are rounded to whole minutes', () => {
    settings.follow({
      composite: { keepMinutes: 2.5 },
      changed: new Signal({})
    } as never);
    expect(settings.keepMinutes).toBe(3);
  });

  test('no warning is shown if the setting is off', async () => {
    settings.follow({
      composite: { idleWarning: false },
      changed: new Signal({})
    } as never);
    expect([settings.idleWarning, settings.keepMinutes]).toEqual([false, 10]);
    await warn();
    expect(shown()).toEqual([]);
  });
});

describe('history', () => {
  test('history is fetched only while a widget and a kernel are open', async () => {
    const history = new History(model);
    const told = jest.fn();
    history.changed.connect(told);
    const hold = history.hold();
    await jest.advanceTimersByTimeAsync(10 * INTERVAL);
    expect(asked).toEqual([]);
    await live();
    answer.body = { now: 1 };
    await jest.advanceTimersByTimeAsync(2 * INTERVAL + 100);
    // The last hour has one point per minute, so the page requests it less often.
    expect(asked).toEqual(['GET history', 'GET hour', 'GET history', 'GET history']);
    expect(history.latest).toEqual({ now: 1 });
    expect(told).toHaveBeenCalledTimes(3);
    const other = history.hold();
    hold.dispose();
    hold.dispose();
    await jest.advanceTimersByTimeAsync(INTERVAL);
    expect(asked.length).toBe(5);
    show('hidden');
    await jest.advanceTimersByTimeAsync(5000);
    show('visible');
    other.dispose();
    const before = asked.length;
    await jest.advanceTimersByTimeAsync(10 * INTERVAL);
    expect(asked).toHaveLength(before);
    const last = history.hold();
    await frame();
    const histories = () => asked.filter(one => one === 'GET history').length;
    const then = histories();
    answer.body = aPool();
    services.end();
    await jest.advanceTimersByTimeAsync(10 * INTERVAL);
    expect(histories()).toBe(then);
    last.dispose();
    history.dispose();
  });
});

describe('the list of running kernels', () => {
  const changed = new Signal<object, void>({});
  const opened: string[] = [];
  const documents = {
    name,
    active: null,
    open: (id: string) => opened.push(id),
    shutDown: () => Promise.resolve(),
    changed
  };

  test('the list has all pooled kernels, also suspended ones', async () => {
    const manager = new RunningSlices(model, documents, trans);
    const changes = jest.fn();
    manager.runningChanged.connect(changes);
    expect(manager.running()).toEqual([]);
    const socket = await live(
      aSession(),
      aSession({
        id: 'q',
        state: 'queued',
        queue_position: 2,
        expected: { since: 1020, until: 1060 },
        devices: []
      }),
      aSession({ id: 'd', state: 'detached', devices: [], suspended_bytes: GIB }),
      aSession({ id: 'i', state: 'idle', leaves_at: 1020 }),
      aSession({ id: 'elsewhere', here: false }),
      { ...aSession({ id: 'other' }), mine: false } as never
    );
    expect(manager.running().map(i => [i.label(), i.detail?.(), !!i.shutdown])).toEqual(
      [
        ['a.ipynb', '6/8 GiB', true],
        ['label of q', 'Waiting: 2nd', false],
        ['label of d', 'Host 1 GiB', false],
        ['label of i', 'Idle', true]
      ]
    );
    const before = changes.mock.calls.length;
    socket.delta({ now: 1001, queue_length: 7 });
    await frame();
    expect(changes).toHaveBeenCalledTimes(before);
    // The list does not change if only other sessions change, or fields that the list
    // does not show.
    socket.delta({
      now: 1001.5,
      sessions: [
        { ...aSession({ id: 'other', state: 'idle' }), mine: false as never },
        aSession({ id: 'elsewhere', here: false, state: 'idle' }),
        aSession({ id: 'a', busy: 3 } as never)
      ]
    });
    await frame();
    expect(changes).toHaveBeenCalledTimes(before);
    socket.delta({ now: 1002, removed: ['i'] });
    await frame();
    expect(changes).toHaveBeenCalledTimes(before + 1);
    socket.delta({ now: 1003, sessions: [aSession({ id: 'a', used_bytes: 7 * GIB })] });
    await frame();
    expect(changes).toHaveBeenCalledTimes(before + 2);
    manager.running()[0]?.open?.();
    expect(opened).toEqual(['kernel-a']);
    answer.body = { note: 'Done.' };
    manager.shutdownAll();
    manager.running()[0]?.shutdown?.();
    await frame();
    const release = 'POST sessions/kernel-a/release {}';
    expect(asked).toEqual([release, release]);
    services.end();
    expect(manager.running()).toEqual([]);
  });

  test('a refresh of the list sends nothing without a pooled kernel', async () => {
    new RunningSlices(model, documents, trans).refreshRunning();
    await frame();
    expect(asked).toEqual([]);
  });
});

describe('the launcher', () => {
  test('the launcher says what is missing, and names the doctor once', () => {
    const own = explanation(trans, 'No driver.');
    expect(own[0]).toBe(
      'No driver. Run `jupyter gpupool doctor` in a terminal: it says what is missing.'
    );
    const told = explanation(
      trans,
      'No driver. Run `jupyter gpupool doctor` for details.'
    );
    expect(told.join(' ').match(/doctor/g)).toHaveLength(1);
    expect(told.join(' ')).toContain('GPUPOOL_EMULATE');
  });

  test('a kernel on another machine keeps JupyterLab’s own tile', () => {
    const model = {
      isPooled: () => true,
      isRemote: (kernel: string) => kernel === 'gpupool-remote-python3'
    };
    const item = (kernelName: string) => ({
      command: 'notebook:create-new',
      args: { kernelName }
    });
    expect(ownItem(model, item('gpupool-python3'))?.args).toMatchObject({
      gpupoolKernel: 'gpupool-python3'
    });
    expect(ownItem(model, item('gpupool-remote-python3'))).toBeNull();
  });

  test('the launcher offers a plain kernel of the same language', () => {
    const pooled = { isPooled: (kernel: string) => kernel.startsWith('gpupool') };
    const of = (...kernels: [string, string?][]) =>
      otherKernel(
        pooled,
        {
          default: 'python3',
          kernelspecs: Object.fromEntries(
            kernels.map(([kernel, language = 'python']) => [
              kernel,
              { name: kernel, language } as never
            ])
          )
        },
        'gpupool-python3'
      )?.name ?? null;
    const ours: [string] = ['gpupool-python3'];
    expect(of(['conda'], ['python3'], ours)).toBe('python3');
    expect(of(['conda'], ['ir', 'R'], ours)).toBe('conda');
    expect(of(['ir', 'R'], ours)).toBeNull();
    expect(otherKernel(pooled, null, 'gpupool-python3')).toBeNull();
  });

  test('the tile says what the kernel does and what is free now', () => {
    const pool = (view: IPool | null, found = true) => ({
      found: { found, reason: '', emulated: false },
      view,
      broker: { status: 'up' as const, message: '', nextStep: '' }
    });
    const name = 'Pooled GPU (Python 3)';
    const what = `${name}: gets a GPU when cells use CUDA.`;
    expect(tile(trans, name, pool(null))).toBe(what);
    const devices = [
      aDevice({ memory_free: 3 * GIB }),
      aDevice({ index: 1, memory_free: null })
    ];
    expect(tile(trans, name, pool(aPool({ devices })))).toBe(
      `${what} 3 of 30 GiB is free.\nAt most 3 GiB is free on one GPU.`
    );
    expect(tile(trans, name, pool(aPool({ emulated: true })))).toContain(
      'EMULATED: no real GPU is used.'
    );
    expect(tile(trans, name, pool(aPool(), false))).toBe(
      `${name}: no GPU found. Choose this kernel to see what to do.`
    );
    const away = { ...pool(aPool()), broker: { ...pool(null).broker, status: 'away' } };
    expect(tile(trans, name, away as never)).toBe(what);
    // Before the first kernel no broker runs, but the page already knows whether the
    // GPUs are emulated.
    const found = { found: true, reason: '', emulated: true };
    expect(tile(trans, name, { ...away, found } as never)).toBe(
      `${what}\nEMULATED: no real GPU is used.`
    );
  });

  describe('on a page that reported no GPU', () => {
    const created: unknown[] = [];
    let commands: CommandRegistry;
    let launcher: LauncherModel;

    beforeEach(() => {
      jest.useRealTimers();
      document.body.textContent = '';
      created.length = 0;
      model.dispose();
      PageConfig.setOption('gpupool', JSON.stringify({ found: false, reason: 'No.' }));
      model = new PoolModel(services.all, trans);
      commands = new CommandRegistry();
      commands.addCommand('notebook:create-new', {
        execute: args => created.push(args)
      });
      const app = { commands, serviceManager: services } as unknown as JupyterFrontEnd;
      launcher = new LauncherModel();
      void launcherPlugin.activate(app, model, launcher, null);
      for (const kernelName of ['gpupool-python3', 'python3']) {
        launcher.add({
          command: 'notebook:create-new',
          category: 'Notebook',
          args: { isLauncher: true, kernelName }
        });
      }
    });

    afterEach(() => PageConfig.setOption('gpupool', ''));

    const choose = () => {
      const [ours, other] = [...launcher.items()];
      expect(other!.command).toBe('notebook:create-new');
      expect([...launcher.items()][0]).toBe(ours);
      expect(commands.label(ours!.command, ours!.args)).toContain('no GPU found');
      return commands.execute(ours!.command, { ...ours!.args, cwd: 'work' });
    };

    test('a click asks the pool again, and starts a kernel on a GPU', async () => {
      await choose();
      expect(asked).toContain('GET pool');
      expect(created).toEqual([
        { isLauncher: true, cwd: 'work', kernelName: 'gpupool-python3' }
      ]);
    });

    test('a click shows the pool’s reason if the pool has no GPU', async () => {
      answer.body = aPool({ devices: [], problem: 'They fell off the bus.' });
      const done = choose();
      let dialog: HTMLElement | null = null;
      while (dialog === null) {
        await new Promise(resolve => setTimeout(resolve, 5));
        dialog = document.querySelector<HTMLElement>('.jp-Dialog');
      }
      expect(dialog.textContent).toContain('They fell off the bus.');
      dialog.querySelector('button')!.click();
      await done;
      expect(created).toEqual([]);
    });
  });
});

test('the client sends a kernel’s new request to the kernel’s URL', async () => {
  const client = new PoolClient(services.serverSettings);
  answer.body = aPool() satisfies IPool;
  await client.change('a/b', { memory: 1 });
  expect(asked).toEqual(['PATCH sessions/a%2Fb {"memory":1}']);
});
