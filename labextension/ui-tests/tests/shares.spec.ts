// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * Tests of groups, shares, budgets and preemption as a user of JupyterLab sees them.
 */
import { faults } from '../axe';
import { expect, type Notebook, test } from '../lab';
import { ask, neighbour, session, STAYS_BUSY, uses, Work } from '../pool';

const ONE = { emulate: '1x8GiB,context=256MiB,bandwidth=2GiB/s' };

test('a preempted cell says why, and that it continues', async ({ lab }) => {
  await ask('fresh', {
    ...ONE,
    ...STAYS_BUSY,
    priority_classes: { batch: 0, interactive: 10 },
    default_priority: 'batch'
  });
  const { page, panel, popover } = lab;
  const why = 'a kernel of a higher priority class needs the GPU';
  const sentence = 'A kernel of a higher priority class needs the GPU.';
  const notebook = await lab.notebook('victim');
  const work = new Work('victim');
  await notebook.run(`${uses(1024)}${work.code}\nprint("all there")`, false);
  await expect(notebook.chip).toHaveText(/^1(\.\d)? of 6 GiB on GPU 0$/);

  await neighbour('boss', { hold: false, priority: 'interactive' });
  await ask('asks', { name: 'boss' });
  await expect(notebook.chip).toHaveText(/^Preempted: 1st(, .*)?$/);
  expect((await session(notebook.kernelId))?.state).toBe('queued');
  expect(await notebook.chip.getAttribute('title')).toContain(sentence);
  await expect(notebook.output).toContainText(why);
  await expect(notebook.output).toContainText('comes back by itself');

  await notebook.chip.click();
  await expect(popover.getByRole('heading', { level: 2 })).toHaveText(
    'The pool took the GPU from this notebook. The notebook will continue by itself.'
  );
  await expect(popover).toContainText(sentence);
  await expect(popover).toContainText('It is 1st of 1 in the queue: it was preempted');
  await expect(popover).toContainText(
    /A kernel of another user \(class interactive\) is active and has 6 GiB on GPU 0|Your kernel boss/
  );
  expect(await faults(page, '.jp-gpupool-Popover')).toEqual([]);
  await page.keyboard.press('Escape');

  await lab.execute('gpupool:show-panel');
  const kernels = panel.getByRole('region', { name: 'My kernels on this server' });
  await expect(kernels).toContainText(
    `The pool took this kernel’s slice while the kernel was working: ${why}`
  );
  expect(await faults(page, '.jp-gpupool-panel')).toEqual([]);
  expect(await faults(page, '.jp-NotebookPanel-toolbar .jp-gpupool-Chip')).toEqual([]);
  expect(await faults(page, '.jp-OutputArea')).toEqual([]);
  await page.sidebar.close('right');

  await ask('leave', { name: 'boss' });
  await expect(notebook.chip).toHaveText(/^1(\.\d)? of 6 GiB on GPU 0$/);
  await expect(notebook.output).not.toContainText('comes back by itself');
  await expect(notebook.output).toContainText(why); // the reason stays in the output
  work.end();
  await expect(notebook.output).toContainText('all there');
});

test('group, share and the rest of the daily budget are shown', async ({ lab }) => {
  const groups = (seconds: number) => ({
    groups: { bio: { users: '*', guarantee: '50%', gpu_seconds_per_day: seconds } }
  });
  await ask('fresh', { ...ONE, ...groups(3600) });
  const { page, panel, popover } = lab;
  const left = /Group bio has 3[56]\d\d of 3600 GPU-seconds left today/;
  const notebook = await lab.notebook('shares');
  await notebook.run(`${uses(64)}%gpu why`);
  await expect(notebook.output).toContainText('Your group is bio.');
  await expect(notebook.output).toContainText(left);

  await expect(notebook.chip).toHaveAttribute('title', /\nYour group is bio\.\n/);
  await expect(notebook.chip).toHaveAttribute('title', left);
  await notebook.chip.click();
  const share = popover.getByRole('region', { name: 'My share' });
  await expect(share).toContainText('Your group is bio.');
  await expect(share).toContainText('Group bio has 6 GiB, above its guaranteed 4 GiB');
  await expect(share).toContainText(left);
  await expect(
    popover.getByRole('region', { name: 'Who may take this slice?' })
  ).toContainText('No kernel waits for this GPU.');
  expect(await faults(page, '.jp-gpupool-Popover')).toEqual([]);
  await page.keyboard.press('Escape');

  await lab.execute('gpupool:show-panel');
  const mine = panel.getByRole('region', { name: 'My share' });
  await expect(mine).toContainText(left);
  await expect(
    mine.getByRole('meter', { name: 'GPU-seconds used by group bio today' })
  ).toHaveAttribute('aria-valuetext', /^\d+ of 3600 GPU-seconds$/);
  expect(await faults(page, '.jp-gpupool-panel')).toEqual([]);
  await page.sidebar.close('right');

  // If little of the budget is left, the chip itself shows how much.
  await ask('options', { ...ONE, ...groups(2) });
  const work = new Work('shares');
  await notebook.run(work.code, false);
  await expect(notebook.chip).toHaveText(/on GPU 0, 0 GPU-seconds left today$/);
  work.end();
});

/** A line without its figures, because the figures change while the test reads. */
const still = (line: string): string =>
  line.replace(/\d[\d.]*( (s|min|h)\b)?/g, '#').replace(/\s+/g, ' ');

test('popover, command and magic agree on groups and shares', async ({ lab }) => {
  await ask('fresh', {
    ...ONE,
    ...STAYS_BUSY,
    default_memory: 3 * 2 ** 30,
    default_limit: null,
    groups: {
      bio: { users: '*', guarantee: '60%', gpu_seconds_per_day: 3600 },
      phy: { users: ['uid-21001'], guarantee: '25%' }
    }
  });
  const { page, popover } = lab;
  const told = async (name: string): Promise<string[]> => {
    const found = await ask<{ lines: string[]; standing: string[] }>('why', { name });
    return [...found.lines, ...found.standing].map(still);
  };
  const same = async (notebook: Notebook): Promise<void> => {
    await notebook.activate();
    await notebook.chip.click();
    await expect(async () => {
      const lines = await told(notebook.file);
      const shown = still(await popover.innerText());
      expect(lines.filter(line => !shown.includes(line))).toEqual([]);
    }).toPass({ timeout: 30_000 });
    await page.keyboard.press('Escape');
  };
  await neighbour('phy', { gib: 3 });
  const train = await lab.notebook('train');
  const work = new Work('train');
  await train.run(uses(1024) + work.code, false);
  await expect(train.chip).toHaveText(/of 3 GiB on GPU 0$/);
  await neighbour('colleague', { gib: 3, hold: false, user: 21002 });
  await ask('asks', { name: 'colleague' });
  const late = await lab.notebook('late');
  await late.run(uses(64) + '%gpu why', false);
  await expect(late.chip).toHaveText(/^Waiting: 2nd/);
  expect(await told('late.ipynb')).toContainEqual(
    still(
      'With this request, group bio would have more than its guarantee of 4.7 GiB, so ' +
        'the guarantee does not put the kernel first in the queue.'
    )
  );
  await same(late);
  await same(train);

  await ask('leave', { name: 'phy' });
  await ask('leave', { name: 'colleague' });
  await expect(late.output).toContainText('Your group is bio.');
  // Two things may have changed since the cell ran. The slice is idle now, so skip the
  // lines about its state. The group's use may have crossed its share, so hide the
  // word for that.
  const lasting = (text: string): string =>
    still(text).replace(/, (above|below|exactly) its/g, ', ± its');
  const shown = lasting(await late.output.innerText());
  for (const line of (await told('late.ipynb')).map(lasting)) {
    if (!/^It is (active|idle) and|^No kernel waits/.test(line)) {
      expect(shown).toContain(line);
    }
  }
  work.end();
});

test('a slice that has grown shows its guaranteed part', async ({ lab }) => {
  await ask('fresh', { ...ONE, default_memory: 2 ** 30, default_limit: 6 * 2 ** 30 });
  const notebook = await lab.notebook('grows');
  const work = new Work('grows');
  await notebook.run(uses(3 * 1024) + work.code, false);
  await expect(notebook.chip).toHaveText(/^3(\.\d)? GiB, 1 guaranteed on GPU 0$/);
  work.end();
  await expect(notebook.chip).toHaveText(/^Idle/);
});
