// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Pictures of the user interface for the documentation, from real servers and brokers. */
import { mkdirSync } from 'fs';
import * as path from 'path';

import { expect, type ISite, Lab, type Notebook, test } from '../lab';
import { ask, GiB, KERNEL, neighbour, uses, Work } from '../pool';

const FOLDER = path.resolve(__dirname, '../../../docs/images/ui');
const HEIGHT = 1120;

/** Take a picture of the rectangle that contains all these elements. */
async function shoot(lab: Lab, name: string, selectors: string[]): Promise<void> {
  const boxes = await Promise.all(
    selectors.map(async found => (await lab.page.locator(found).first().boundingBox())!)
  );
  const left = Math.min(...boxes.map(box => box.x)) - 6;
  const top = Math.min(...boxes.map(box => box.y)) - 6;
  const right = Math.max(...boxes.map(box => box.x + box.width)) + 2;
  const bottom = Math.max(...boxes.map(box => box.y + box.height)) + 6;
  const clip = {
    x: Math.max(0, left),
    y: Math.max(0, top),
    width: Math.min(1280, right) - Math.max(0, left),
    height: Math.min(HEIGHT, bottom) - Math.max(0, top)
  };
  mkdirSync(FOLDER, { recursive: true });
  await lab.page.mouse.move(640, 700);
  await lab.page.screenshot({ path: path.join(FOLDER, `${name}.png`), clip });
}

/** Take a picture with forced colours, a setting that people with weak sight use. */
async function contrast(lab: Lab, name: string, selectors: string[]): Promise<void> {
  await lab.page.emulateMedia({ forcedColors: 'active', colorScheme: 'dark' });
  await shoot(lab, name, selectors);
  await lab.page.emulateMedia({ forcedColors: 'none', colorScheme: 'light' });
}

const BAR = '.jp-NotebookPanel:not(.lm-mod-hidden) .jp-NotebookPanel-toolbar';
const CHIP = [`${BAR} .jp-KernelName`, `${BAR} .jp-gpupool-chip`];

async function chip(notebook: Notebook, name: string, text: RegExp): Promise<void> {
  await expect(notebook.chip).toHaveText(text);
  await shoot(notebook.lab, `chip-${name}`, CHIP);
}

test('the pictures of all states and places are taken', async ({ browser }) => {
  test.setTimeout(300_000);
  await ask('fresh');
  const lab = await Lab.open(browser, { scale: 2 });
  const { page, popover } = lab;
  const train = await lab.notebook('train');
  await chip(train, 'none', /^No GPU$/);
  const work = new Work('train');
  await train.run(uses(4 * 1024) + work.code, false);
  await chip(train, 'active', /^4\.\d of 6 GiB on GPU/);
  await train.chip.click();
  await expect(popover).toContainText('You may ask for up to');
  await shoot(lab, 'popover', [`${BAR} .jp-KernelName`, '.jp-gpupool-Popover']);
  await page.keyboard.press('Escape');
  work.end();
  await train.prompt.click(); // takes the focus away from the chip
  await ask('options', { idle_timeout: 45 });
  await chip(train, 'idle', /^Idle, back to the pool in 0:/);
  await ask('options', { idle_timeout: 9 });
  const toast = page.locator('.Toastify__toast').first();
  await expect(toast).toBeVisible();
  // The screenshot waits until the toast no longer moves.
  await toast.screenshot({ path: path.join(FOLDER, 'toast.png') });
  await chip(train, 'host', /^In host memory/);
  await ask('options');

  // Now both devices are in use, and kernels wait in the queue.
  for (const name of ['a', 'b', 'c', 'd']) {
    await neighbour(name, { gib: 7, alloc: 0.25 });
  }
  const explore = await lab.notebook('explore');
  await explore.run(uses(3 * 1024));
  await expect(explore.chip).toHaveText(/^Idle/);
  await train.run(new Work('more').code, false);
  await expect(train.chip).toHaveText(/on GPU|^Waiting/);
  await neighbour('e', { gib: 7, hold: false });
  await ask('asks', { name: 'e' });
  await neighbour('f', { gib: 7, hold: false });
  await ask('asks', { name: 'f' });
  const late = await lab.notebook('late');
  await late.run(uses(64), false);
  await chip(late, 'waiting', /^Waiting: /);
  await page.setViewportSize({ width: 1280, height: HEIGHT });
  await late.chip.click();
  await expect(popover).toContainText('Why am I waiting?');
  await expect(popover).toContainText('in the queue');
  await shoot(lab, 'why', [`${BAR} .jp-KernelName`, '.jp-gpupool-Popover']);
  await page.keyboard.press('Escape');
  await lab.execute('gpupool:show-panel');
  await expect(lab.panel.getByRole('img', { name: /^Memory/ }).first()).toBeVisible();
  await page.sidebar.setWidth(300, 'right');
  await train.activate();
  await expect(
    lab.panel.getByText('4.3 of 6 GiB').or(lab.panel.getByText('Waiting')).first()
  ).toBeVisible();
  await shoot(lab, 'panel-light', ['.jp-gpupool-panel']);
  await lab.theme('JupyterLab Dark');
  await shoot(lab, 'panel-dark', ['.jp-gpupool-panel']);
  await lab.theme('JupyterLab Light');
  await contrast(lab, 'panel-contrast', ['.jp-gpupool-panel']);
  await page.sidebar.close('right');
  await lab.execute('gpupool:show-admin');
  await expect(lab.page.locator('.jp-gpupool-adminTable')).toBeVisible();
  await page.sidebar.close('left');
  const table = ['.jp-gpupool-admin h2', '.jp-gpupool-adminScroll'];
  await shoot(lab, 'admin', table);
  await contrast(lab, 'admin-contrast', table);
  await lab.page.getByRole('button', { name: 'Take the slice of a back' }).click();
  await shoot(lab, 'admin-recall', ['.jp-Dialog-content']);
  await page.keyboard.press('Escape');
  await lab.execute('gpupool:show-panel');
  await lab.panel.getByRole('button', { name: 'Open in a tab' }).click();
  await page.sidebar.close('right');
  await shoot(lab, 'panel-wide', ['#jp-gpupool-panel-tab']);
  await late.activate();
  await ask('kill');
  await chip(late, 'away', /^No answer from the GPU pool$/);
  await ask('start');
  await lab.clear();
  await lab.close();
  await ask('fresh');

  const bare = await Lab.open(browser, {
    scale: 2,
    url: await ask<string>('lab_without_gpu')
  });
  await bare.page
    .locator('.jp-LauncherCard', { hasText: 'no GPU found' })
    .first()
    .click();
  await expect(bare.page.locator('.jp-gpupool-Explanation')).toBeVisible();
  await shoot(bare, 'no-gpu', ['.jp-Dialog-content']);
  await bare.close();

  const seven = await Lab.open(browser, { scale: 2, app: 'tree' });
  const file = seven.write('seven', KERNEL);
  await seven.go(`notebooks/${file}`);
  await expect(seven.page.locator('.jp-gpupool-chip')).toHaveText('No GPU');
  await seven.page.locator('.jp-Notebook .cm-content').first().click();
  await seven.page.keyboard.insertText(uses(512).trim());
  await seven.page.keyboard.press('Shift+Enter');
  await expect(seven.page.locator('.jp-gpupool-chip')).toHaveText(/^Idle, back/);
  await seven.page.locator('.jp-gpupool-chip').click();
  await expect(seven.popover).toBeVisible();
  await shoot(seven, 'notebook7', ['#top-panel-wrapper', BAR, '.jp-gpupool-Popover']);
  await seven.close();
});

/**
 * Python code for a notebook. It defines `batches`, a generator that yields batches
 * until the work ends, and `train`, which trains with one batch. The `sleep` in it
 * imitates the time to load a batch. No test waits by this `sleep`.
 */
const TRAINING = (work: Work): string =>
  work.code.replace(
    /while not (.*):\n.*\n.*\n/,
    (_, end: string) => `
def batches():
    while not ${end}:
        yield
        time.sleep(0.05)

def train(_):
    small.fill(7, stream=stream); stream.sync()
`
  );

test('pictures show a preempted cell and how it continues', async ({ browser }) => {
  test.setTimeout(300_000);
  await ask('fresh', { emulate: '1x8GiB,context=256MiB,bandwidth=2GiB/s' });
  const lab = await Lab.open(browser, { scale: 2 });
  const notebook = await lab.notebook('train');
  const work = new Work('train');
  await notebook.run(uses(1024) + TRAINING(work));
  await notebook.run('for batch in batches():\n    train(batch)', false);
  await expect(notebook.chip).toHaveText(/on GPU 0$/);
  await neighbour('urgent', { hold: false, priority: 'interactive' });
  await ask('asks', { name: 'urgent' });
  await expect(notebook.chip).toHaveText(/^Preempted: 1st/);
  await expect(notebook.output).toContainText('as soon as');
  await shoot(lab, 'preempted', [
    BAR,
    `${BAR} .jp-gpupool-chip`,
    '.jp-Cell-outputArea'
  ]);
  await ask('leave', { name: 'urgent' });
  await expect(notebook.output).toContainText('then continued');
  await shoot(lab, 'went-on', [BAR, `${BAR} .jp-gpupool-chip`, '.jp-Cell-outputArea']);
  work.end();
  await lab.clear();
  await lab.close();
});

test('a picture shows a waiting cell with its buttons', async ({ browser }) => {
  await ask('fresh', {
    emulate: '1x8GiB,context=256MiB,bandwidth=2GiB/s',
    default_memory: 4 * GiB,
    default_limit: null,
    preempt: []
  });
  const lab = await Lab.open(browser, { scale: 2 });
  const alpha = await lab.notebook('alpha');
  const work = new Work('alpha');
  await alpha.run(work.code, false);
  await expect(alpha.chip).toHaveText(/on GPU 0$/);
  const beta = await lab.notebook('beta');
  await beta.run('import time'); // shows the notice about the broker's other options
  await beta.run('%gpu 6GiB');
  await beta.run(uses(64).trim(), false);
  await expect(
    beta.output.getByRole('button', { name: 'Start now with 4 GiB' })
  ).toBeVisible();
  await shoot(lab, 'wait', [BAR, `${BAR} .jp-gpupool-chip`, '.jp-gpupool-Wait']);
  work.end();
  await expect(beta.chip).toHaveText(/^Idle/);
  await lab.clear();
  await lab.close();
});

test('a picture shows the panel of a user who is no admin', async ({ browser }) => {
  test.skip(process.getuid?.() !== 0, 'only root can start servers of other users');
  test.setTimeout(300_000);
  await ask('fresh');
  const site = await ask<ISite>('lab_of_visitor');
  const lab = await Lab.open(browser, { scale: 2, site });
  const train = await lab.notebook('train');
  const work = new Work('train');
  await train.run(uses(4 * 1024) + work.code, false);
  await expect(train.chip).toHaveText(/^4\.\d of 6 GiB on GPU/);
  for (const name of ['a', 'b', 'c', 'd', 'e']) {
    await neighbour(name, { gib: 7, alloc: 0.25 });
  }
  await neighbour('f', { gib: 7, hold: false });
  await ask('asks', { name: 'f' });
  const late = await lab.notebook('late');
  await late.run(uses(64), false);
  await expect(late.chip).toHaveText(/^Waiting: \d/);
  await lab.page.setViewportSize({ width: 1280, height: HEIGHT });
  await lab.execute('gpupool:show-panel');
  await lab.page.sidebar.setWidth(300, 'right');
  const start = lab.panel.getByRole('button', { name: /^Start now with/ });
  await expect(start).toBeVisible();
  await expect(lab.panel.getByText('Another user (notebook)')).toHaveCount(6);
  await expect(lab.panel.getByText(/^(Waits for|Has waited)/)).toBeVisible();
  await shoot(lab, 'panel-user', ['.jp-gpupool-panel']);
  work.end();
  await lab.clear();
  await lab.close();
});
