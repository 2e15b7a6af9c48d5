// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import { pooledNotebook } from '../notebooks';

describe('the notebook for a command', () => {
  const model = { isPooled: (name: string) => name === 'gpupool-python3' };

  const notebook = (id: string, name = 'gpupool-python3') => ({
    sessionContext: { session: { kernel: { id, name } } }
  });
  const [a, b, plain] = [notebook('a'), notebook('b'), notebook('c', 'python3')];

  const meant = (front: object | null, kernelId?: string) => {
    const all = [a, b, plain];
    const notebooks = {
      currentWidget: front,
      find: (which: (panel: never) => boolean) =>
        all.find(panel => which(panel as never))
    };
    return pooledNotebook(model, notebooks as never, kernelId);
  };

  it('is the one in front, if its kernel is pooled', () => {
    expect(meant(a)).toBe(a);
    expect(meant(plain)).toBeNull();
    expect(meant(null)).toBeNull();
  });

  it('is the notebook of the given kernel, and no other', () => {
    expect(meant(a, 'a')).toBe(a);
    expect(meant(a, 'b')).toBe(b);
    expect(meant(null, 'b')).toBe(b);
    // For example the kernel of a console.
    expect(meant(a, 'elsewhere')).toBeNull();
    expect(meant(a, 'c')).toBeNull();
  });
});
