// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * Tests a non-admin's server: neither the page nor REST shows the names of other users.
 */
import { faults } from '../axe';
import { expect, Lab, test, type ISite } from '../lab';
import { ask, neighbour, uses } from '../pool';

test('a non-admin sees slices and the queue without names', async ({ browser }) => {
  test.skip(process.getuid?.() !== 0, 'only root can start servers of other users');
  await ask('fresh', { preempt: [] });
  await neighbour('secret', { gib: 7 });
  await neighbour('hidden', { gib: 7 });
  await neighbour('covert', { gib: 5, hold: false });
  await ask('asks', { name: 'covert' });
  const lab = await Lab.open(browser, { site: await ask<ISite>('lab_of_visitor') });
  const { page, panel } = lab;
  const mine = await lab.notebook('mine');
  await mine.run(uses(64) + 'print("has it")', false);
  await expect(mine.chip).toHaveText(/^Waiting: \d/);
  await lab.execute('gpupool:show-panel');
  const slices = panel
    .getByRole('list', { name: /^On GPU/ })
    .getByRole('listitem')
    .filter({ hasText: /^Another user \(notebook\)7 GiB · in use$/ });
  await expect(slices).toHaveCount(2);
  const waits = panel.getByRole('region', { name: 'Queue' }).getByRole('listitem');
  await expect(
    waits.filter({ hasText: /^\d\w\wAnother user \(notebook\)5 GiBHas waited / })
  ).toHaveText(
    /Has waited \d+ \w+ for (GPU memory that is in use|the kernel ahead of it, .*)\.$/
  );
  const own = waits.filter({ hasText: 'mine.ipynb' });
  await expect(own).toContainText(/6 GiB · .*no estimate yet/);
  await expect(own.locator('.jp-gpupool-why')).not.toBeEmpty();
  await expect(own.getByRole('button', { name: /^Stop waiting/ })).toBeVisible();
  expect(await faults(page, '.jp-gpupool-panel')).toEqual([]);

  // The page offers no way to the admins' page.
  await expect(panel.getByRole('button', { name: 'Open in a tab' })).toBeVisible();
  await expect(panel.getByRole('button', { name: 'All sessions' })).toHaveCount(0);
  expect(
    await page.evaluate(() =>
      window.jupyterapp.commands.isVisible('gpupool:show-admin')
    )
  ).toBe(false);

  await mine.chip.click();
  const why = lab.popover.getByRole('region', { name: 'Why am I waiting?' });
  await expect(why).toContainText('A kernel of another user');
  expect(await faults(page, '.jp-gpupool-Popover')).toEqual([]);

  // Neither the page nor any answer has names, paths or user ids of other users.
  const PRIVATE = /secret|hidden|covert|21001/;
  expect(await page.locator('body').innerText()).not.toMatch(PRIVATE);
  const answers = await Promise.all(
    [
      ...['pool', 'sessions', 'hour', 'history', 'admin'],
      ...['', '/why'].map(rest => `sessions/${mine.kernelId}${rest}`)
    ].map(path => page.request.get(`gpupool/api/${path}`))
  );
  for (const answer of answers) {
    expect(await answer.text(), answer.url()).not.toMatch(PRIVATE);
  }
  expect(answers.map(answer => answer.status())).toEqual([
    ...[200, 200, 200, 200, 403],
    ...[200, 200]
  ]);
  expect(lab.told.length).toBeGreaterThan(0);
  expect(lab.told.filter(text => PRIVATE.test(text))).toEqual([]);
  await page.keyboard.press('Escape');

  await ask('leave', { name: 'covert' });
  await ask('leave', { name: 'hidden' });
  await ask('leave', { name: 'secret' });
  await expect(mine.output).toContainText('has it');
  await expect(mine.chip).toHaveText(/^Idle, back to the pool in/);
  await lab.clear();
  await lab.close();
});
