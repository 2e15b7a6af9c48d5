// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Tests of Notebook 7, a machine without a GPU, and kernels on another machine. */
import { faults } from '../axe';
import { expect, type ISite, Lab, test } from '../lab';
import { ask, type ISessionStatus, KERNEL, stage, uses } from '../pool';

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

/** Code that reads the device's bytes back. */
const BYTES = `
import ctypes
from cuda.bindings import driver
data = (ctypes.c_uint8 * (64 << 20))()
driver.cuMemcpyDtoH(ctypes.addressof(data), int(buffer.handle), len(data))
`;

/**
 * The sessions of the notebook `far` on a machine, as the broker of that machine
 * reports them.
 */
async function kernelsOn(name: string): Promise<ISessionStatus[]> {
  const status = await ask<{ sessions: ISessionStatus[] }>('machine', { name });
  return status.sessions.filter(found => found.label.includes('far'));
}

test('a kernel runs, suspends and restarts on another machine', async ({ browser }) => {
  const site = await ask<ISite | null>('lab_in_cluster');
  test.skip(site === null, 'munged is missing: apt-get install munge');
  const lab = await Lab.open(browser, { site: site! });
  const { page, panel, popover } = lab;
  const notebook = await lab.notebook('far');
  const far = async (): Promise<ISessionStatus | undefined> =>
    (await kernelsOn('m1')).find(found => found.kernel_id === notebook.kernelId);
  await notebook.run(`${uses(64)}buffer.fill(7, stream=stream); stream.sync()`);
  await expect(notebook.chip).toHaveText(/^Idle, back to the pool in/);
  expect((await far())?.state).toBe('idle');
  expect(await kernelsOn('m0')).toEqual([]);
  await notebook.chip.click();
  await expect(popover.getByRole('heading').first()).toHaveText(
    /^This notebook is idle with .* on GPU 0 of m1 \(emulated\)\.$/
  );
  await popover.getByRole('button', { name: 'Release now' }).click();
  await expect(notebook.chip).toHaveText(/^In host memory/);
  expect((await far())?.device).toBeNull();
  expect(await faults(page, '.jp-gpupool-Popover')).toEqual([]);
  await page.keyboard.press('Escape');
  await notebook.run(`${BYTES}print(bytes(data).count(7) == len(data))`);
  await expect(notebook.output).toHaveText('True');

  await lab.execute('gpupool:show-panel');
  const own = panel.getByRole('region', { name: 'My kernels on this server' });
  await expect(own).toContainText('far.ipynb');
  await expect(panel.getByRole('region', { name: 'Machines' })).toContainText('m1');
  await ask('silence', { name: 'm1' });
  await expect(own).toContainText('m1 does not answer');
  expect(await faults(page, '.jp-gpupool-panel')).toEqual([]);
  await ask('silence', { name: 'm1', ends: true });
  await expect(own).not.toContainText('m1 does not answer');
  await expect(notebook.chip).toHaveText(/^Idle, back to the pool in/);

  // Run a cell: the restart will run it again. Then fill the memory of m1, so that the
  // restart chooses m0.
  await notebook.run(uses(64));
  await ask('fill', { machine: 'm1' });
  const item = 'Kernel>GPU Pool>Restart Where the Cluster Has Room…';
  await page.menu.clickMenuItem(item);
  const dialog = page.locator('.jp-Dialog');
  await expect(dialog).toContainText(
    'All variables of the kernel on m1 are lost, and so is its data'
  );
  expect(await faults(page, '.jp-Dialog')).toEqual([]);
  // Enter must choose "Cancel", so that the user loses nothing.
  await expect(dialog.getByRole('button', { name: 'Cancel' })).toBeFocused();
  await page.keyboard.press('Enter');
  await expect(dialog).toHaveCount(0);
  expect(await far()).toBeDefined();

  await page.menu.clickMenuItem(item);
  await dialog.getByRole('button', { name: 'Lose the variables and restart' }).click();
  await expect.poll(far).toBeUndefined();
  // The notebook's cells ran again, in another kernel, on the machine with room.
  await expect
    .poll(async () => (await kernelsOn('m0')).map(found => found.state))
    .toEqual(['idle']);
  await expect(notebook.chip).toHaveText(/^Idle, back to the pool in/);
  expect(lab.errors.filter(text => /gpupool/i.test(text))).toEqual([]);
  await lab.close();
});
