// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * Removes the line "Waiting for a GPU slice" from cells whose kernel can no longer
 * remove it.
 *
 * The agent in the kernel clears the line when the wait is over. If the kernel restarts
 * or dies while a cell waits, the line stays: the page drops the messages of a dying
 * kernel.
 */
import type { NotebookPanel } from '@jupyterlab/notebook';
import type { Kernel } from '@jupyterlab/services';

/** A kernel with this status has ended, or is about to. */
const ENDED: ReadonlySet<Kernel.Status> = new Set([
  'restarting',
  'autorestarting',
  'terminating',
  'dead'
]);

/** The metadata by which the agent marks an output as its line. */
interface IOutput {
  readonly metadata?: { readonly gpupool?: { readonly wait?: boolean } };
}

interface IOutputs {
  toJSON(): IOutput[];
  fromJSON(outputs: IOutput[]): void;
}

/**
 * Remove the agent's lines from these outputs; do not touch an area without such a
 * line.
 */
export function removeWaits(outputs: IOutputs): void {
  const all = outputs.toJSON();
  const others = all.filter(output => output.metadata?.gpupool?.wait !== true);
  if (others.length < all.length) {
    outputs.fromJSON(others);
  }
}

/** Remove the lines from a notebook when no kernel will remove them. */
export function watchWaits(
  panel: Pick<NotebookPanel, 'content' | 'sessionContext'>
): void {
  const clean = () => {
    for (const cell of panel.content.model?.cells ?? []) {
      if ('outputs' in cell) {
        removeWaits(cell.outputs as IOutputs);
      }
    }
  };
  panel.sessionContext.statusChanged.connect((_, status) => {
    if (ENDED.has(status)) {
      clean();
    }
  });
  // Now the notebook has another kernel, or the page is new. A new page gets no
  // messages about requests from before it was loaded.
  panel.sessionContext.kernelChanged.connect(clean);
}
