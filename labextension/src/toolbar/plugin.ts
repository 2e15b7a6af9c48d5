// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** The chip in the toolbars of notebooks and consoles, the popover, and the command that opens it. */
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import {
  ICommandPalette,
  IToolbarWidgetRegistry,
  type ISessionContext
} from '@jupyterlab/apputils';
import type { NotebookPanel } from '@jupyterlab/notebook';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';

import { contextFor, contextOf } from '../contexts';
import { IPoolModel, IPoolSettings } from '../tokens';
import { Chip } from './chip';
import { IPoolPopovers, PoolPopovers } from './popovers';
import { KernelWatch } from './watch';

export const OPEN = 'gpupool:open';

/** The only popover of the page. */
export const popoverPlugin: JupyterFrontEndPlugin<IPoolPopovers> = {
  id: '@jupyter-gpupool/labextension:popover',
  description: 'What can be done for the GPU of a notebook.',
  autoStart: true,
  requires: [IPoolModel],
  optional: [IPoolSettings, ITranslator, ICommandPalette],
  provides: IPoolPopovers,
  activate: (
    app: JupyterFrontEnd,
    model: IPoolModel,
    settings: IPoolSettings | null,
    translator: ITranslator | null,
    palette: ICommandPalette | null
  ): IPoolPopovers => {
    const trans = (translator ?? nullTranslator).load('jupyter_gpupool');
    const popovers = new PoolPopovers(app.commands, settings);
    /**
     * Return the session context of the kernel `kernelId`. Without an id, use the
     * kernel of the widget in front. Null if the kernel is not in the pool.
     */
    const find = (kernelId: unknown): ISessionContext | null => {
      const found =
        typeof kernelId === 'string'
          ? contextFor(app.shell.widgets('main'), kernelId)
          : contextOf(app.shell.currentWidget);
      const kernel = found?.session?.kernel;
      return kernel && model.isPooled(kernel.name) ? found : null;
    };
    app.commands.addCommand(OPEN, {
      label: trans.__('Show the GPU of This Notebook'),
      caption: trans.__(
        'Show which slice this kernel has, why it waits, and what you can do'
      ),
      isEnabled: args => find(args['kernelId']) !== null,
      execute: args => {
        const context = find(args['kernelId']);
        return context !== null && popovers.openFor(context);
      },
      describedBy: {
        args: {
          type: 'object',
          properties: {
            kernelId: {
              type: 'string',
              description: trans.__(
                'Id of the kernel. The default is the kernel of the active document.'
              )
            }
          }
        }
      }
    });
    palette?.addItem({ command: OPEN, category: trans.__('GPU Pool') });
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
    // The type names only the notebook's panel, but a console's panel also works: the
    // factory uses only `sessionContext`, and both panels have it.
    for (const factory of ['Notebook', 'ConsolePanel']) {
      toolbars.addFactory<NotebookPanel>(
        factory,
        'gpupool',
        panel => new Chip(new KernelWatch(model, panel.sessionContext, trans), popovers)
      );
    }
  }
};
