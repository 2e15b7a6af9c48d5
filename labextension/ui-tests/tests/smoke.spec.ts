// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.
import { expect, test } from '../lab';
import { stage } from '../pool';

test('the extension loads without an error', async ({ lab }) => {
  const config = (await lab.page.evaluate(
    () => document.getElementById('jupyter-config-data')!.textContent
  ))!;
  const { federated_extensions: found } = JSON.parse(config) as {
    federated_extensions: { name: string }[];
  };
  expect(found.map(one => one.name)).toContain('@jupyter-gpupool/labextension');
  expect(stage().url).toContain('127.0.0.1');
  const own = lab.errors.filter(text => /gpupool/i.test(text));
  expect(own).toEqual([]);
});
