// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * The line "Waiting for a GPU slice" in a cell whose kernel can no longer remove it.
 *
 * The agent in the kernel clears the line when the wait is over. A kernel that restarts or dies
 * while a cell waits never does, and the page drops the messages of a dying kernel.
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

/** The metadata with which the agent marks its line in an output. */
interface IOutput {
  readonly metadata?: { readonly gpupool?: { readonly wait?: boolean } };
}

interface IOutputs {
  toJSON(): IOutput[];
  fromJSON(outputs: IOutput[]): void;
}

/** Remove the lines from these outputs; leave the others, and an area without a line, alone. */
export function removeWaits(outputs: IOutputs): void {
  const all = outputs.toJSON();
  const others = all.filter(output => output.metadata?.gpupool?.wait !== true);
  if (others.length < all.length) {
    outputs.fromJSON(others);
  }
}

/** Keep a notebook free of lines that no kernel will remove. */
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
  // Another kernel; or a newly opened page, which gets no messages of earlier requests.
  panel.sessionContext.kernelChanged.connect(clean);
}
