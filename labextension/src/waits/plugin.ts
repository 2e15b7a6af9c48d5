// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * Shows the line of a waiting cell with buttons, and removes the line if no kernel will
 * remove it.
 */
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { INotebookTracker } from '@jupyterlab/notebook';
import { IRenderMimeRegistry } from '@jupyterlab/rendermime';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';

import { IPoolModel } from '../tokens';
import { watchWaits } from './lines';
import { waitFactory } from './output';

export const waitsPlugin: JupyterFrontEndPlugin<void> = {
  id: '@jupyter-gpupool/labextension:waits',
  description:
    'Shows what can be done while a cell waits for a GPU, and removes what a restarted kernel has left there.',
  autoStart: true,
  requires: [INotebookTracker, IPoolModel],
  optional: [IRenderMimeRegistry, ITranslator],
  activate: (
    _: JupyterFrontEnd,
    notebooks: INotebookTracker,
    model: IPoolModel,
    outputs: IRenderMimeRegistry | null,
    translator: ITranslator | null
  ): void => {
    const trans = (translator ?? nullTranslator).load('jupyter_gpupool');
    outputs?.addFactory(waitFactory(model, trans));
    notebooks.forEach(watchWaits);
    notebooks.widgetAdded.connect((_, panel) => watchWaits(panel));
  }
};
