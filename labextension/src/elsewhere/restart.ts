// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Restarts a kernel of a cluster on the machine that the cluster chooses now. */
import type { ISessionContext } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { Widget } from '@lumino/widgets';

import { contextFor } from '../contexts';
import type { IPoolModel } from '../tokens';
import { bytes } from '../words';

/** Return the machine on which a kernel of this server runs; empty for this machine. */
export function machineOf(model: Pick<IPoolModel, 'view'>, kernelId: string): string {
  return model.view?.remote_kernels?.[kernelId] ?? '';
}

/** What a restart on another machine does and loses, one paragraph each. */
export function losses(
  trans: TranslationBundle,
  model: Pick<IPoolModel, 'view' | 'session'>,
  kernelId: string
): string[] {
  const session = model.session(kernelId);
  const machine = machineOf(model, kernelId);
  const held =
    (session?.suspended_bytes ?? 0) +
    (session?.used_bytes ?? session?.footprint_bytes ?? 0);
  return [
    trans.__(
      'Another kernel starts, on a machine that the cluster chooses. If the document is a notebook, all its cells run again.'
    ),
    held > 0
      ? trans.__(
          'All variables of the kernel on %1 are lost, and so is its data on the GPU or in host memory (%2).',
          machine,
          bytes(held)
        )
      : trans.__('All variables of the kernel on %1 are lost.', machine),
    ...(session?.unreachable
      ? [
          trans.__(
            '%1 does not answer, so this server cannot end the kernel there now. The old kernel may still run, and change files that the new kernel uses.',
            machine
          )
        ]
      : [])
  ];
}

/**
 * Replace the kernel of a document by a new kernel, and run the document again.
 * Resolves to false if no document uses the kernel `kernelId`.
 */
export async function restart(
  widgets: Iterable<Widget>,
  kernelId: string,
  runAgain: (context: ISessionContext) => Promise<unknown>
): Promise<boolean> {
  const context = contextFor(widgets, kernelId);
  const name = context?.session?.kernel?.name;
  if (!context || name === undefined) {
    return false;
  }
  // JupyterLab's restart would keep the kernel on its machine, so start a new kernel.
  const kernel = await context.changeKernel({ name });
  await kernel?.info;
  await runAgain(context);
  return true;
}
