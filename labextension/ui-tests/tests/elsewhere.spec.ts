// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Tests of Notebook 7, a machine without a GPU, and kernels on another machine. */
import { faults } from '../axe';
import { expect, Lab, test } from '../lab';
import { ask, KERNEL, session, stage, uses } from '../pool';

test('Notebook 7 has the chip, the popover and the panel', async ({ browser }) => {
  await ask('fresh');
  const lab = await Lab.open(browser, { app: 'tree' });
  const file = lab.write('seven', KERNEL);
  const { page } = lab;
  await lab.go(`notebooks/${file}`);
  const chip = page.locator('.jp-NotebookPanel-toolbar .jp-gpupool-chip');
  await expect(chip).toHaveText('No GPU');
  await page.locator('.jp-Notebook .cm-content').first().click();
  await page.keyboard.insertText(uses(64).trim());
  await page.keyboard.press('Shift+Enter');
  await expect(chip).toHaveText(/^Idle, back to the pool in/);
  await chip.click();
  await lab.popover.getByRole('button', { name: 'Release now' }).click();
  await expect(chip).toHaveText(/^In host memory/);
  expect(await faults(page, '.jp-gpupool-Popover')).toEqual([]);
  await lab.popover.getByRole('button', { name: 'Show the pool' }).click();
  await expect(lab.panel).toContainText('2 GPUs');
  expect(lab.errors.filter(text => /gpupool/i.test(text))).toEqual([]);
  await lab.close();
});

test('a console has the chip, the status item and the popover', async ({ lab }) => {
  await ask('fresh');
  const { page } = lab;
  await lab.execute('console:create', { kernelPreference: { name: KERNEL } });
  const chip = page.locator('.jp-ConsolePanel .jp-gpupool-chip');
  await expect(chip).toHaveText('No GPU');
  await expect(lab.statusItem).toHaveText('No GPU');
  await page.locator('.jp-CodeConsole-input .cm-content').first().click();
  await page.keyboard.insertText(uses(64).trim());
  await page.keyboard.press('Shift+Enter');
  await expect(chip).toHaveText(/^Idle, back to the pool in/);
  await expect(lab.statusItem).toHaveText(/^Idle, back to the pool in/);
  await lab.execute('gpupool:open');
  await expect(lab.popover.getByRole('heading').first()).toHaveText(
    /^This console is idle with /
  );
  await lab.popover.getByRole('button', { name: 'Release now' }).click();
  await expect(chip).toHaveText(/^In host memory/);
  expect(await faults(page, '.jp-ConsolePanel .jp-gpupool-Chip')).toEqual([]);
  await page.keyboard.press('Escape');
});

test('without a GPU, the launcher offers a plain kernel', async ({ browser }) => {
  const url = await ask<string>('lab_without_gpu');
  expect(url).not.toBe(stage().url);
  const lab = await Lab.open(browser, { url });
  const { page } = lab;
  const tile = page.locator('.jp-LauncherCard[data-category="Notebook"]', {
    hasText: 'Pooled GPU'
  });
  await expect(tile).toHaveCount(1);
  await expect(tile).toContainText('no GPU found');
  await tile.click();
  const dialog = page.locator('.jp-Dialog');
  await expect(dialog).toContainText('No NVIDIA driver was found on this machine.');
  await expect(dialog).toContainText('jupyter gpupool doctor');
  await expect(dialog).toContainText('GPUPOOL_EMULATE=2x8GiB');
  await expect(dialog).not.toContainText('`');
  expect(await faults(page, '.jp-gpupool-Explanation')).toEqual([]);
  await dialog.getByRole('button', { name: /^Start .* without a GPU$/ }).click();
  await page.waitForFunction(
    () => window.jupyterapp.shell.currentWidget?.title.label === 'Untitled.ipynb'
  );
  const notebook = await lab.current('Untitled.ipynb');
  await notebook.run('print(6 * 7)');
  await expect(notebook.output).toHaveText('42');
  await lab.execute('gpupool:show-panel');
  await expect(lab.panel).toContainText('No GPU found');
  await expect(lab.panel).not.toContainText('`');
  await lab.close();
});

/** Change a message as if the server's kernels ran on GPU 3 of a machine named gpu2. */
function onGpu2<T extends object>(message: T): T {
  const sessions = (
    'sessions' in message ? (message.sessions as Record<string, unknown>[]) : []
  ).map(session => ({
    ...session,
    ...(session['here'] === true && {
      machine: 'gpu2',
      unreachable: '',
      gpus: (session['devices'] as string[]).map(uuid => ({
        ...{ uuid, index: 3, name: 'EMULATED NVIDIA GPU', emulated: true }
      }))
    })
  }));
  const here = sessions.filter(session => 'machine' in session);
  return {
    ...message,
    ...('sessions' in message && { sessions }),
    ...(here.length > 0 && {
      remote_kernels: Object.fromEntries(
        here.map(session => [
          String((session as Record<string, unknown>)['kernel_id']),
          'gpu2'
        ])
      )
    })
  };
}

test('a kernel on another machine shows, and can be restarted', async ({ browser }) => {
  await ask('fresh');
  const lab = await Lab.open(browser);
  const { page } = lab;
  const context = page.context();
  await context.routeWebSocket(/gpupool\/api\/events/, socket => {
    socket.connectToServer().onMessage(text => {
      const said = JSON.parse(text.toString()) as { snapshot?: object; delta?: object };
      const { snapshot, delta } = said;
      socket.send(
        JSON.stringify({
          ...said,
          ...(snapshot && { snapshot: onGpu2(snapshot) }),
          ...(delta && { delta: onGpu2(delta) })
        })
      );
    });
  });
  await context.route(/gpupool\/api\/pool/, async route => {
    const response = await route.fetch();
    await route.fulfill({ response, json: onGpu2((await response.json()) as object) });
  });
  await lab.fresh();
  const notebook = await lab.notebook('far');
  await notebook.run(uses(64));
  await expect(notebook.chip).toHaveText(/^Idle, back to the pool in/);
  await notebook.chip.click();
  await expect(lab.popover.getByRole('heading').first()).toHaveText(
    /^This notebook is idle with .* on GPU 3 of gpu2 \(emulated\)\.$/
  );
  await page.keyboard.press('Escape');
  await lab.execute('gpupool:show-panel');
  await expect(lab.panel).toContainText('0 kernels have one');
  await expect(lab.panel).toContainText('far.ipynb');

  const item = 'Kernel>GPU Pool>Restart Where the Cluster Has Room…';
  await page.menu.clickMenuItem(item);
  const dialog = page.locator('.jp-Dialog');
  await expect(dialog).toContainText(
    'All variables of the kernel on gpu2 are lost, with'
  );
  expect(await faults(page, '.jp-Dialog')).toEqual([]);
  // A user who presses Enter loses nothing.
  await expect(dialog.getByRole('button', { name: 'Cancel' })).toBeFocused();
  await page.keyboard.press('Enter');
  await expect(dialog).toHaveCount(0);
  expect((await session(notebook.kernelId))?.state).toBe('idle');

  await page.menu.clickMenuItem(item);
  await dialog.getByRole('button', { name: 'Lose them and restart' }).click();
  await expect.poll(() => session(notebook.kernelId)).toBeUndefined();
  // The cells of the notebook ran again, in another kernel.
  await expect(notebook.chip).toHaveText(/^Idle, back to the pool in/);
  const { sessions } = await ask<{ sessions: { label: string; state: string }[] }>(
    'status'
  );
  const own = sessions.filter(found => found.label.includes('far'));
  expect(own.map(found => found.state)).toEqual(['idle']);
  expect(lab.errors.filter(text => /gpupool/i.test(text))).toEqual([]);
  await lab.close();
});
