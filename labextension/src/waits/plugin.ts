// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Removes the lines that a restarted kernel has left in waiting cells. */
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { INotebookTracker } from '@jupyterlab/notebook';

import { watchWaits } from './lines';

export const waitsPlugin: JupyterFrontEndPlugin<void> = {
  id: '@jupyter-gpupool/labextension:waits',
  description:
    'Removes what a restarted kernel has left in cells that waited for a GPU.',
  autoStart: true,
  requires: [INotebookTracker],
  activate: (_: JupyterFrontEnd, notebooks: INotebookTracker): void => {
    notebooks.forEach(watchWaits);
    notebooks.widgetAdded.connect((_, panel) => watchWaits(panel));
  }
};
