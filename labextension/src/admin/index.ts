// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** The page for admins of the pool: it shows every session, and admins give orders. */
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ILabShell, ILayoutRestorer } from '@jupyterlab/application';
import { ICommandPalette, MainAreaWidget, WidgetTracker } from '@jupyterlab/apputils';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';

import { IPoolModel } from '../tokens';
import { ADMIN_ID, AdminWidget } from './widget';

export const SHOW_ADMIN = 'gpupool:show-admin';

export const adminPlugin: JupyterFrontEndPlugin<void> = {
  id: '@jupyter-gpupool/labextension:admin',
  description: 'A page with all sessions of the pool and what an admin may do to them.',
  autoStart: true,
  requires: [IPoolModel],
  optional: [ITranslator, ICommandPalette, ILabShell, ILayoutRestorer],
  activate: (
    app: JupyterFrontEnd,
    model: IPoolModel,
    translator: ITranslator | null,
    palette: ICommandPalette | null,
    shell: ILabShell | null,
    restorer: ILayoutRestorer | null
  ): void => {
    if (shell === null) {
      return; // a page of Notebook 7 can show only its one document
    }
    const trans = (translator ?? nullTranslator).load('jupyter_gpupool');
    const tracker = new WidgetTracker<MainAreaWidget<AdminWidget>>({
      namespace: 'gpupool-admin'
    });
    app.commands.addCommand(SHOW_ADMIN, {
      label: trans.__('GPU Pool: All Sessions'),
      caption: trans.__('Show every session of the pool, for its admins'),
      // Before the pool's first answer, it is not known whether the user is an admin.
      isVisible: () => model.view?.admin !== false,
      describedBy: { args: { type: 'object', properties: {} } },
      execute: async () => {
        let widget = tracker.find(() => true);
        if (!widget) {
          widget = new MainAreaWidget({ content: new AdminWidget(model, trans) });
          widget.id = `${ADMIN_ID}-tab`;
          await tracker.add(widget);
        }
        if (!widget.isAttached) {
          shell.add(widget, 'main');
        }
        shell.activateById(widget.id);
      }
    });
    let admin = model.view?.admin;
    model.changed.connect(() => {
      // `notifyCommandChanged` rebuilds menus and the palette, so call it only if
      // `admin` has changed.
      if (model.view?.admin !== admin) {
        admin = model.view?.admin;
        app.commands.notifyCommandChanged(SHOW_ADMIN);
      }
    });
    palette?.addItem({ command: SHOW_ADMIN, category: trans.__('GPU Pool') });
    if (restorer) {
      void restorer.restore(tracker, { command: SHOW_ADMIN, name: () => ADMIN_ID });
    }
  }
};
