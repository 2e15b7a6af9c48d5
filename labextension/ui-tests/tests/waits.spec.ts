// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * Tests of what a user can do while a cell waits: in the cell, the popover, the panel.
 */
import { faults } from '../axe';
import { expect, test, type Lab, type Notebook } from '../lab';
import { ask, GiB, session, STAYS_BUSY, uses, Work } from '../pool';

/** One device of 8 GiB: while a notebook has 4 GiB, 4 GiB are free. */
const ONE = {
  ...STAYS_BUSY,
  emulate: '1x8GiB,context=256MiB,bandwidth=2GiB/s',
  default_memory: 4 * GiB,
  default_limit: null,
  preempt: []
};

/** Start a notebook that computes with 4 GiB, and one that waits for 6 GiB. */
async function scene(
  lab: Lab,
  before: (beta: Notebook) => Promise<void> = () => Promise.resolve()
): Promise<[Notebook, Notebook, Work]> {
  await ask('fresh', ONE);
  const alpha = await lab.notebook('alpha');
  const work = new Work('alpha');
  await alpha.run(work.code, false);
  await expect(alpha.chip).toHaveText(/on GPU 0$/);
  const beta = await lab.notebook('beta');
  await before(beta);
  await beta.run(`print("before")\n%gpu 6GiB${uses(64)}print("ran")`, false);
  await expect(beta.chip).toHaveText(/^Waiting/);
  // Wait for the kernel's line about the wait. From then on, the kernel certainly reports
  // that an interrupt ended the wait.
  await expect(beta.output).toContainText('Waiting for a GPU slice of 6 GiB');
  return [alpha, beta, work];
}

/**
 * Record the browser's notifications. Returns a function. Each call of the function
 * returns all notifications since the start of the recording.
 */
async function notified(lab: Lab): Promise<() => Promise<string[]>> {
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
  return () => lab.page.evaluate(() => (window as unknown as { told: string[] }).told);
}

test('the keyboard starts a waiting cell with less memory', async ({ lab }) => {
  const [, beta, work] = await scene(lab);
  const { page, popover } = lab;
  const start = beta.output.getByRole('button', { name: 'Start now with 4 GiB' });
  await expect(start).toBeVisible();
  await expect(beta.output).toContainText('Waiting for a GPU slice of 6 GiB');
  await expect(beta.output).toContainText('alpha.ipynb (yours) holds 4 GiB');
  expect(await faults(page, '.jp-gpupool-Wait')).toEqual([]);

  await beta.chip.click();
  const why = popover.getByRole('region', { name: 'Why am I waiting?' });
  await expect(why).toContainText('With 4 GiB instead of 6 GiB, it would start now.');
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

  // While a button has the focus, Tab and Enter act on the buttons and not on the
  // notebook.
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

test('buttons of a wait work by keyboard in a panel of 300 px', async ({ lab }) => {
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

test('a user can release another notebook and get a notice', async ({ lab }) => {
  const [alpha, beta, work] = await scene(lab);
  const told = await notified(lab);
  await beta.output.getByRole('button', { name: 'Tell me when it starts' }).click();
  await expect(beta.output).toContainText('You will get a notice when it starts.');
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
  // Show the notebook first. While it is hidden, its toolbar may move the chip into the
  // overflow menu.
  await alpha.activate();
  await expect(alpha.chip).toHaveText(/^In host memory/);
});

for (const place of ['popover', 'panel'] as const) {
  test(`the four buttons of a wait work in the ${place}`, async ({ lab }) => {
    const [alpha, beta, work] = await scene(lab);
    const { page, popover, panel } = lab;
    const told = await notified(lab);
    const open = async () => {
      await (place === 'panel' ? lab.execute('gpupool:show-panel') : beta.chip.click());
      return place === 'panel'
        ? panel.getByRole('region', { name: 'Queue' })
        : popover.getByRole('region', { name: 'Why am I waiting?' });
    };
    const close = () =>
      place === 'panel' ? page.sidebar.close('right') : page.keyboard.press('Escape');
    let where = await open();
    await where.getByRole('button', { name: /^Stop waiting/ }).click();
    await expect(beta.output).toContainText('you stopped the wait for a GPU slice');
    await expect(beta.chip).toHaveText('No GPU');
    await close();

    await beta.run(`${uses(64)}print("ran")`, false);
    await expect(beta.chip).toHaveText(/^Waiting/);
    where = await open();
    await where.getByRole('button', { name: /^Tell me when it starts/ }).click();
    await expect(where).toContainText('You will get a notice when it starts.');
    await where.getByRole('button', { name: 'Release the GPU of alpha.ipynb' }).click();
    await expect(where).toContainText(
      'alpha.ipynb (yours) gives 4 GiB back when its work on the GPU is done.'
    );
    expect(await told()).toEqual([]);
    await where.getByRole('button', { name: /^Start now with 4 GiB/ }).click();
    await expect(beta.output).toContainText('ran');
    await expect.poll(told).toEqual(['beta.ipynb has its GPU.']);
    expect((await session(beta.kernelId))?.request.memory).toBe(4 * GiB);
    await close();
    work.end();
    // Show the notebook first. While it is hidden, its toolbar may move the chip into
    // the overflow menu.
    await alpha.activate();
    await expect(alpha.chip).toHaveText(/^In host memory/);
  });
}

test('after "stop waiting", one line says what happened', async ({ lab }) => {
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

test('from the start of a wait, all places show the same time', async ({ lab }) => {
  let said = (): Promise<string[]> => Promise.resolve([]);
  const [, beta, work] = await scene(lab, async notebook => {
    said = await notebook.listen();
  });
  const { page } = lab;
  await lab.execute('gpupool:show-panel');
  await page.sidebar.setWidth(300, 'right');
  await beta.chip.click();
  await expect(lab.popover).toContainText(/There is no estimate yet|there is no/);
  /** Return the figure that each place shows, all read at the same instant. */
  const look = (): Promise<Record<string, string>> =>
    page.evaluate(() => {
      const figure = (text: string): string =>
        /for (\d+ (?:s|min))(?:, no|; there is no) estimate yet/.exec(text)?.[1] ??
        /no estimate yet/.exec(text)?.[0] ??
        text;
      const places = {
        cell: '.jp-NotebookPanel:not(.lm-mod-hidden) .jp-gpupool-Wait > p',
        chip: '.jp-NotebookPanel:not(.lm-mod-hidden) .jp-gpupool-Chip-long',
        'status bar': '#jp-main-statusbar .jp-gpupool-Chip-long',
        popover: '.jp-gpupool-Popover-why',
        panel: '.jp-gpupool-queue .jp-gpupool-figure'
      };
      return Object.fromEntries(
        Object.entries(places).map(([name, found]) => [
          name,
          figure(document.querySelector(found)?.textContent ?? 'missing')
        ])
      );
    });
  const told = new Set<string>();
  /**
   * Read the figures again and again until all places show the same figure, and return
   * it. The page needs one or two frames to draw a new figure in all places.
   */
  const agree = async (): Promise<string> => {
    let figures: string[] = [];
    await expect
      .poll(
        async () => {
          figures = Object.values(await look());
          return new Set(figures).size;
        },
        { intervals: [50], message: 'all places tell the same' }
      )
      .toBe(1);
    return figures[0]!;
  };
  // All places show how long the cell has waited. The time grows in steps: of 1 s below
  // 10 s, of 10 s below a minute, then of a minute.
  await expect
    .poll(async () => told.add(await agree()).size, { intervals: [200] })
    .toBeGreaterThan(2);
  const STEPS = /^(no estimate yet|([1-9]|[1-5]0) s|\d+ min)$/;
  expect([...told].filter(figure => !STEPS.test(figure))).toEqual([]);
  expect(await said()).toContainEqual(
    expect.stringMatching(/^Waiting: 1st, for [1-9] s, no estimate yet$/)
  );

  // The command line shows the same time: its figure lies between the chip's figure
  // before the command and the time of the wait after it. (The chip's figure after the
  // command may be smaller: the page draws a new figure once a second.)
  const seconds = (figure: string): number =>
    parseInt(figure) * (figure.endsWith('min') ? 60 : 1);
  const before = seconds((await look())['chip']!);
  const picture = await ask<string>('picture');
  const after = Date.now() / 1000;
  const printed = seconds(
    /asks for 6 GiB, waiting for (\d+ (?:s|min)), no estimate yet/.exec(picture)![1]!
  );
  expect(printed).toBeGreaterThanOrEqual(before);
  const since = (await session(beta.kernelId))!.queued_at;
  expect(since).toBeGreaterThan(0);
  expect(printed).toBeLessThanOrEqual(after - since!);
  await page.keyboard.press('Escape');
  await beta.output.getByRole('button', { name: 'Stop waiting' }).click();
  await expect(beta.chip).toHaveText('No GPU');
  await page.sidebar.close('right');
  work.end();
});
