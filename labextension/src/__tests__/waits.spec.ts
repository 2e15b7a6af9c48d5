// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import { Signal } from '@lumino/signaling';

import { removeWaits, watchWaits } from '../waits/lines';

const WAIT = {
  output_type: 'display_data',
  data: { 'text/plain': 'Waiting for a GPU slice of 4 GiB.' },
  metadata: { gpupool: { wait: true } }
};
const TEXT = { output_type: 'stream', name: 'stdout', text: 'hi' };
const PLOT = { output_type: 'display_data', data: {}, metadata: { gpupool: {} } };

class Outputs {
  changes = 0;

  constructor(public values: object[]) {}

  toJSON(): object[] {
    return this.values;
  }

  fromJSON(values: object[]): void {
    this.values = values;
    this.changes += 1;
  }
}

function notebook(...cells: object[]) {
  const sessionContext = {} as never as {
    statusChanged: Signal<object, string>;
    kernelChanged: Signal<object, unknown>;
  };
  sessionContext.statusChanged = new Signal(sessionContext);
  sessionContext.kernelChanged = new Signal(sessionContext);
  watchWaits({ content: { model: { cells } }, sessionContext } as never);
  return sessionContext;
}

describe('the lines of waiting cells', () => {
  it('the lines of waits are removed, and other outputs stay', () => {
    const outputs = new Outputs([TEXT, WAIT, PLOT]);
    removeWaits(outputs);
    expect(outputs.values).toEqual([TEXT, PLOT]);
    removeWaits(outputs);
    expect(outputs.changes).toBe(1);
  });

  it.each(['restarting', 'autorestarting', 'terminating', 'dead'])(
    'the lines of waits are removed when the kernel is %s',
    status => {
      const outputs = new Outputs([WAIT]);
      const context = notebook({ type: 'markdown' }, { type: 'code', outputs });
      context.statusChanged.emit('busy');
      expect(outputs.values).toEqual([WAIT]);
      context.statusChanged.emit(status);
      expect(outputs.values).toEqual([]);
    }
  );

  it('the lines of waits are removed when the kernel changes', () => {
    const outputs = new Outputs([WAIT, TEXT]);
    notebook({ type: 'code', outputs }).kernelChanged.emit(null);
    expect(outputs.values).toEqual([TEXT]);
  });
});
