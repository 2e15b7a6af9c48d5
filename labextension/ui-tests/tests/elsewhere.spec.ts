// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Notebook 7, and a machine without a GPU. */
import { faults } from '../axe';
import { expect, Lab, test } from '../lab';
import { ask, KERNEL, stage, uses } from '../pool';

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

test('no GPU: launcher and panel say so, cells run elsewhere', async ({ browser }) => {
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
