// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * Tests of what users can do from the chip: by mouse, by keyboard, by screen reader.
 */
import { faults } from '../axe';
import { expect, test } from '../lab';
import { ask, GiB, neighbour, session, uses, Work } from '../pool';

test.beforeEach(async () => {
  await ask('fresh');
});

test('the popover accepts a new size but none above the limit', async ({ lab }) => {
  const notebook = await lab.notebook('asks');
  await expect(notebook.chip).toHaveText('No GPU');
  await notebook.chip.click();
  const { popover } = lab;
  await expect(popover).toContainText('You may ask for up to 7 GiB per GPU.');
  const field = popover.getByRole('textbox', { name: 'GPU memory' });
  await field.fill('3');
  await popover.getByRole('button', { name: 'Ask for it' }).click();
  await expect(popover.getByRole('status').first()).not.toBeEmpty();
  await expect(popover).toContainText('Current request: 3 GiB.');
  expect((await session(notebook.kernelId))?.request.memory).toBe(3 * GiB);

  // The page itself refuses a request above the limit per GPU, which is 7 GiB.
  await field.fill('9');
  await popover.getByRole('button', { name: 'Ask for it' }).click();
  await expect(popover.getByRole('alert').first()).toContainText('7 GiB');
  expect((await session(notebook.kernelId))?.request.memory).toBe(3 * GiB);

  // Without `max_memory_per_kernel`, a user may ask for as much as the largest device
  // has.
  await ask('options', { max_memory_per_kernel: null });
  await lab.execute('gpupool:refresh');
  await expect(popover).toContainText('You may ask for up to 7.8 GiB per GPU.');
});

test('"get a GPU now" works, and a full slice is shown', async ({ lab }) => {
  const notebook = await lab.notebook('gets');
  const { page, popover } = lab;
  await expect(notebook.chip).toHaveText('No GPU');
  const get = notebook.panel.getByRole('button', { name: 'Get a GPU now' });
  expect(await faults(page, '.jp-gpupool-Chip')).toEqual([]);
  await notebook.chip.click();
  await expect(popover.getByRole('button', { name: /^Keep/ })).toHaveCount(0);
  await popover.getByRole('button', { name: 'Get a GPU now' }).focus();
  await page.keyboard.press('Enter');
  await expect(notebook.chip).toHaveText(/^Idle, back to the pool in/);
  await expect(get).toHaveCount(0);
  await expect(
    popover.getByRole('button', { name: 'Keep for 10 minutes' })
  ).toBeVisible();
  await expect(notebook.output).toBeEmpty();
  await page.keyboard.press('Escape');

  await lab.execute('gpupool:release');
  await expect(notebook.chip).toHaveText('No GPU');
  await get.click();
  await expect(notebook.chip).toHaveText(/^Idle, back to the pool in/);

  const work = new Work('gets');
  await notebook.run(uses(5530) + work.code, false);
  await expect(notebook.chip).toHaveText(/of 6 GiB on GPU [01], nearly full$/);
  await notebook.chip.click();
  await expect(popover).toContainText('The slice is nearly full: ask for more memory');
  expect(await faults(page, '.jp-gpupool-Popover')).toEqual([]);
  const field = popover.getByRole('textbox', { name: 'GPU memory' });
  work.end();
  await expect(notebook.chip).toHaveText(/^Idle/);
  await field.fill('1 MiB');
  await popover.getByRole('button', { name: 'Ask for it' }).click();
  await expect(popover.getByRole('alert').first()).toContainText('at least 258 MiB');
  await notebook.run('%gpu 1MiB');
  await expect(notebook.output).toContainText('Ask for at least 258 MiB.');
  await notebook.run('%gpu keep 5h');
  await expect(notebook.output).toContainText(
    'at most 4 h at a time (c.GPUPool.max_keep)'
  );
});

test('the popover keeps an idle slice, and gives it back', async ({ lab }) => {
  const notebook = await lab.notebook('keeps');
  await notebook.run(uses(64));
  await expect(notebook.chip).toHaveText(/^Idle, back to the pool in/);
  await notebook.chip.click();
  const { popover } = lab;
  await popover.getByRole('button', { name: 'Keep for 10 minutes' }).click();
  await expect(popover).toContainText(
    /The slice is kept until .*\d.*, even while the kernel is idle/
  );
  await expect
    .poll(async () => (await session(notebook.kernelId))?.keep_until)
    .toBeGreaterThan(Date.now() / 1000 + 500);
  await popover.getByRole('button', { name: 'Stop keeping' }).click();
  await expect(popover.getByRole('button', { name: 'Keep for' })).toBeVisible();

  // With forced colours, a link must still look like a link.
  const { page } = lab;
  await page.emulateMedia({ forcedColors: 'active', colorScheme: 'dark' });
  const link = popover.getByRole('button', { name: 'Show the pool' });
  await expect(link).toHaveCSS('text-decoration-line', 'underline');
  await page.emulateMedia({ forcedColors: 'none', colorScheme: 'light' });

  await popover.getByRole('button', { name: 'Release now' }).click();
  await expect(notebook.chip).toHaveText(/^In host memory/);
  await expect(popover).toContainText('the next CUDA call brings it back');
  expect((await session(notebook.kernelId))?.device).toBeNull();
});

test('a pending release is shown, and a keep cancels it', async ({ lab }) => {
  const notebook = await lab.notebook('later');
  const work = new Work('later');
  await notebook.run(work.code, false);
  await expect(notebook.chip).toHaveText(/of 6 GiB on GPU [01]$/);
  await notebook.chip.click();
  const { popover } = lab;
  const release = popover.getByRole('button', { name: 'Release now' });
  await release.click();
  const pending = 'Goes back to the pool when its work on the GPU is done.';
  await expect(popover).toContainText(`${pending} To cancel this, keep the slice.`);
  await expect(release).toHaveAttribute('aria-disabled', 'true');
  await expect(notebook.chip).toHaveAttribute('title', new RegExp(pending));
  await popover.getByRole('button', { name: 'Keep for 10 minutes' }).click();
  await expect(popover).not.toContainText(pending);
  await expect(popover).toContainText('The slice is kept until');
  await release.click();
  await expect(popover).toContainText(pending);
  work.end();
  await expect(notebook.chip).toHaveText(/^In host memory/);
  await expect(popover).not.toContainText(pending);
});

test('the popover says why a kernel waits', async ({ lab }) => {
  // Give the neighbour `ahead` a higher class than the notebook. In the same class, the
  // notebook would be first in the queue, because it has used no GPU yet.
  await ask('fresh', {
    priority_classes: { batch: 0, interactive: 10 },
    default_priority: 'batch',
    preempt: []
  });
  await neighbour('one');
  await neighbour('two');
  await neighbour('ahead', { hold: false, priority: 'interactive' });
  await ask('asks', { name: 'ahead' });
  const notebook = await lab.notebook('why');
  await notebook.run(uses(64), false);
  await expect(notebook.chip).toHaveText(/^Waiting: 2nd/);
  await notebook.chip.click();
  const { popover } = lab;
  const why = popover.getByRole('region', { name: 'Why am I waiting?' });
  await expect(why).toContainText(/Ahead of it is 1 kernel( of yours)?, of class /);
  await expect(why.getByRole('button', { name: 'Stop waiting' })).toBeVisible();
  await expect(why).not.toContainText('21001');
  expect(await faults(lab.page, '.jp-gpupool-Popover')).toEqual([]);
  await ask('leave', { name: 'ahead' });
  await expect(why).toContainText('It is 1st of 1 in the queue: ');
  await expect(why).not.toContainText('Ahead of it');
  // End both neighbours: the notebook may wait for the device of `one` or of `two`.
  await ask('leave', { name: 'one' });
  await ask('leave', { name: 'two' });
  await expect(notebook.chip).toHaveText(/^Idle/);
  await expect(why).toHaveCount(0);
});

test('the popover works by keyboard alone', async ({ lab }) => {
  const { page, popover } = lab;
  const notebook = await lab.notebook('keys');
  await notebook.run(uses(64));
  await expect(notebook.chip).toHaveText(/^Idle/);
  await notebook.chip.focus();
  await page.keyboard.press('Enter');
  await expect(popover).toBeFocused(); // after its content is drawn
  await expect(popover).toHaveAttribute('role', 'dialog');
  await expect(notebook.chip).toHaveAttribute('aria-expanded', 'true');
  const seen: string[] = [];
  for (let i = 0; i < 12; i++) {
    await page.keyboard.press('Tab');
    const name = await page.evaluate(() => {
      const at = document.activeElement as HTMLElement;
      const inside = at.closest('.jp-gpupool-Popover') !== null;
      return inside
        ? `${at.tagName} ${at.textContent || at.getAttribute('type')}`
        : 'out';
    });
    seen.push(name);
  }
  expect(seen).not.toContain('out');
  expect(new Set(seen).size).toBeGreaterThanOrEqual(6);
  await popover.getByRole('button', { name: 'Release now' }).focus();
  await page.keyboard.press('Space');
  await expect(notebook.chip).toHaveText(/^In host memory/);
  await page.keyboard.press('Escape');
  await expect(popover).toHaveCount(0);
  await expect(notebook.chip).toBeFocused();
});

for (const theme of ['JupyterLab Light', 'JupyterLab Dark']) {
  test(`no accessibility fault in chip and popover, ${theme}`, async ({ lab }) => {
    await lab.theme(theme);
    // Open a new notebook file for each theme. A notebook that is still open keeps its
    // old kernel, and a new broker does not know this kernel.
    const notebook = await lab.notebook(theme.replaceAll(' ', '-'));
    await notebook.run(uses(64));
    await expect(notebook.chip).toHaveText(/^Idle/);
    expect(await faults(lab.page, '.jp-gpupool-chip')).toEqual([]);
    await notebook.chip.click();
    await expect(lab.popover).toBeVisible();
    expect(await faults(lab.page, '.jp-gpupool-Popover')).toEqual([]);
  });
}
