// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Puts the item in the status bar and lets it follow the notebook or console in front. */
import {
  ILabShell,
  type JupyterFrontEnd,
  type JupyterFrontEndPlugin
} from '@jupyterlab/application';
import { INotebookTracker } from '@jupyterlab/notebook';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import { Signal } from '@lumino/signaling';

import { contextOf } from '../contexts';
import { IPoolModel, IPoolSettings } from '../tokens';
import { IPoolPopovers } from '../toolbar/popovers';
import { StatusItem } from './item';

export const statusbarPlugin: JupyterFrontEndPlugin<void> = {
  id: '@jupyter-gpupool/labextension:statusbar',
  description: 'The GPU of the notebook or console in front, in the status bar.',
  autoStart: true,
  requires: [IPoolModel, IPoolPopovers],
  optional: [IStatusBar, INotebookTracker, ILabShell, IPoolSettings, ITranslator],
  activate: (
    _: JupyterFrontEnd,
    model: IPoolModel,
    popovers: IPoolPopovers,
    statusbar: IStatusBar | null,
    notebooks: INotebookTracker | null,
    shell: ILabShell | null,
    settings: IPoolSettings | null,
    translator: ITranslator | null
  ): void => {
    if (!statusbar || !notebooks) {
      return; // Notebook 7 has no status bar.
    }
    const trans = (translator ?? nullTranslator).load('jupyter_gpupool');
    const item = new StatusItem(model, popovers, trans);
    // This plugin has a tracker of notebooks only. To follow consoles, too, use the
    // shell's current widget.
    const follow = () =>
      item.follow(contextOf(shell ? shell.currentWidget : notebooks.currentWidget));
    notebooks.currentChanged.connect(follow);
    shell?.currentChanged.connect(follow);
    follow();

    const changed = new Signal<StatusItem, void>(item);
    item.activeChanged.connect(() => changed.emit());
    settings?.changed.connect(() => changed.emit());
    statusbar.registerStatusItem('@jupyter-gpupool/labextension:statusbar', {
      item,
      align: 'left',
      // Place the item after the kernel's status. Show it in narrow windows, too,
      // because their toolbar has no room for the chip.
      rank: 2,
      priority: 1,
      isActive: () => item.active && (settings?.statusBar ?? true),
      activeStateChanged: changed
    });
  }
};
