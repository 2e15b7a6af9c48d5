// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import type { Widget } from '@lumino/widgets';

import type { ISession } from '../../api';
import { losses, restart } from '../restart';
import { aPool, aSession, GIB, NOTHING, trans } from '../../__tests__/defaults';

const FIRST =
  'Another kernel starts, on a machine that the cluster chooses. If the document is a notebook, all its cells run again.';

function lost(more: Partial<ISession> | null): string[] {
  const session = more && aSession({ id: 'a', machine: 'gpu2', ...more });
  return losses(
    trans,
    {
      view: aPool({ remote_kernels: { 'kernel-a': 'gpu2' } }),
      session: () => session
    },
    'kernel-a'
  );
}

describe('the question about a restart elsewhere', () => {
  it('the question names the lost bytes, used and suspended', () => {
    expect(lost({ used_bytes: 2 * GIB, suspended_bytes: GIB })).toEqual([
      FIRST,
      'All variables of the kernel on gpu2 are lost, and so is its data on the GPU or in host memory (3 GiB).'
    ]);
  });

  it.each([[NOTHING], [null]])('the question names no bytes if none are lost', more => {
    expect(lost(more && { ...more, footprint_bytes: 0 })).toEqual([
      FIRST,
      'All variables of the kernel on gpu2 are lost.'
    ]);
  });

  it('the question says that an unreachable kernel may still run', () => {
    expect(lost({ unreachable: 'gpu2 does not answer.' }).slice(2)).toEqual([
      'gpu2 does not answer, so this server cannot end the kernel there now. The old kernel may still run, and change files that the new kernel uses.'
    ]);
  });
});

describe('the restart', () => {
  const changeKernel = jest.fn(() => Promise.resolve({ info: Promise.resolve({}) }));
  const widget = {
    sessionContext: {
      session: { kernel: { id: 'kernel-a', name: 'gpupool-remote-python3' } },
      changeKernel
    }
  } as unknown as Widget;

  it('a restart starts another kernel of the same name', async () => {
    const runAgain = jest.fn(() => Promise.resolve());
    expect(await restart([widget], 'kernel-a', runAgain)).toBe(true);
    expect(runAgain).toHaveBeenCalledTimes(1);
    expect(changeKernel.mock.calls).toEqual([[{ name: 'gpupool-remote-python3' }]]);
  });

  it('a restart does nothing for a kernel without a document', async () => {
    changeKernel.mockClear();
    const runAgain = jest.fn();
    expect(await restart([widget], 'kernel-b', runAgain)).toBe(false);
    expect(runAgain).not.toHaveBeenCalled();
    expect(changeKernel).not.toHaveBeenCalled();
  });
});
