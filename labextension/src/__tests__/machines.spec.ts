// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import { PromiseDelegate } from '@lumino/coreutils';
import { Signal } from '@lumino/signaling';

import type { IMachines } from '../api';
import { Machines } from '../machines';
import type { IPoolModel } from '../tokens';
import { aPool } from './defaults';

const FOUND: IMachines = { connected: true, left_out: 0, machines: [] };

/** A fake model. Its server answers when the test resolves `answer`. */
class Model {
  readonly changed = new Signal<this, void>(this);
  readonly live = false;
  readonly view = aPool({ clustered: true });
  readonly answer = new PromiseDelegate<IMachines>();
  readonly client = { machines: () => this.answer.promise };
  broker = { status: 'up' };
}

it.each([
  ['up', FOUND],
  ['away', null]
])('a late answer is kept only while the broker is up (%s)', async (status, shown) => {
  const model = new Model();
  const machines = new Machines(model as unknown as IPoolModel, () => undefined);
  machines.hold();
  model.broker = { status };
  model.changed.emit();
  model.answer.resolve(FOUND);
  await model.answer.promise;
  await Promise.resolve();
  expect(machines.latest).toBe(shown);
  machines.dispose();
});
