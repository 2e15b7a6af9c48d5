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

/** The statuses of a kernel that has ended or will soon end. */
const ENDED: ReadonlySet<Kernel.Status> = new Set([
  'restarting',
  'autorestarting',
  'terminating',
  'dead'
]);

/** An output of a cell. If `wait` is true, the output is the agent's line. */
interface IOutput {
  readonly metadata?: { readonly gpupool?: { readonly wait?: boolean } };
}

interface IOutputs {
  toJSON(): IOutput[];
  fromJSON(outputs: IOutput[]): void;
}

/**
 * Remove the agent's lines from the outputs of a cell. If no output is such a line, do
 * not write the outputs.
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
  // `kernelChanged` means that the notebook has another kernel, or that the page is
  // new. A new page gets no messages about a request from before the page was loaded.
  // So in both cases no kernel removes the line.
  panel.sessionContext.kernelChanged.connect(clean);
}
