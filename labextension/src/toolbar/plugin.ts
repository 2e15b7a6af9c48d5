// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** The chip in notebooks' toolbars, the popover, and the command that opens it. */
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette, IToolbarWidgetRegistry } from '@jupyterlab/apputils';
import { INotebookTracker, type NotebookPanel } from '@jupyterlab/notebook';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';

import { IPoolModel, IPoolSettings } from '../tokens';
import { Chip } from './chip';
import { pooledNotebook } from './notebooks';
import { IPoolPopovers, PoolPopovers } from './popovers';
import { KernelWatch } from './watch';

export const OPEN = 'gpupool:open';

/** The one popover of the page. */
export const popoverPlugin: JupyterFrontEndPlugin<IPoolPopovers> = {
  id: '@jupyter-gpupool/labextension:popover',
  description: 'What can be done for the GPU of a notebook.',
  autoStart: true,
  requires: [IPoolModel],
  optional: [INotebookTracker, IPoolSettings, ITranslator, ICommandPalette],
  provides: IPoolPopovers,
  activate: (
    app: JupyterFrontEnd,
    model: IPoolModel,
    notebooks: INotebookTracker | null,
    settings: IPoolSettings | null,
    translator: ITranslator | null,
    palette: ICommandPalette | null
  ): IPoolPopovers => {
    const trans = (translator ?? nullTranslator).load('jupyter_gpupool');
    const popovers = new PoolPopovers(app.commands, settings);
    if (notebooks) {
      app.commands.addCommand(OPEN, {
        label: trans.__('Show the GPU of This Notebook'),
        caption: trans.__('What the kernel has, why it waits, and what you can do'),
        isEnabled: args => pooledNotebook(model, notebooks, args['kernelId']) !== null,
        execute: args => {
          const panel = pooledNotebook(model, notebooks, args['kernelId']);
          return panel !== null && popovers.openFor(panel.sessionContext);
        },
        describedBy: {
          args: {
            type: 'object',
            properties: {
              kernelId: {
                type: 'string',
                description: trans.__(
                  'The kernel; by default that of the notebook in front'
                )
              }
            }
          }
        }
      });
      palette?.addItem({ command: OPEN, category: trans.__('GPU Pool') });
    }
    return popovers;
  }
};

export const toolbarPlugin: JupyterFrontEndPlugin<void> = {
  id: '@jupyter-gpupool/labextension:toolbar',
  description: 'What a notebook has of the GPU pool, beside its kernel’s name.',
  autoStart: true,
  requires: [IPoolModel, IPoolPopovers, IToolbarWidgetRegistry],
  optional: [ITranslator],
  activate: (
    _: JupyterFrontEnd,
    model: IPoolModel,
    popovers: IPoolPopovers,
    toolbars: IToolbarWidgetRegistry,
    translator: ITranslator | null
  ): void => {
    const trans = (translator ?? nullTranslator).load('jupyter_gpupool');
    toolbars.addFactory<NotebookPanel>(
      'Notebook',
      'gpupool',
      panel => new Chip(new KernelWatch(model, panel.sessionContext, trans), popovers)
    );
  }
};
