// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** The panel, in the side bar and as a tab. */
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ILabShell, ILayoutRestorer } from '@jupyterlab/application';
import { ICommandPalette, MainAreaWidget, WidgetTracker } from '@jupyterlab/apputils';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';

import { SHOW_ADMIN } from '../admin';
import { History } from '../history';
import { IPoolModel, IPoolSettings } from '../tokens';
import { Documents } from './documents';
import type { ILink } from './tools';
import { PANEL_ID, PanelWidget } from './widget';

export const SHOW_PANEL = 'gpupool:show-panel';
export const OPEN_TAB = 'gpupool:open-tab';

/** The panel's id when it is a tab. */
export const TAB_ID = `${PANEL_ID}-tab`;

export const panelPlugin: JupyterFrontEndPlugin<void> = {
  id: '@jupyter-gpupool/labextension:panel',
  description: 'The panel: devices, queue, own kernels, host memory.',
  autoStart: true,
  requires: [IPoolModel, IPoolSettings],
  optional: [ITranslator, ILayoutRestorer, ILabShell, ICommandPalette],
  activate: (
    app: JupyterFrontEnd,
    model: IPoolModel,
    settings: IPoolSettings,
    translator: ITranslator | null,
    restorer: ILayoutRestorer | null,
    shell: ILabShell | null,
    palette: ICommandPalette | null
  ) => {
    const trans = (translator ?? nullTranslator).load('jupyter_gpupool');
    const { commands } = app;
    const shared = {
      model,
      past: new History(model),
      settings,
      documents: new Documents(app),
      trans
    };
    const link = (command: string, label: string): ILink[] =>
      commands.hasCommand(command) && commands.isVisible(command)
        ? [{ label, go: () => void commands.execute(command) }]
        : [];
    const sessions = () =>
      // Show this link only after the pool has reported that the user is an admin.
      model.view?.admin ? link(SHOW_ADMIN, trans.__('All sessions')) : [];
    const panel = new PanelWidget({
      ...shared,
      links: () => [...link(OPEN_TAB, trans.__('Open in a tab')), ...sessions()]
    });
    app.shell.add(panel, 'right', { rank: 900, type: 'GPU Pool' });
    restorer?.add(panel, PANEL_ID);
    commands.addCommand(SHOW_PANEL, {
      label: trans.__('Show GPU Pool Panel'),
      caption: trans.__('Show the devices, the queue and my kernels in the side bar'),
      describedBy: { args: { type: 'object', properties: {} } },
      execute: () => app.shell.activateById(PANEL_ID)
    });
    if (shell === null) {
      return; // a page of Notebook 7 can show only its one document
    }
    const tracker = new WidgetTracker<MainAreaWidget<PanelWidget>>({
      namespace: 'gpupool-panel'
    });
    commands.addCommand(OPEN_TAB, {
      label: trans.__('Open the GPU Pool in a Tab'),
      caption: trans.__('Show the devices, the queue and my kernels in the main area'),
      describedBy: { args: { type: 'object', properties: {} } },
      execute: async () => {
        let widget = tracker.find(() => true);
        if (!widget) {
          const content = new PanelWidget({ ...shared, links: sessions, id: TAB_ID });
          content.title.label = trans.__('GPU Pool');
          content.title.closable = true;
          // The panel in the side bar has another name, because two regions of a page
          // must not have the same name.
          content.node.setAttribute('aria-label', trans.__('GPU Pool in a tab'));
          widget = new MainAreaWidget({ content });
          widget.id = `${TAB_ID}-main`;
          await tracker.add(widget);
        }
        if (!widget.isAttached) {
          shell.add(widget, 'main');
        }
        shell.activateById(widget.id);
      }
    });
    palette?.addItem({ command: OPEN_TAB, category: trans.__('GPU Pool') });
    if (restorer) {
      void restorer.restore(tracker, { command: OPEN_TAB, name: () => TAB_ID });
    }
  }
};
