// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** The command that restarts a kernel where the cluster has room. */
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { Dialog, ICommandPalette, showDialog } from '@jupyterlab/apputils';
import { INotebookTracker, NotebookActions } from '@jupyterlab/notebook';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import type { TranslationBundle } from '@jupyterlab/translation';

import { Documents } from '../panel/documents';
import { tellRefusal } from '../tell';
import { IPoolModel } from '../tokens';
import { losses, machineOf, restart } from './restart';

export const RESTART_ELSEWHERE = 'gpupool:restart-elsewhere';

/**
 * Show what a restart loses (`lines`), and ask whether the user accepts this. Enter and
 * Escape mean no.
 */
async function agreed(trans: TranslationBundle, lines: string[]): Promise<boolean> {
  const { button } = await showDialog({
    title: trans.__('Restart on another machine?'),
    body: lines.join('\n\n'),
    defaultButton: 0,
    buttons: [
      Dialog.cancelButton({ label: trans.__('Cancel') }),
      Dialog.warnButton({ label: trans.__('Lose the variables and restart') })
    ]
  });
  return button.accept;
}

export const elsewherePlugin: JupyterFrontEndPlugin<void> = {
  id: '@jupyter-gpupool/labextension:elsewhere',
  description: 'Restarts a kernel of a cluster on another machine.',
  autoStart: true,
  requires: [IPoolModel],
  optional: [ITranslator, ICommandPalette, INotebookTracker],
  activate: (
    app: JupyterFrontEnd,
    model: IPoolModel,
    translator: ITranslator | null,
    palette: ICommandPalette | null,
    notebooks: INotebookTracker | null
  ): void => {
    const trans = (translator ?? nullTranslator).load('jupyter_gpupool');
    const documents = new Documents(app);
    const there = () => {
      const id = documents.active;
      return id !== null && machineOf(model, id) !== '' ? id : null;
    };
    app.commands.addCommand(RESTART_ELSEWHERE, {
      label: trans.__('Restart Where the Cluster Has Room…'),
      caption: trans.__(
        'Start another kernel for this document, on a machine that the cluster chooses'
      ),
      isEnabled: () => there() !== null,
      // Show the command only if the kernel runs on another machine.
      isVisible: () => there() !== null,
      execute: async () => {
        const id = there();
        if (id === null || !(await agreed(trans, losses(trans, model, id)))) {
          return false;
        }
        try {
          return await restart(app.shell.widgets('main'), id, async context => {
            const panel = notebooks?.find(one => one.sessionContext === context);
            if (panel) {
              await NotebookActions.runAll(panel.content, context);
            }
          });
        } catch (error) {
          tellRefusal(trans, error);
          return false;
        }
      },
      describedBy: { args: { type: 'object', properties: {} } }
    });
    palette?.addItem({ command: RESTART_ELSEWHERE, category: trans.__('GPU Pool') });
    let last: string | null = null;
    const update = () => {
      if (there() !== last) {
        last = there();
        app.commands.notifyCommandChanged(RESTART_ELSEWHERE);
      }
    };
    model.changed.connect(update);
    documents.changed.connect(update);
  }
};
