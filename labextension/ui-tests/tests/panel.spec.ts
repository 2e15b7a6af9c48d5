// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * Tests of the side panel: who uses the devices, who waits, and what my kernels did.
 */
import { faults } from '../axe';
import { expect, test } from '../lab';
import { ask, neighbour, session, uses } from '../pool';

test('the panel shows devices, queue, kernels and host memory', async ({ lab }) => {
  await ask('fresh');
  const { page, panel } = lab;
  await neighbour('stranger', { alloc: 1 });
  const mine = await lab.notebook('mine');
  await mine.run(uses(1024));
  await expect(mine.chip).toHaveText(/^Idle/);
  await neighbour('batch', { gib: 7, hold: false });
  await ask('asks', { name: 'batch' });
  // The neighbour asks for 7 GiB, so the pool suspends my idle kernel and gives its GPU
  // to the neighbour. This may still be under way when the panel opens.
  await lab.execute('gpupool:show-panel');
  await expect(panel.getByRole('heading', { name: 'GPU Pool' })).toBeVisible();
  await expect(panel.locator('.jp-gpupool-emulated').first()).toHaveText('EMULATED');

  const devices = panel.getByRole('img', { name: / in slices, / });
  await expect(devices).toHaveCount(2);
  // Each slice has a line of text, so a user can read about it without a mouse. Root
  // also sees the owners' names.
  const on = (text: RegExp) =>
    panel
      .getByRole('list', { name: /^On GPU/ })
      .getByRole('listitem')
      .filter({
        hasText: text
      });
  await expect(on(/^stranger \(uid-21001\)6 GiB · in use$/)).toHaveCount(1);
  await expect(mine.chip).toHaveText(/^In host memory: 1\.\d GiB$/);
  await expect(on(/^batch \(uid-21001\)7 GiB · in use$/)).toHaveCount(1);
  await expect(panel).toContainText('2 GPUs · 2 kernels have a slice · 0 wait');
  await expect(panel.getByRole('meter', { name: /^Host memory/ })).toHaveAttribute(
    'aria-valuetext',
    /^1\.\d of 16 GiB/
  );
  // The popover and the panel say why the pool took the slice, and which call brings
  // the data back.
  const kernels = panel.getByRole('region', { name: 'My kernels on this server' });
  await expect(kernels).toContainText(
    /The pool took this kernel’s slice while the kernel was idle: .+; the next CUDA call brings it back\./
  );
  await mine.chip.click();
  await expect(lab.popover).toContainText(
    /Your data is safe in host memory; the next CUDA call brings it back\.The pool took the slice while the kernel was idle: .+\./
  );
  await page.keyboard.press('Escape');

  // Now my own notebook waits.
  await mine.run('buffer.fill(1, stream=stream); stream.sync()', false);
  await expect(mine.chip).toHaveText(/^Waiting: 1st/);
  const queue = panel.getByRole('region', { name: 'Queue' });
  await expect(queue.getByRole('listitem')).toHaveCount(1);
  await expect(queue).toContainText('mine.ipynb');
  await expect(queue).toContainText(/6 GiB · (.*, )?(no estimate yet|.* left)/);
  await ask('leave', { name: 'batch' });
  await expect(queue).toContainText('Nobody waits for a GPU.');
  await expect(on(/mine\.ipynb1\.\d of 6 GiB used · idle$/)).toHaveCount(1);

  await expect(
    kernels.getByRole('button', { name: 'mine.ipynb', exact: true })
  ).toBeVisible();
  await expect(
    kernels.locator('svg[role=img], [role=img] svg, svg').first()
  ).toBeVisible();
  await expect(kernels.getByRole('img', { name: /^Memory/ })).toBeVisible();
  await expect(
    kernels.getByRole('img', { name: /^Share of time in which the kernel used CUDA/ })
  ).toBeVisible();
  await expect(panel.getByRole('region', { name: 'Use' })).toContainText(
    /Since the server started, your kernels ran for \d.* and had a GPU for \d.* \(/
  );
  const hour = panel.getByRole('region', { name: 'Last hour' });
  await expect(
    hour.getByRole('img', { name: /^GPU 0, memory in slices in the last hour: least/ })
  ).toBeVisible();
  await expect(
    hour.getByRole('img', { name: /^Kernels that waited in the last hour: .*most 1/ })
  ).toBeVisible();

  await page.evaluate(() => document.fonts.ready);
  for (const theme of ['JupyterLab Light', 'JupyterLab Dark']) {
    await lab.theme(theme);
    expect(await faults(page, '.jp-gpupool-panel'), theme).toEqual([]);
  }

  // With forced dark colours, the number on the badge must be visible.
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
  expect(await faults(page, '.jp-gpupool-panel')).toEqual([]);
  await page.emulateMedia({ forcedColors: 'none', colorScheme: 'light' });

  await lab.theme('JupyterLab Light');
  await kernels.getByRole('button', { name: /^Release the slice of/ }).click();
  await expect(mine.chip).toHaveText(/^In host memory/);
  expect((await session(mine.kernelId))?.device).toBeNull();
});

test('the panel in a tab can shut down a kernel by keyboard', async ({ lab }) => {
  await ask('fresh');
  const { page, panel } = lab;
  const mine = await lab.notebook('alone');
  await mine.run(uses(256));
  await expect(mine.chip).toHaveText(/^Idle/);
  await lab.execute('gpupool:show-panel');
  // The panel in a tab and the panel in the side bar have different names.
  await panel.getByRole('button', { name: 'Open in a tab' }).click();
  const tab = page.locator('#jp-gpupool-panel-tab');
  await expect(tab.getByRole('img', { name: / in slices, / })).toHaveCount(2);
  await expect(tab.getByRole('region', { name: 'Last hour' })).toBeVisible();
  expect(await faults(page, '#jp-gpupool-panel-tab')).toEqual([]);
  const kernels = tab.getByRole('region', { name: 'My kernels on this server' });
  await expect(kernels).toContainText('alone.ipynb');
  await expect(kernels).not.toContainText('tab closed');

  // Close the notebook. `dispose` does not ask whether to save the document.
  await page.evaluate(() => {
    for (const widget of [...window.jupyterapp.shell.widgets('main')]) {
      if (widget.node.classList.contains('jp-NotebookPanel')) {
        widget.dispose();
      }
    }
  });
  await tab.getByRole('heading', { name: 'GPU Pool' }).click();
  await expect(kernels).toContainText('tab closed');
  const end = kernels.getByRole('button', {
    name: 'Shut down the kernel of alone.ipynb'
  });
  await end.focus();
  await page.keyboard.press('Enter');
  const dialog = page.getByRole('dialog');
  await expect(dialog).toContainText('The kernel’s variables are lost,');
  expect(await faults(page, '.jp-Dialog')).toEqual([]);
  await page.keyboard.press('Escape');
  await expect(dialog).toHaveCount(0);
  expect(await session(mine.kernelId)).toBeTruthy();
  await expect(end).toBeFocused();
  await page.keyboard.press('Enter');
  await dialog.getByRole('button', { name: 'Shut it down' }).focus();
  await page.keyboard.press('Enter');
  await expect.poll(() => session(mine.kernelId)).toBeUndefined();
});

test('the admin’s page shows waste, and orders need a confirmation', async ({
  lab
}) => {
  await ask('fresh');
  const { page } = lab;
  await neighbour('hog', { gib: 7, alloc: 0.25 });
  const mine = await lab.notebook('small');
  await mine.run(uses(512));
  await expect(mine.chip).toHaveText(/^Idle/);
  await lab.execute('gpupool:show-admin');
  const admin = page.locator('.jp-gpupool-admin');
  const row = (name: string) =>
    admin.getByRole('row').filter({ has: page.getByRole('rowheader', { name }) });
  await expect(row('hog')).toContainText('uid-21001');
  await expect(row('hog')).toContainText('7 GiB');
  await expect(row('small.ipynb')).toContainText(/Idle/);
  await page.evaluate(() => document.fonts.ready);
  // The page is too narrow for the table, so the table scrolls. The buttons and the
  // kernels' names must stay visible.
  await page.sidebar.open('left');
  const inSight = { ratio: 1 };
  for (const side of ['left', 'right']) {
    await admin
      .locator('.jp-gpupool-adminScroll')
      .evaluate((node, to) => (node.scrollLeft = to === 'left' ? 0 : 9999), side);
    await expect(row('hog').getByRole('rowheader')).toBeInViewport(inSight);
    await expect(admin.getByRole('button', { name: 'Shut down hog' })).toBeInViewport(
      inSight
    );
  }
  for (const theme of ['JupyterLab Light', 'JupyterLab Dark']) {
    await lab.theme(theme);
    expect(await faults(page, '.jp-gpupool-admin'), theme).toEqual([]);
  }

  // With forced colours, the browser replaces the theme's colours. Each button must
  // still have a visible edge or an underline.
  for (const colorScheme of ['light', 'dark'] as const) {
    await page.emulateMedia({ forcedColors: 'active', colorScheme });
    expect(await faults(page, '.jp-gpupool-admin'), colorScheme).toEqual([]);
    const edges = await admin.getByRole('button').evaluateAll(nodes =>
      nodes.map(node => {
        const { borderTopColor, backgroundColor, textDecorationLine } =
          getComputedStyle(node);
        return borderTopColor !== backgroundColor || textDecorationLine !== 'none';
      })
    );
    expect(edges.every(Boolean), colorScheme).toBe(true);
  }
  await page.emulateMedia({ forcedColors: 'none', colorScheme: 'light' });
  await lab.theme('JupyterLab Light');

  // Use only the keyboard. Without a valid number of minutes, Enter gives no order.
  await admin
    .getByRole('button', { name: 'Take the slice of small.ipynb back' })
    .focus();
  await page.keyboard.press('Enter');
  const dialog = page.getByRole('dialog');
  const minutes = dialog.getByLabel('Minutes until then');
  await expect(minutes).toBeFocused();
  await page.keyboard.type('7'); // replaces the number in the field
  await expect(minutes).toHaveValue('7');
  expect(await faults(page, '.jp-Dialog')).toEqual([]);
  for (const wrong of ['', '0', '-1']) {
    await minutes.fill(wrong);
    await expect(dialog).toContainText(
      'Type a whole number of minutes from 1 to 10080.'
    );
    await page.keyboard.press('Enter');
  }
  await expect(dialog).toBeVisible();
  expect((await session(mine.kernelId))?.recall_at).toBeNull();
  await minutes.fill('30');
  await dialog.getByLabel(/^Reason/).fill('a lecture');
  await page.keyboard.press('Enter');
  await expect(dialog).toHaveCount(0);
  await expect(admin.getByRole('status')).toContainText(
    'small.ipynb: The pool takes the slice back in 30 min'
  );
  expect((await session(mine.kernelId))?.recall_at).not.toBeNull();
  await expect(page.locator('.Toastify__toast')).toContainText(
    /small\.ipynb: The administrator .* takes the slice of this kernel back in 30 min: a lecture/
  );
  // JupyterLab cuts a long notification.
  await page
    .locator('.Toastify__toast')
    .getByRole('button', { name: 'Show all' })
    .click();
  await expect(dialog).toContainText(
    'a running cell waits until the kernel has a slice again.'
  );
  await dialog.getByRole('button', { name: 'Close' }).click();
  await expect(row('small.ipynb')).toContainText('Goes back at');
  const rows = await ask<{ detail: { order: string } }[]>('rows', { kinds: ['admin'] });
  expect(rows.map(found => found.detail.order)).toEqual(['recall']);

  // The owner also reads the order in the notebook.
  await mine.activate();
  await mine.run('print("still here")');
  await expect(mine.output).toContainText(
    'takes the slice of this kernel back in 30 min'
  );
  await lab.execute('gpupool:show-admin');
  await admin.getByRole('button', { name: 'Let small.ipynb keep its slice' }).click();
  await expect(admin.getByRole('status')).toHaveText('small.ipynb: The slice stays.');

  // The admin chooses a class by keyboard. The broker journals the order, and the owner
  // gets a notice.
  await admin
    .getByRole('button', { name: 'Change the priority of small.ipynb' })
    .focus();
  await page.keyboard.press('Enter');
  await expect(dialog).toContainText('The kernel’s priority class is now notebook.');
  const classes = dialog.getByLabel('Priority class');
  await expect(classes).toBeFocused();
  await expect(classes).toHaveValue('notebook');
  expect(await faults(page, '.jp-Dialog')).toEqual([]);
  await page.keyboard.press('Escape');
  await expect(dialog).toHaveCount(0);
  expect((await session(mine.kernelId))?.priority).toBe('notebook');
  await page.keyboard.press('Enter');
  await classes.selectOption('batch');
  await dialog.getByLabel(/^Reason/).fill('it is night');
  await page.keyboard.press('Enter');
  await expect(dialog).toHaveCount(0);
  await expect.poll(async () => (await session(mine.kernelId))?.priority).toBe('batch');
  await expect(page.locator('.Toastify__toast')).toContainText([
    /has moved this kernel to the priority class batch: it is night/
  ]);
  const orders = await ask<{ detail: { order: string } }[]>('rows', {
    kinds: ['admin']
  });
  expect(orders.map(found => found.detail.order)).toContain('prioritise');

  await admin.getByRole('button', { name: 'Shut down hog' }).click();
  expect(await faults(page, '.jp-Dialog')).toEqual([]);
  await dialog.getByRole('button', { name: 'Shut it down' }).click();
  await expect(row('hog')).toHaveCount(0);
  const ends = await ask<{ reason: string; detail: { order?: string } }[]>('rows', {
    kinds: ['admin', 'close']
  });
  expect(ends.filter(found => found.detail.order === 'end')).toHaveLength(1);
  expect(ends.filter(found => /has ended this kernel/.test(found.reason))).toHaveLength(
    2
  );

  // Give orders about a GPU with only the keyboard. When a dialog closes, the focus
  // returns to the button that opened it, or to the button in its place.
  const gpu = (text: string) =>
    admin.getByRole('button', { name: `GPU 1: ${text}…`, exact: true });
  const order = async (text: string, title: string, accept: string): Promise<void> => {
    await expect(gpu(text)).toBeFocused();
    await page.keyboard.press('Enter');
    await expect(dialog).toContainText(title);
    await expect(dialog.getByLabel(/^Reason/)).toBeFocused();
    expect(await faults(page, '.jp-Dialog'), title).toEqual([]);
    await page.keyboard.press('Escape');
    await expect(dialog).toHaveCount(0);
    await expect(gpu(text)).toBeFocused();
    await page.keyboard.press('Enter');
    await expect(dialog.getByLabel(/^Reason/)).toBeFocused();
    await page.keyboard.press('Tab');
    await expect(dialog.getByRole('button', { name: 'Cancel' })).toBeFocused();
    await page.keyboard.press('Tab');
    await expect(dialog.getByRole('button', { name: accept })).toBeFocused();
    await page.keyboard.press('Enter');
    await expect(dialog).toHaveCount(0);
  };
  await page.locator('.jp-gpupool-admin').focus();
  for (const name of ['GPU 0: Drain…', 'GPU 0: Pause…', 'GPU 1: Drain…']) {
    await page.keyboard.press('Tab');
    await expect(admin.getByRole('button', { name, exact: true })).toBeFocused();
  }
  for (const [text, title, accept, done] of [
    ['Drain', 'Drain GPU 1?', 'Drain it', 'drained by the administrator'],
    ['Pause', 'Pause GPU 1?', 'Pause it', 'paused by the administrator']
  ] as const) {
    await gpu(text).focus();
    await order(text, title, accept);
    await expect(admin).toContainText(done);
    await order('Put back', 'Put GPU 1 back into service?', 'Put it back');
    await expect(admin).not.toContainText(done);
    await expect(gpu('Drain')).toBeFocused();
  }
});

test('the panel without a kernel asks when opened and on Refresh', async ({ lab }) => {
  await ask('fresh');
  // Load a new page, because the old page had pooled kernels. When the old page learns
  // that its kernels have ended, it sends one more request, perhaps during this test.
  await lab.fresh();
  const before = lab.traffic.length;
  const asked = () => lab.traffic.slice(before).map(line => line.split(' ')[0]);
  await lab.execute('gpupool:show-panel');
  await expect(lab.panel).toContainText('No Pooled GPU kernel is open.');
  await expect.poll(asked).toEqual(['GET']);
  await lab.panel.getByRole('button', { name: 'Refresh' }).click();
  await expect(lab.panel).toContainText('2 GPUs · 0 kernels have a slice · 0 wait');
  await expect.poll(asked).toEqual(['GET', 'GET']);
});

test('the panel shows 64 devices in 300 pixels', async ({ lab }) => {
  await ask('fresh', { emulate: '64x1GiB,context=16MiB', default_memory: '512MiB' });
  const { page, panel } = lab;
  const notebook = await lab.notebook('many');
  await notebook.run(uses(64));
  await lab.execute('gpupool:show-panel');
  await page.sidebar.setWidth(300, 'right');
  const cells = panel.locator('.jp-gpupool-cell');
  await expect(cells).toHaveCount(64);
  await expect(panel).toContainText('64 GPUs · 1 kernel has a slice · 0 wait');
  await expect(panel).toContainText('1 of 64 in use');
  await expectNoScroll();
  // The grid is one tab stop; arrow keys move the focus inside it.
  await expect(panel.locator('.jp-gpupool-cell[tabindex="0"]')).toHaveCount(1);
  await cells.first().focus();
  await page.keyboard.press('End');
  await expect(cells.last()).toBeFocused();
  await page.keyboard.press('Enter');
  await expect(cells.last()).toHaveAttribute('aria-expanded', 'true');
  await expect(panel.getByRole('img', { name: / in slices, / })).toHaveCount(1);
  // "Last hour" shows graphs for all devices together. A button shows the graphs of
  // each device instead.
  const hour = panel.getByRole('region', { name: 'Last hour' });
  await expect(hour.getByRole('img')).toHaveCount(3);
  await hour.getByRole('button', { name: 'Each GPU' }).click();
  await expect(hour.getByRole('img')).toHaveCount(2 * 64 + 1);
  await hour.getByRole('button', { name: 'Each GPU' }).click();
  await panel.getByRole('button', { name: 'Show each GPU' }).click();
  await expect(panel.getByRole('img', { name: / in slices, / })).toHaveCount(64);
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
  await expect(mine.chip).toHaveText('Waiting: the administrator has paused all GPUs');
  expect(await faults(lab.page, '.jp-gpupool-panel')).toEqual([]);
  await ask('maintain', { action: 'resume' });
  await expect(notice).toHaveCount(0);
  await expect(mine.chip).toHaveText(/^Idle/);
});
