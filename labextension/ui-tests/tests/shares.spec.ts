// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Groups, shares, budgets and preemption as a user of JupyterLab sees them. */
import { faults } from '../axe';
import { expect, test } from '../lab';
import { ask, neighbour, session, uses, Work } from '../pool';

const ONE = { emulate: '1x8GiB,context=256MiB,bandwidth=2GiB/s' };

test('a preempted cell says so, why, and when it goes on', async ({ lab }) => {
  await ask('fresh', {
    ...ONE,
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
  await expect(notebook.chip).toHaveText(/^Preempted: 1st(, ~.*)?$/);
  expect((await session(notebook.kernelId))?.state).toBe('queued');
  expect(await notebook.chip.getAttribute('title')).toContain(sentence);
  await expect(notebook.output).toContainText(why);
  await expect(notebook.output).toContainText('comes back by itself');

  await notebook.chip.click();
  await expect(popover.getByRole('heading', { level: 2 })).toHaveText(
    'The GPU was taken from this notebook; it goes on by itself.'
  );
  await expect(popover).toContainText(sentence);
  await expect(popover).toContainText('It is 1st of 1 in the queue: it was preempted');
  await expect(popover).toContainText(
    /A kernel of another user \(class interactive\) uses 6 GiB on GPU 0|Your kernel boss/
  );
  expect(await faults(page, '.jp-gpupool-Popover')).toEqual([]);
  await page.keyboard.press('Escape');

  await lab.execute('gpupool:show-panel');
  const kernels = panel.getByRole('region', { name: 'My kernels on this server' });
  await expect(kernels).toContainText(`Preempted: ${why}`);
  expect(await faults(page, '.jp-gpupool-panel')).toEqual([]);
  expect(await faults(page, '.jp-NotebookPanel-toolbar .jp-gpupool-Chip')).toEqual([]);
  expect(await faults(page, '.jp-OutputArea')).toEqual([]);
  await page.sidebar.close('right');

  await ask('leave', { name: 'boss' });
  await expect(notebook.chip).toHaveText(/^1(\.\d)? of 6 GiB on GPU 0$/);
  await expect(notebook.output).not.toContainText('comes back by itself');
  await expect(notebook.output).toContainText(why); // what has happened stays with the cell
  work.end();
  await expect(notebook.output).toContainText('all there');
});

test('group, share and what is left of the daily budget', async ({ lab }) => {
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
  await expect(share).toContainText('Group bio has 6 GiB, above the 4 GiB');
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
    mine.getByRole('meter', { name: 'GPU-seconds of group bio used today' })
  ).toHaveAttribute('aria-valuetext', /^\d+ of 3600 GPU-seconds$/);
  expect(await faults(page, '.jp-gpupool-panel')).toEqual([]);
  await page.sidebar.close('right');

  // Little is left: the chip itself shows it.
  await ask('options', { ...ONE, ...groups(2) });
  const work = new Work('shares');
  await notebook.run(work.code, false);
  await expect(notebook.chip).toHaveText(/on GPU 0, 0 GPU-seconds left today$/);
  work.end();
});

test('a slice that has grown shows what of it is guaranteed', async ({ lab }) => {
  await ask('fresh', { ...ONE, default_memory: 2 ** 30, default_limit: 6 * 2 ** 30 });
  const notebook = await lab.notebook('grows');
  const work = new Work('grows');
  await notebook.run(uses(3 * 1024) + work.code, false);
  await expect(notebook.chip).toHaveText(/^3(\.\d)? GiB, 1 guaranteed on GPU 0$/);
  work.end();
  await expect(notebook.chip).toHaveText(/^Idle/);
});
