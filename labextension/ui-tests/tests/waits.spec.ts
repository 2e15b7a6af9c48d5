// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** What a user can do where a cell waits: in the cell itself, and in the popover. */
import { faults } from '../axe';
import { expect, test, type Lab, type Notebook } from '../lab';
import { ask, GiB, session, uses, Work } from '../pool';

/** One device: a notebook of 4 GiB leaves 4 GiB. */
const ONE = {
  emulate: '1x8GiB,context=256MiB,bandwidth=2GiB/s',
  default_memory: 4 * GiB,
  default_limit: null,
  preempt: []
};

/** A notebook at work with 4 GiB, and one that waits for 6 GiB. */
async function scene(lab: Lab): Promise<[Notebook, Notebook, Work]> {
  await ask('fresh', ONE);
  const alpha = await lab.notebook('alpha');
  const work = new Work('alpha');
  await alpha.run(work.code, false);
  await expect(alpha.chip).toHaveText(/on GPU 0$/);
  const beta = await lab.notebook('beta');
  await beta.run(`print("before")\n%gpu 6GiB${uses(64)}print("ran")`, false);
  await expect(beta.chip).toHaveText(/^Waiting/);
  return [alpha, beta, work];
}

test('start now with what is free, from the cell and by keyboard', async ({ lab }) => {
  const [, beta, work] = await scene(lab);
  const { page, popover } = lab;
  const start = beta.output.getByRole('button', { name: 'Start now with 4 GiB' });
  await expect(start).toBeVisible();
  await expect(beta.output).toContainText('Waiting for a GPU slice of 6 GiB');
  await expect(beta.output).toContainText('alpha.ipynb (yours) holds 4 GiB');
  expect(await faults(page, '.jp-gpupool-Wait')).toEqual([]);

  await beta.chip.click();
  const why = popover.getByRole('region', { name: 'Why am I waiting?' });
  await expect(why).toContainText('With 4 GiB instead of 6 GiB it would start now.');
  for (const name of [
    'Start now with 4 GiB',
    'Stop waiting',
    'Tell me when it starts',
    'Release the GPU of alpha.ipynb'
  ]) {
    await expect(why.getByRole('button', { name })).toBeVisible();
  }
  expect(await faults(page, '.jp-gpupool-Popover')).toEqual([]);
  await page.keyboard.press('Escape');

  // From the first button, Tab and Enter belong to the buttons and not to the notebook.
  await start.focus();
  await page.keyboard.press('Tab');
  await expect(beta.output.getByRole('button', { name: 'Stop waiting' })).toBeFocused();
  await page.keyboard.press('Shift+Tab');
  await page.keyboard.press('Enter');
  await expect(beta.output).toContainText('ran');
  await expect(beta.output).not.toContainText('Waiting for');
  expect((await session(beta.kernelId))?.request.memory).toBe(4 * GiB);
  work.end();
});

test('the panel offers the same, by keyboard and at 300 px', async ({ lab }) => {
  const [, beta, work] = await scene(lab);
  const { page, panel } = lab;
  await lab.execute('gpupool:show-panel');
  await page.sidebar.setWidth(300, 'right');
  const queue = panel.getByRole('region', { name: 'Queue' });
  const start = queue.getByRole('button', {
    name: 'Start now with 4 GiB: beta.ipynb'
  });
  await expect(start).toBeVisible();
  await expect(queue).toContainText('alpha.ipynb (yours) holds 4 GiB');
  expect(await faults(page, '.jp-gpupool-panel')).toEqual([]);
  const [box, room] = [await start.boundingBox(), await panel.boundingBox()];
  expect(box!.x + box!.width).toBeLessThanOrEqual(room!.x + room!.width);
  await start.focus();
  await page.keyboard.press('Tab');
  await expect(queue.getByRole('button', { name: /^Stop waiting/ })).toBeFocused();
  await page.keyboard.press('Enter');
  await expect(beta.output).toContainText('you stopped the wait for a GPU slice');
  await expect(queue).toContainText('Nobody waits for a GPU.');
  work.end();
  await page.sidebar.close('right');
});

test('release the other notebook, and be told when this one starts', async ({
  lab
}) => {
  const [alpha, beta, work] = await scene(lab);
  await lab.page.evaluate(() => {
    const told: string[] = [];
    Object.assign(window, {
      told,
      Notification: class {
        static permission = 'default';
        static requestPermission() {
          this.permission = 'granted';
          return Promise.resolve('granted');
        }
        constructor(text: string) {
          told.push(text);
        }
      }
    });
  });
  const told = () =>
    lab.page.evaluate(() => (window as unknown as { told: string[] }).told);
  await beta.output.getByRole('button', { name: 'Tell me when it starts' }).click();
  await expect(beta.output).toContainText('You are told when it starts.');
  await beta.output
    .getByRole('button', { name: 'Release the GPU of alpha.ipynb' })
    .click();
  await expect(beta.output).toContainText(
    'alpha.ipynb (yours) gives 4 GiB back when its work on the GPU is done.'
  );
  expect(await told()).toEqual([]);
  work.end();
  await expect(beta.output).toContainText('ran');
  await expect.poll(told).toEqual(['beta.ipynb has its GPU.']);
  await expect(alpha.chip).toHaveText(/^In host memory/);
});

test('stop waiting: one line says what has happened', async ({ lab }) => {
  const [, beta, work] = await scene(lab);
  await beta.output.getByRole('button', { name: 'Stop waiting' }).click();
  await expect(beta.output).toContainText(
    'you stopped the wait for a GPU slice. Nothing on the GPU has changed, and the lines before the call that waited have run.'
  );
  await expect(beta.output).toContainText('before');
  await expect(beta.output.getByRole('button')).toHaveCount(0);
  await expect(beta.chip).toHaveText('No GPU');
  work.end();
});
