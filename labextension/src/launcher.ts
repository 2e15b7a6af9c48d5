// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** In the launcher, why there is no GPU on this machine, and how to go on. */
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ILauncher } from '@jupyterlab/launcher';
import type { KernelSpec } from '@jupyterlab/services';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { IDisposable } from '@lumino/disposable';

import { logoIcon } from './icons';
import { explain } from './tell';
import { IPoolModel } from './tokens';

export const NO_GPU = 'gpupool:no-gpu';

/** The kernel that we install; others are made by wrapping. */
const KERNEL = 'gpupool-python3';

/** What is said about a machine without a GPU. */
export function explanation(trans: TranslationBundle, reason: string): string[] {
  const why = reason || trans.__('The GPU pool of this machine has no GPU.');
  const doctor = trans.__(
    'Run `jupyter gpupool doctor` in a terminal: it says what is missing.'
  );
  return [
    // The server may have said so itself.
    why.includes('gpupool doctor') ? why : `${why} ${doctor}`,
    trans.__('If this machine should have a GPU, ask who looks after it.'),
    trans.__(
      'To try the pool without one, start the server with emulated GPUs: GPUPOOL_EMULATE=2x8GiB in its environment.'
    ),
    trans.__('The kernel also starts without a GPU: everything runs that needs none.')
  ];
}

/** The kernel to start: ours, or any of the pool; null if there is none. */
export function pooledKernel(
  model: Pick<IPoolModel, 'isPooled'>,
  specs: KernelSpec.ISpecModels | null
): string | null {
  const names = Object.keys(specs?.kernelspecs ?? {}).filter(name =>
    model.isPooled(name)
  );
  return names.includes(KERNEL) ? KERNEL : (names[0] ?? null);
}

export const launcherPlugin: JupyterFrontEndPlugin<void> = {
  id: '@jupyter-gpupool/labextension:launcher',
  description: 'Explains in the launcher why there is no GPU.',
  autoStart: true,
  requires: [IPoolModel],
  optional: [ILauncher, ITranslator],
  activate: (
    app: JupyterFrontEnd,
    model: IPoolModel,
    launcher: ILauncher | null,
    translator: ITranslator | null
  ): void => {
    const { commands } = app;
    const { kernelspecs } = app.serviceManager;
    const trans = (translator ?? nullTranslator).load('jupyter_gpupool');
    commands.addCommand(NO_GPU, {
      label: trans.__('Pooled GPU (no GPU found)'),
      caption: () => explanation(trans, model.found.reason)[0] ?? '',
      icon: logoIcon,
      isVisible: () => !model.found.found,
      execute: async args => {
        const kernelName = pooledKernel(model, kernelspecs.specs);
        const create = 'notebook:create-new';
        const can = kernelName !== null && commands.hasCommand(create);
        const start = await explain(
          trans,
          trans.__('No GPU found'),
          explanation(trans, model.found.reason),
          can ? trans.__('Start without a GPU') : undefined
        );
        if (start && can) {
          await commands.execute(create, { cwd: args['cwd'] ?? '', kernelName });
        }
      },
      describedBy: {
        args: {
          type: 'object',
          properties: {
            cwd: { type: 'string', description: trans.__('Where a notebook is made') }
          }
        }
      }
    });
    if (!launcher) {
      return;
    }
    let item: IDisposable | null = null;
    const update = () => {
      const wanted =
        !model.found.found && pooledKernel(model, kernelspecs.specs) !== null;
      if (wanted && item === null) {
        // Not this category's translation of ours: JupyterLab's, or it would be another one.
        const category = (translator ?? nullTranslator)
          .load('jupyterlab')
          .__('Notebook');
        item = launcher.add({ command: NO_GPU, category, rank: 1 });
      } else if (!wanted && item !== null) {
        item.dispose();
        item = null;
      }
    };
    model.changed.connect(update);
    kernelspecs.specsChanged.connect(update);
    update();
  }
};
