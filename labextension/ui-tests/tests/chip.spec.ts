// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Tests of the chip beside the kernel's name in every state; see `src/words.ts`. */
import { expect, test } from '../lab';
import { ask, neighbour, session, STAYS_BUSY, uses, Work } from '../pool';

test.beforeEach(async () => {
  await ask('fresh');
});

test('a kernel outside the pool has no chip and sends no request', async ({ lab }) => {
  const before = lab.traffic.length;
  const plain = await lab.notebook('plain', 'python3');
  await plain.run('print(6 * 7)');
  await expect(plain.output).toHaveText('42');
  // JupyterLab requests the list of running kernels repeatedly. The extension must not
  // send a request each time.
  await lab.page.evaluate(async () => {
    const { kernels, sessions } = window.jupyterapp.serviceManager;
    await kernels.refreshRunning();
    await sessions.refreshRunning();
  });
  await expect(plain.chip).toHaveCount(0);
  await expect(lab.statusItem).toHaveCount(0);
  expect(lab.traffic.slice(before)).toEqual([]);
});

test('the chip shows all states from no GPU to host memory', async ({ lab }) => {
  const notebook = await lab.notebook('one');
  await expect(notebook.chip).toHaveText('No GPU');
  const name = notebook.panel.locator('.jp-NotebookPanel-toolbar .jp-KernelName');
  const [kernel, chip] = [await name.boundingBox(), await notebook.chip.boundingBox()];
  expect(chip!.x).toBeGreaterThanOrEqual(kernel!.x + kernel!.width - 1);
  expect(chip!.x).toBeLessThan(kernel!.x + kernel!.width + 40);

  const said = await notebook.listen();
  const work = new Work('one');
  // Fill the memory, because an emulated GPU does not copy memory that was never
  // written.
  const filled = `${uses(1024)}buffer.fill(7, stream=stream); stream.sync()\n`;
  await notebook.run(filled + work.code, false);
  await expect(notebook.chip).toHaveText(/^1\.\d of 6 GiB on GPU [01]$/);
  await expect(lab.statusItem).toHaveText(/^1\.\d of 6 GiB on GPU [01]$/);
  await expect(notebook.chip).toHaveAttribute('title', /\(emulated\)/);
  work.end();
  await expect(notebook.chip).toHaveText(/^Idle, back to the pool in (59|1:00):\d\d/);

  // Make copies slow, so that each state lasts longer: on a busy machine the page may
  // learn of a state half a second late.
  await ask('fault', { name: 'slow-copies', bandwidth: '512MiB/s' });
  await ask('options', { idle_timeout: 15 });
  await expect(notebook.chip).toHaveText(
    /^Idle, back to the pool in 0:(0[1-9]|1[0-5])$/
  );
  await expect(notebook.chip).toHaveText(/^In host memory: 1\.\d GiB$/);
  expect(await said()).toContain('Moving to host memory…');

  await ask('options', { idle_timeout: 3600 });
  await notebook.run('buffer.fill(9, stream=stream); stream.sync(); print("back")');
  await expect(notebook.output).toHaveText('back');
  await expect(notebook.chip).toHaveText(/^Idle, back to the pool in/);
  expect(
    (await said()).filter(text => /^Restoring 1\.\d GiB…$/.test(text))
  ).toHaveLength(1);
});

test('two notebooks compete for one device', async ({ lab }) => {
  await ask('fresh', {
    ...STAYS_BUSY,
    emulate: '1x8GiB,context=256MiB,bandwidth=2GiB/s',
    // Switch time slices off. On a slow machine, this test takes longer than a time
    // slice: the first notebook would lose its slice, and get it back later.
    preempt: []
  });
  const first = await lab.notebook('first');
  const work = new Work('first');
  await first.run(work.code, false);
  await expect(first.chip).toHaveText(/of 6 GiB on GPU [01]$/);

  const second = await lab.notebook('second');
  const said = await second.listen();
  await second.run(uses(64) + 'print("got it")', false);
  await expect(second.chip).toHaveText(/^Waiting: 1st(, .*)?$/);
  expect((await session(second.kernelId))?.queue_position).toBe(1);

  const third = await lab.notebook('third');
  await third.run(uses(64), false);
  await expect(third.chip).toHaveText(/^Waiting: 2nd(, .*)?$/);

  await lab.execute('notebook:interrupt-kernel');
  await expect(third.chip).toHaveText('No GPU');

  work.end();
  await expect(second.output).toContainText('got it');
  // Show each notebook first. While a notebook is hidden, its toolbar may move the chip
  // into the overflow menu.
  await second.activate();
  await expect(second.chip).toHaveText(/^Idle, back to the pool in/);
  await first.activate();
  await expect(first.chip).toHaveText(/^In host memory/);
  expect(await said()).toContainEqual(expect.stringMatching(/^Waiting: 1st/));
});

test('the chip is short in a narrow bar, and arrow keys focus it', async ({ lab }) => {
  const { page } = lab;
  const notebook = await lab.notebook('narrow');
  await notebook.run(uses(64));
  await expect(notebook.chip).toHaveText(/^Idle, back to the pool in/);
  // Read all values at one instant, because the chip's text changes with the time left.
  const line = () =>
    notebook.chip.evaluate(chip => {
      const part = (name: string) => chip.querySelector(`.jp-gpupool-Chip-${name}`)!;
      const words = part('words').getBoundingClientRect();
      // The chip shows its long form or its short form. Only the visible form has the
      // same lower edge as the chip's words.
      const seen = (name: string) =>
        Math.abs(part(name).getBoundingClientRect().bottom - words.bottom) < 2;
      return {
        long: seen('long'),
        short: seen('short'),
        beyond: Math.abs(words.width - part('long').scrollWidth)
      };
    });
  const wide = await line();
  expect([wide.long, wide.short]).toEqual([true, false]);
  expect(wide.beyond).toBeLessThan(8);

  await page.sidebar.open('left');
  await lab.execute('gpupool:show-panel');
  await expect.poll(async () => (await line()).short).toBe(true);
  expect((await line()).long).toBe(false);
  await expect(notebook.chip).toHaveAttribute('title', /Idle, back to the pool in/);
  await page.sidebar.close('right');
  await expect.poll(async () => (await line()).long).toBe(true);

  // Change the notebook's toolbar while the notebook is hidden. The toolbar then finds
  // no visible item, and takes all its items out of the tab order.
  await lab.notebook('other', 'python3');
  await notebook.panel.locator('jp-toolbar.jp-NotebookPanel-toolbar').evaluate(bar => {
    bar.append(document.createComment('something'));
  });
  await notebook.activate();
  await notebook.panel.locator('.jp-NotebookPanel-toolbar jp-button').first().focus();
  for (let i = 0; i < 20; i++) {
    if (await notebook.chip.evaluate(node => node === document.activeElement)) {
      break;
    }
    await page.keyboard.press('ArrowRight');
  }
  await expect(notebook.chip).toBeFocused();
});

test('an interrupt ends the wait, and the chip shows it', async ({ lab }) => {
  // Switch time slices off. They could end the kernel's wait before the interrupt.
  await ask('options', { preempt: [] });
  await neighbour('one');
  await neighbour('two');
  const notebook = await lab.notebook('waits');
  await notebook.run(uses(64) + 'print("ne" + "ver")', false);
  await expect(notebook.chip).toHaveText(/^Waiting: 1st/);
  // This line shows that the kernel reports the wait. A kernel does not report a wait
  // shorter than 0.25 s.
  await expect(notebook.output).toContainText('Waiting for a GPU slice of 6 GiB');
  await notebook.panel
    .locator('.jp-NotebookPanel-toolbar [data-jp-item-name="interrupt"]')
    .getByRole('button')
    .or(
      notebook.panel.locator(
        '.jp-NotebookPanel-toolbar [data-jp-item-name="interrupt"] jp-button'
      )
    )
    .first()
    .click();
  await expect(notebook.chip).toHaveText('No GPU');
  await expect(notebook.prompt).toHaveText('[1]:');
  await expect(notebook.output).toContainText(/Interrupt/);
  await expect(notebook.output).toContainText(
    'you stopped the wait for a GPU slice. Nothing on the GPU has changed'
  );
  await expect(notebook.output).not.toContainText('never');
});

test('the chip shows that the broker was killed and is back', async ({ lab }) => {
  const notebook = await lab.notebook('survivor');
  await notebook.run(uses(64));
  await expect(notebook.chip).toHaveText(/^Idle, back/);
  await ask('kill');
  await expect(notebook.chip).toHaveText('No answer from the GPU pool');
  await notebook.chip.click();
  await expect(lab.popover).toContainText('The GPU pool does not answer.');
  await lab.page.keyboard.press('Escape');
  await ask('start');
  await expect(notebook.chip).toHaveText(/^Idle/);
  await notebook.run('buffer.fill(1, stream=stream); stream.sync(); print("lives")');
  await expect(notebook.output).toHaveText('lives');
});
