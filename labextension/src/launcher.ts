// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Explains in the launcher why this machine has no GPU, and what to do. */
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

/** The text about a machine without a GPU. */
export function explanation(trans: TranslationBundle, reason: string): string[] {
  const why = reason || trans.__('The GPU pool of this machine has no GPU.');
  const doctor = trans.__(
    'Run `jupyter gpupool doctor` in a terminal: it says what is missing.'
  );
  return [
    // The server's text may already end with this.
    why.includes('gpupool doctor') ? why : `${why} ${doctor}`,
    trans.__('If this machine should have a GPU, ask its administrator.'),
    trans.__(
      'To try the pool without one, start the server with emulated GPUs: GPUPOOL_EMULATE=2x8GiB in its environment.'
    ),
    trans.__('Until then, kernels of the pool do not start here; others do.')
  ];
}

/** The pool's kernels, and the best kernel without a GPU. */
export function choose(
  model: Pick<IPoolModel, 'isPooled'>,
  specs: KernelSpec.ISpecModels | null
): { pooled: KernelSpec.ISpecModel; other: KernelSpec.ISpecModel | null } | null {
  const all = Object.values(specs?.kernelspecs ?? {}).filter(
    spec => spec !== undefined
  );
  const pooled = all.find(({ name }) => model.isPooled(name));
  if (pooled === undefined) {
    return null;
  }
  const others = all.filter(
    ({ name, language }) => !model.isPooled(name) && language === pooled.language
  );
  const usual = others.find(({ name }) => name === specs?.default);
  return { pooled, other: usual ?? others[0] ?? null };
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
        const create = 'notebook:create-new';
        const cwd = args['cwd'] ?? '';
        // The page was written before the broker answered, perhaps long ago.
        await model.refresh();
        const chosen = choose(model, kernelspecs.specs);
        if (model.found.found && chosen && commands.hasCommand(create)) {
          await commands.execute(create, { cwd, kernelName: chosen.pooled.name });
          return;
        }
        const other = chosen?.other;
        const can = other && commands.hasCommand(create);
        const start = await explain(
          trans,
          trans.__('No GPU found'),
          explanation(trans, model.found.reason),
          can ? trans.__('Start %1 without a GPU', other.display_name) : undefined
        );
        if (start && can) {
          await commands.execute(create, { cwd, kernelName: other.name });
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
      const pooled = model.found.found
        ? undefined
        : choose(model, kernelspecs.specs)?.pooled;
      if (pooled && item === null) {
        // JupyterLab's own translation: any other one would make a second category.
        const category = (translator ?? nullTranslator)
          .load('jupyterlab')
          .__('Notebook');
        item = launcher.add({
          command: NO_GPU,
          category,
          rank: 1,
          kernelIconUrl: pooled.resources['logo-svg'] ?? pooled.resources['logo-64x64']
        });
      } else if (!pooled && item !== null) {
        item.dispose();
        item = null;
      }
    };
    model.changed.connect(update);
    kernelspecs.specsChanged.connect(update);
    update();
  }
};
