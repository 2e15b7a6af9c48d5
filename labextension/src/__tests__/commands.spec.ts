// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import { Notification } from '@jupyterlab/apputils';
import { CommandRegistry } from '@lumino/commands';

import { addCommands, CommandIDs } from '../commands';
import { PoolModel } from '../model';
import { followPool, REFUSAL } from '../tell';
import { aPool, aSession, NOTHING, trans } from './defaults';
import { answer, asked, FakeServices, FakeSocket, reset } from './fake';

const WHY = {
  lines: ['It is 2nd of 5 in the queue: no GPU has 8 GiB free.'],
  standing: ['Your group is bio.']
};

describe('the commands', () => {
  let services: FakeServices;
  let model: PoolModel;
  let commands: CommandRegistry;
  let active: string | null;
  let reply: { status: string; evalue?: string };
  const connection = {
    info: Promise.resolve({ language_info: { name: 'python' } }),
    dispose: jest.fn(),
    requestExecute: jest.fn(() => ({
      done: Promise.resolve({ content: reply }),
      dispose: jest.fn()
    }))
  };

  const of = [
    CommandIDs.ask,
    CommandIDs.release,
    CommandIDs.keep,
    CommandIDs.why
  ] as const;

  beforeEach(() => {
    reset();
    Notification.dismiss();
    document.body.textContent = '';
    services = new FakeServices();
    model = new PoolModel(services.all, trans);
    commands = new CommandRegistry();
    active = 'kernel-a';
    addCommands({
      commands,
      model,
      settings: { keepMinutes: 7 },
      sessions: services.all.sessions,
      kernels: { connectTo: () => connection as never },
      active: () => active,
      trans
    });
    answer.body = { note: 'As you wish.' };
  });

  afterEach(() => model.dispose());

  const frame = () => new Promise(resolve => setTimeout(resolve, 50));

  const shown = () => Notification.manager.notifications.map(n => [n.type, n.message]);

  /** Wait for an open dialog; return its element. */
  async function dialog(): Promise<HTMLElement> {
    for (;;) {
      const found = document.querySelector<HTMLElement>('.jp-Dialog');
      if (found) {
        return found;
      }
      await new Promise(resolve => setTimeout(resolve, 5));
    }
  }

  const press = (where: HTMLElement, what: string) =>
    where.querySelector<HTMLElement>(what)!.click();

  test('commands are enabled only for a pooled kernel', () => {
    const enabled = (args = {}) => of.map(id => commands.isEnabled(id, args));
    expect(enabled()).toEqual([false, false, false, false]);
    services.start('a', 'python3');
    expect(enabled()).toEqual([false, false, false, false]);
    services.start('b');
    expect(enabled({ kernelId: 'kernel-b' })).toEqual([true, true, false, false]);
    FakeSocket.one.snapshot(aPool({ sessions: [aSession({ id: 'b' })] }));
    expect(enabled({ kernelId: 'kernel-b' })).toEqual([true, true, true, true]);
    expect(commands.isEnabled(CommandIDs.get, { kernelId: 'kernel-b' })).toBe(false);
    active = 'kernel-b';
    expect(enabled()).toEqual([true, true, true, true]);
    FakeSocket.one.snapshot(
      aPool({ sessions: [aSession({ id: 'b', ...NOTHING, state: 'detached' })] })
    );
    expect(enabled()).toEqual([true, true, false, false]);
    expect(commands.isEnabled(CommandIDs.get)).toBe(true);
    active = null;
    expect(enabled()).toEqual([false, false, false, false]);
  });

  test('commands send nothing without a pooled kernel', async () => {
    for (const id of of) {
      expect(await commands.execute(id)).toBe(false);
    }
    expect(asked).toEqual([]);
  });

  test('the command "get" runs %gpu attach and shows its error', async () => {
    services.start('a');
    reply = { status: 'ok' };
    expect(await commands.execute(CommandIDs.get)).toBe(true);
    expect(connection.requestExecute).toHaveBeenLastCalledWith(
      { code: '%gpu attach', store_history: false, stop_on_error: false },
      false
    );
    expect(shown()).toEqual([['success', 'The kernel has its GPU.']]);
    reply = { status: 'error', evalue: 'You stopped the wait.' };
    expect(await commands.execute(CommandIDs.get)).toBe(false);
    expect(shown()).toContainEqual(['error', 'You stopped the wait.']);
    expect(connection.dispose).toHaveBeenCalledTimes(2);
  });

  test.each([['', 0, -3, NaN, Infinity, null]].flat())(
    'the command "keep" sends nothing for %p minutes',
    async minutes => {
      services.start('a');
      expect(await commands.execute(CommandIDs.keep, { minutes })).toBe(
        minutes === null
      );
      // If the number is null, the command uses the number in the settings.
      expect(asked).toEqual(
        minutes === null ? ['POST sessions/kernel-a/keep {"seconds":420}'] : []
      );
    }
  );

  test('the command "keep" sends at most what the pool allows', async () => {
    services.start('a');
    const limits = { ...aPool().limits, max_keep: 90 };
    FakeSocket.one.snapshot(aPool({ limits }));
    expect(commands.label(CommandIDs.keep)).toBe('Keep the GPU for 1 Minute');
    await commands.execute(CommandIDs.keep);
    expect(asked).toEqual(['POST sessions/kernel-a/keep {"seconds":90}']);
    FakeSocket.one.snapshot(aPool({ limits: { ...limits, max_keep: 0 } }));
    expect(await commands.execute(CommandIDs.keep)).toBe(false);
    expect(asked).toHaveLength(1);
  });

  test('the commands "release" and "keep" show the answer', async () => {
    services.start('a');
    expect(commands.label(CommandIDs.keep)).toBe('Keep the GPU for 7 Minutes');
    expect(commands.label(CommandIDs.keep, { minutes: 1 })).toBe(
      'Keep the GPU for 1 Minute'
    );
    expect(await commands.execute(CommandIDs.release)).toBe(true);
    await commands.execute(CommandIDs.keep);
    await commands.execute(CommandIDs.keep, { minutes: 2 });
    expect(asked).toEqual([
      'POST sessions/kernel-a/release {}',
      'POST sessions/kernel-a/keep {"seconds":420}',
      'POST sessions/kernel-a/keep {"seconds":120}'
    ]);
    // A later message about a kernel replaces the earlier message.
    expect(shown()).toEqual([['success', 'As you wish.']]);
    services.start('b');
    await commands.execute(CommandIDs.release, { kernelId: 'kernel-b' });
    expect(shown()).toHaveLength(2);
  });

  test('a repeated refusal is shown only once', async () => {
    services.start('a');
    answer.status = 409;
    answer.body = { code: 'busy', message: 'Not now.', next_step: '' };
    await commands.execute(CommandIDs.release);
    await commands.execute(CommandIDs.release);
    expect(shown()).toEqual([['error', 'Not now.']]);
    expect(Notification.manager.notifications[0]!.options.autoClose).toBe(REFUSAL);
  });

  test('the notice of a silent broker disappears when the broker answers', async () => {
    services.start('a');
    followPool(model);
    FakeSocket.one.snapshot();
    answer.status = 503;
    answer.body = { code: 'broker-unavailable', message: 'It is gone.', next_step: '' };
    await commands.execute(CommandIDs.release);
    expect(shown()[0]![1]).toMatch(
      /^It is gone\. If the broker has ended, it starts again by itself/
    );
    FakeSocket.one.say({ type: 'broker', available: false });
    await frame();
    expect(shown()).toHaveLength(1);
    FakeSocket.one.snapshot();
    await frame();
    expect(shown()).toEqual([]);
  });

  test('a refusal shows the next step, and a long text in full', async () => {
    services.start('a');
    answer.status = 409;
    const message = 'It is in use by a cell. '.repeat(8).trim();
    answer.body = { code: 'busy', message, next_step: 'Interrupt it.' };
    expect(await commands.execute(CommandIDs.release)).toBe(false);
    const [told] = Notification.manager.notifications;
    expect(told?.type).toBe('error');
    told?.options.actions?.[0]?.callback(new MouseEvent('click'));
    const open = await dialog();
    expect(open.textContent).toContain(`${message} Interrupt it.`);
    press(open, 'button');
  });

  /** Add the popover's command. The popover opens only for the kernels in `seen`. */
  function popover(seen: string[], enabled = seen): jest.Mock {
    const execute = jest.fn((args: { kernelId?: string }) =>
      seen.includes(args.kernelId ?? '')
    );
    commands.addCommand(CommandIDs.open, {
      isEnabled: args => enabled.includes(args['kernelId'] as string),
      execute: args => execute(args)
    });
    return execute;
  }

  test('a request opens the popover of the chosen kernel', async () => {
    services.start('a');
    services.start('b');
    const opened = popover(['kernel-a', 'kernel-b']);
    expect(await commands.execute(CommandIDs.ask)).toBe(true);
    expect(opened.mock.calls).toEqual([[{ kernelId: 'kernel-a' }]]);
    expect(await commands.execute(CommandIDs.ask, { kernelId: 'kernel-b' })).toBe(true);
    expect(opened).toHaveBeenLastCalledWith({ kernelId: 'kernel-b' });
    expect(document.querySelector('.jp-Dialog')).toBeNull();
    expect(asked).toEqual([]);
  });

  test.each([
    ['is of another notebook', ['kernel-b'], ['kernel-b']],
    ['has nothing to open beside', [], ['kernel-a']]
  ])('a request opens a dialog if the popover %s', async (_, seen, enabled) => {
    services.start('a');
    services.start('b');
    popover(seen, enabled);
    const done = commands.execute(CommandIDs.ask);
    const open = await dialog();
    open.querySelector('input')!.value = '3';
    press(open, '.jp-mod-accept');
    expect(await done).toBe(true);
    expect(asked).toEqual([`PATCH sessions/kernel-a {"memory":${3 * 1024 ** 3}}`]);
  });

  test('the dialog shows the bounds and sends the size in bytes', async () => {
    services.start('a');
    // On two GPUs, a session may ask for less memory per GPU than on one GPU.
    const two = { ...aSession().request, devices: 2 };
    const most_bytes = 6 * 1024 ** 3;
    FakeSocket.one.snapshot(
      aPool({ sessions: [aSession({ id: 'a', request: two, most_bytes })] })
    );
    const done = commands.execute(CommandIDs.ask);
    const open = await dialog();
    expect(open.textContent).toContain('at most 6 GiB');
    const input = open.querySelector('input')!;
    expect(input.value).toBe('8');
    input.value = '4.5';
    press(open, '.jp-mod-accept');
    expect(await done).toBe(true);
    const memory = 4.5 * 1024 ** 3;
    // The request has no limit, because the broker derives the limit from the memory.
    expect(asked).toEqual([`PATCH sessions/kernel-a {"memory":${memory}}`]);
  });

  test('a request for the present size sends exactly that size', async () => {
    services.start('a');
    const memory = 1500 * 1024 ** 2;
    const request = { ...aSession().request, memory };
    FakeSocket.one.snapshot(aPool({ sessions: [aSession({ id: 'a', request })] }));
    const done = commands.execute(CommandIDs.ask);
    press(await dialog(), '.jp-mod-accept');
    expect(await done).toBe(true);
    expect(asked).toEqual([`PATCH sessions/kernel-a {"memory":${memory}}`]);
  });

  test('the dialog reopens after a wrong size and accepts the bound', async () => {
    services.start('a');
    const most_bytes = Math.round(23.68 * 1024 ** 3);
    FakeSocket.one.snapshot(aPool({ sessions: [aSession({ id: 'a', most_bytes })] }));
    const done = commands.execute(CommandIDs.ask);
    const first = await dialog();
    first.querySelector('input')!.value = '25';
    press(first, '.jp-mod-accept');
    let second = await dialog();
    while (second === first) {
      await new Promise(resolve => setTimeout(resolve, 5));
      second = await dialog();
    }
    expect(second.textContent).toContain('25 GiB is too much. You may ask for at most');
    const input = second.querySelector('input')!;
    expect(input.value).toBe('25');
    input.value = '23.7';
    press(second, '.jp-mod-accept');
    expect(await done).toBe(true);
    expect(asked).toEqual([`PATCH sessions/kernel-a {"memory":${most_bytes}}`]);
  });

  test('a cancelled dialog sends nothing', async () => {
    services.start('a');
    const done = commands.execute(CommandIDs.ask);
    press(await dialog(), '.jp-mod-reject');
    expect(await done).toBe(false);
    expect(asked).toEqual([]);
  });

  test('the broker’s lines open in a dialog', async () => {
    services.start('a');
    answer.body = WHY;
    const done = commands.execute(CommandIDs.why);
    const open = await dialog();
    expect(asked).toEqual(['GET sessions/kernel-a/why']);
    expect(open.textContent).toContain(WHY.lines[0]);
    expect(open.textContent).toContain('Your group is bio.');
    press(open, 'button');
    expect(await done).toBe(true);
  });

  test('a refresh reports a missing answer', async () => {
    answer.status = 503;
    answer.body = { code: 'away', message: 'No broker.', next_step: 'Start one.' };
    await commands.execute(CommandIDs.refresh);
    expect(asked).toEqual(['GET pool']);
    expect(shown()).toEqual([['error', 'No broker. Start one.']]);
  });

  test('a refresh without a broker reports no error', async () => {
    answer.status = 503;
    answer.body = { code: 'no-broker', message: 'No broker.', next_step: 'Start one.' };
    await commands.execute(CommandIDs.refresh);
    expect(shown()).toEqual([
      ['info', 'The pool starts when the first Pooled GPU kernel starts.']
    ]);
  });
});
