// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** The side panel: whose the devices are, who waits, what my kernels did. */
import { faults } from '../axe';
import { expect, test } from '../lab';
import { ask, neighbour, session, uses } from '../pool';

test('devices, queue, kernels, host memory; no names; accessible', async ({ lab }) => {
  await ask('fresh');
  const { page, panel } = lab;
  await neighbour('stranger', { alloc: 1 });
  const mine = await lab.notebook('mine');
  await mine.run(uses(1024));
  await expect(mine.chip).toHaveText(/^Idle/);
  await neighbour('batch', { gib: 7, hold: false });
  await ask('asks', { name: 'batch' });
  // It has been given my device by then, or waits for it: the queue shows one of us.
  await lab.execute('gpupool:show-panel');
  await expect(panel.getByRole('heading', { name: 'GPU Pool' })).toBeVisible();
  await expect(panel.locator('.jp-gpupool-emulated').first()).toHaveText('EMULATED');

  const devices = panel.getByRole('listbox');
  await expect(devices).toHaveCount(2);
  await expect(
    panel.getByRole('option', { name: /^Somebody \(.*\): 6 GiB, at work$/ })
  ).toHaveCount(1);
  await expect(mine.chip).toHaveText(/^In host memory 1\.\d GiB$/);
  await expect(
    panel.getByRole('option', { name: /^Somebody \(.*\): 7 GiB, at work$/ })
  ).toHaveCount(1);
  await expect(panel).toContainText('2 GPUs · 2 kernels have one · 0 wait');
  await expect(panel.getByRole('meter', { name: /^Host memory/ })).toHaveAttribute(
    'aria-valuetext',
    /^1\.\d of 16 GiB/
  );

  // Now it is I who wait.
  await mine.run('buffer.fill(1, stream=stream); stream.sync()', false);
  await expect(mine.chip).toHaveText(/^Waiting: 1st/);
  const queue = panel.getByRole('region', { name: 'Queue' });
  await expect(queue.getByRole('listitem')).toHaveCount(1);
  await expect(queue).toContainText('mine.ipynb');
  await ask('leave', { name: 'batch' });
  await expect(queue).toContainText('Nobody waits for a GPU.');
  await expect(
    panel.getByRole('option', { name: /mine\.ipynb: 1\.\d of 6 GiB used, idle/ })
  ).toHaveCount(1);

  const kernels = panel.getByRole('region', { name: 'My kernels on this server' });
  await expect(
    kernels.getByRole('button', { name: 'mine.ipynb', exact: true })
  ).toBeVisible();
  await expect(
    kernels.locator('svg[role=img], [role=img] svg, svg').first()
  ).toBeVisible();
  await expect(kernels.getByRole('img', { name: /^Memory/ })).toBeVisible();
  await expect(
    kernels.getByRole('img', { name: /^Share of time in which it used CUDA/ })
  ).toBeVisible();
  await expect(panel.getByRole('region', { name: 'Use' })).toContainText(
    /Attached \d.* h of \d.* open kernel-hours/
  );
  await expect(panel).not.toContainText('21001');
  await expect(panel).not.toContainText('stranger');

  await page.evaluate(() => document.fonts.ready);
  for (const theme of ['JupyterLab Light', 'JupyterLab Dark']) {
    await lab.theme(theme);
    expect(await faults(page, '.jp-gpupool-panel'), theme).toEqual([]);
  }

  // Forced colours, dark: the number must be seen on its badge.
  await page.emulateMedia({ forcedColors: 'active', colorScheme: 'dark' });
  const [text, back] = await kernels
    .locator('.jp-gpupool-badge')
    .first()
    .evaluate(node => {
      const { color, backgroundColor } = getComputedStyle(node);
      return [color, backgroundColor];
    });
  const probe = await page.evaluate(() => {
    const node = document.body.appendChild(document.createElement('p'));
    node.style.cssText = 'color: CanvasText; background: Canvas';
    const { color, backgroundColor } = getComputedStyle(node);
    node.remove();
    return [color, backgroundColor];
  });
  expect([text, back]).toEqual(probe);
  expect(text).not.toBe(back);
  await page.emulateMedia({ forcedColors: 'none', colorScheme: 'light' });

  await lab.theme('JupyterLab Light');
  await kernels.getByRole('button', { name: /^Release the slice of/ }).click();
  await expect(mine.chip).toHaveText(/^In host memory/);
  expect((await session(mine.kernelId))?.device).toBeNull();
});

test('without a kernel of the pool it asks once, and when told to', async ({ lab }) => {
  await ask('fresh');
  // A page that never had one: this page hears only now and then that those of before have ended,
  // and then looks for the last time.
  await lab.fresh();
  const before = lab.traffic.length;
  const asked = () => lab.traffic.slice(before).map(line => line.split(' ')[0]);
  await lab.execute('gpupool:show-panel');
  await expect(lab.panel).toContainText('No Pooled GPU kernel is open.');
  expect(asked()).toEqual(['GET']);
  await lab.panel.getByRole('button', { name: 'Refresh' }).click();
  await expect(lab.panel).toContainText('2 GPUs · 0 kernels have one · 0 wait');
  expect(asked()).toEqual(['GET', 'GET']);
});

test('64 devices in 300 pixels', async ({ lab }) => {
  await ask('fresh', { emulate: '64x1GiB,context=16MiB', default_memory: '512MiB' });
  const { page, panel } = lab;
  const notebook = await lab.notebook('many');
  await notebook.run(uses(64));
  await lab.execute('gpupool:show-panel');
  await page.sidebar.setWidth(300, 'right');
  const cells = panel.locator('.jp-gpupool-cell');
  await expect(cells).toHaveCount(64);
  await expect(panel).toContainText('64 GPUs · 1 kernel has one · 0 wait');
  await expect(panel).toContainText('1 in use of 64');
  await expectNoScroll();
  // One stop for the tab key, arrow keys from there.
  await expect(panel.locator('.jp-gpupool-cell[tabindex="0"]')).toHaveCount(1);
  await cells.first().focus();
  await page.keyboard.press('End');
  await expect(cells.last()).toBeFocused();
  await page.keyboard.press('Enter');
  await expect(cells.last()).toHaveAttribute('aria-expanded', 'true');
  await expect(panel.getByRole('listbox')).toHaveCount(1);
  await panel.getByRole('button', { name: 'All in full' }).click();
  await expect(panel.getByRole('listbox')).toHaveCount(64);
  await expectNoScroll();
  expect(await faults(page, '.jp-gpupool-panel')).toEqual([]);

  async function expectNoScroll(): Promise<void> {
    const [inside, width] = await panel.evaluate(
      node => [node.scrollWidth, node.clientWidth] as const
    );
    expect(width).toBeLessThanOrEqual(300);
    expect(inside).toBeLessThanOrEqual(width);
  }
});

test('panel and chip show an administrator’s pause and its reason', async ({ lab }) => {
  await ask('fresh');
  const { panel } = lab;
  const mine = await lab.notebook('paused');
  await mine.run(uses(256));
  await expect(mine.chip).toHaveText(/^Idle/);
  await ask('maintain', { action: 'pause', reason: 'new driver' });
  await lab.execute('gpupool:show-panel');
  const notices = panel.getByRole('list', { name: 'Notices' });
  const notice = notices.getByRole('listitem').filter({ hasText: 'administrator' });
  await expect(notice).toHaveText(
    /^The pool has been paused by the administrator \(.+\) since .+: new driver/
  );
  await expect(mine.chip).toHaveText(/^In host memory/);
  await mine.run('buffer.fill(1, stream=stream); stream.sync()', false);
  await expect(mine.chip).toHaveText('Waiting: paused by the administrator');
  expect(await faults(lab.page, '.jp-gpupool-panel')).toEqual([]);
  await ask('maintain', { action: 'resume' });
  await expect(notice).toHaveCount(0);
  await expect(mine.chip).toHaveText(/^Idle/);
});
