// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** The side panel. */
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ILayoutRestorer } from '@jupyterlab/application';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';

import { History } from '../history';
import { IPoolModel, IPoolSettings } from '../tokens';
import { Documents } from './documents';
import { PANEL_ID, PanelWidget } from './widget';

export const SHOW_PANEL = 'gpupool:show-panel';

export const panelPlugin: JupyterFrontEndPlugin<void> = {
  id: '@jupyter-gpupool/labextension:panel',
  description: 'The side panel: devices, queue, own kernels, host memory.',
  autoStart: true,
  requires: [IPoolModel, IPoolSettings],
  optional: [ITranslator, ILayoutRestorer],
  activate: (
    app: JupyterFrontEnd,
    model: IPoolModel,
    settings: IPoolSettings,
    translator: ITranslator | null,
    restorer: ILayoutRestorer | null
  ) => {
    const trans = (translator ?? nullTranslator).load('jupyter_gpupool');
    const panel = new PanelWidget({
      model,
      past: new History(model),
      settings,
      documents: new Documents(app),
      trans
    });
    app.shell.add(panel, 'right', { rank: 900, type: 'GPU Pool' });
    restorer?.add(panel, PANEL_ID);
    app.commands.addCommand(SHOW_PANEL, {
      label: trans.__('Show GPU Pool Panel'),
      caption: trans.__('Show the devices, the queue and my kernels in the side bar'),
      describedBy: { args: { type: 'object', properties: {} } },
      execute: () => app.shell.activateById(PANEL_ID)
    });
  }
};
