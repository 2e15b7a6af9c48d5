// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Finds the notebook for a command. */
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';

import type { IPoolModel } from '../tokens';

/** The notebook of a kernel, by default the one in front; null if not in the pool. */
export function pooledNotebook(
  model: Pick<IPoolModel, 'isPooled'>,
  notebooks: Pick<INotebookTracker, 'currentWidget' | 'find'>,
  kernelId: unknown
): NotebookPanel | null {
  const kernelOf = (panel: NotebookPanel | null) =>
    panel?.sessionContext.session?.kernel ?? null;
  const { currentWidget: front } = notebooks;
  const panel =
    kernelId === undefined || kernelOf(front)?.id === kernelId
      ? front
      : (notebooks.find(widget => kernelOf(widget)?.id === kernelId) ?? null);
  const kernel = kernelOf(panel);
  return kernel && model.isPooled(kernel.name) ? panel : null;
}
