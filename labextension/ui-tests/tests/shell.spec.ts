// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * Tests of JupyterLab's lists: notifications, commands, running kernels, the launcher.
 */
import { faults } from '../axe';
import { expect, test } from '../lab';
import { ask, session, uses } from '../pool';

test('a toast warns before a slice is taken and offers to keep it', async ({ lab }) => {
  await ask('fresh', { idle_timeout: 12 });
  const notebook = await lab.notebook('toast');
  await notebook.run(uses(512));
  const toast = lab.page
    .locator('.Toastify__toast')
    .filter({ hasText: 'its GPU slice goes back to the pool at' });
  await expect(toast).toContainText('toast.ipynb');
  await toast.getByRole('button', { name: 'Keep for 10 minutes' }).click();
  await expect
    .poll(async () => (await session(notebook.kernelId))?.keep_until)
    .toBeGreaterThan(Date.now() / 1000 + 500);
  await expect(toast).toHaveCount(0);
  expect((await session(notebook.kernelId))?.state).toBe('idle');
});

test('the Kernel menu and the palette can get a GPU now', async ({ lab }) => {
  await ask('fresh');
  const { page } = lab;
  const notebook = await lab.notebook('menu');
  await expect(notebook.chip).toHaveText('No GPU');
  await page.menu.clickMenuItem('Kernel>GPU Pool>Get a GPU Now');
  await expect(notebook.chip).toHaveText(/^Idle, back to the pool in/);
  expect((await session(notebook.kernelId))?.state).toBe('idle');

  // The kernel has a slice, so it cannot get another. The menu offers to release the
  // slice.
  expect(
    await page.evaluate(() => window.jupyterapp.commands.isEnabled('gpupool:get'))
  ).toBe(false);
  await page.menu.clickMenuItem('Kernel>GPU Pool>Release the GPU Now');
  await expect(notebook.chip).toHaveText('No GPU');

  await lab.execute('apputils:activate-command-palette');
  await page.locator('.lm-CommandPalette-input').fill('get a gpu now');
  await page
    .locator('.lm-CommandPalette-item', { hasText: 'Get a GPU Now' })
    .first()
    .click();
  await expect(notebook.chip).toHaveText(/^Idle, back to the pool in/);
  await expect(notebook.output).toBeEmpty();
});

test('launcher, palette and running kernels show the pool', async ({ lab }) => {
  await ask('fresh');
  const { page } = lab;
  const tile = page.locator('.jp-LauncherCard[title^="Pooled GPU"]:visible').first();
  await lab.execute('launcher:create');
  const logo = tile.locator('img');
  await expect(logo).toBeVisible();
  await expect(logo).toHaveAttribute('src', /kernelspecs\/gpupool-python3\/logo/);
  expect(
    await logo.evaluate((node: HTMLImageElement) => node.naturalWidth)
  ).toBeGreaterThan(31);
  await expect(
    page.locator('.jp-LauncherCard', { hasText: 'no GPU found' })
  ).toHaveCount(0);
  await expect(
    page.locator('.jp-LauncherCard[data-category="Notebook"]:visible', {
      hasText: 'Pooled GPU (Python 3)'
    })
  ).toHaveCount(1);
  await expect(tile).toHaveAttribute(
    'title',
    /^Pooled GPU \(Python 3\): gets a GPU when cells use CUDA\. 15\.5 of 15\.5 GiB is free\.\nAt most 7\.8 GiB is free on one GPU\.\nEMULATED: no real GPU is used\.$/
  );

  // The badge is below the picture, and the text does not make the tile taller.
  expect((await tile.boundingBox())!.height).toBeLessThan(180);
  await expect(tile).toContainText('15.5 of 15.5 GiB is free.');

  const notebook = await lab.notebook('lists');
  await notebook.run(uses(64));
  await expect(notebook.chip).toHaveText(/^Idle/);

  await lab.execute('apputils:activate-command-palette');
  await page.locator('.lm-CommandPalette-input').fill('gpu pool');
  const items = page.locator('.lm-CommandPalette-itemLabel');
  for (const name of [
    'Get a GPU Now',
    'Ask for GPU Memory…',
    'Release the GPU Now',
    'Keep the GPU for 10 Minutes',
    'Why Does This Kernel Wait or Keep Its GPU?',
    'Show GPU Pool Panel'
  ]) {
    await expect(items.filter({ hasText: name })).toHaveCount(1);
  }
  await page.keyboard.press('Escape');
  await notebook.activate();
  await lab.execute('gpupool:why', {}, false);
  const dialog = page.locator('.jp-Dialog');
  await expect(dialog).toContainText('It is idle and keeps');
  expect(await faults(page, '.jp-Dialog')).toEqual([]);
  await dialog.getByRole('button', { name: 'Close' }).click();

  await lab.execute('running:show-panel');
  const running = page.locator('.jp-RunningSessions');
  const section = running.locator('.jp-AccordionPanel-title', { hasText: 'GPU Pool' });
  await expect(section).toBeVisible();
  const item = running
    .locator('.jp-RunningSessions-section', {
      has: page.locator('[data-icon="gpupool:logo"]')
    })
    .locator('.jp-RunningSessions-item')
    .first();
  await item.hover();
  await item.getByTitle('Release GPU').click();
  await expect(notebook.chip).toHaveText(/^In host memory/);
  await lab.execute('filebrowser:activate');
});
