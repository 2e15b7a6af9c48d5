// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * The launcher's tile of a pooled kernel. The tile says what the kernel does and how
 * much memory is free. On a machine without a GPU, the tile says what to do.
 */
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ILauncher } from '@jupyterlab/launcher';
import type { KernelSpec } from '@jupyterlab/services';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { ReadonlyPartialJSONObject } from '@lumino/coreutils';
import type { Signal } from '@lumino/signaling';

import { logoIcon } from './icons';
import { explain } from './tell';
import { IPoolModel } from './tokens';
import { bytes, part } from './words';

/**
 * The command of the tile. It makes a notebook or console with a pooled kernel. On a
 * machine without a GPU, it says why that is not possible.
 */
export const NEW = 'gpupool:new';

/**
 * This package's own kernelspec. `jupyter gpupool wrap` makes more pooled kernelspecs.
 */
const OWN = 'gpupool-python3';

/** The commands of JupyterLab's own tiles. Their arguments contain a kernel's name. */
const CREATE: ReadonlySet<string> = new Set(['notebook:create-new', 'console:create']);

/** Milliseconds after which a launcher asks the pool again how much is free. */
const AGAIN = 10_000;

/** The text about a machine without a GPU. */
export function explanation(trans: TranslationBundle, reason: string): string[] {
  const why = reason || trans.__('The GPU pool of this machine has no GPU.');
  const doctor = trans.__(
    'Run `jupyter gpupool doctor` in a terminal: it says what is missing.'
  );
  return [
    // The server's text may already name this command.
    why.includes('gpupool doctor') ? why : `${why} ${doctor}`,
    trans.__('If this machine should have a GPU, ask its administrator.'),
    trans.__(
      'To try the pool without a real GPU, start the Jupyter server with emulated GPUs: set `GPUPOOL_EMULATE=2x8GiB` in the environment of the server.'
    ),
    trans.__(
      'Without a real or emulated GPU, kernels of the pool cannot start on this machine, but other kernels can.'
    )
  ];
}

type Pool = Pick<IPoolModel, 'found' | 'view' | 'broker'>;

/**
 * The text of a kernel's tile, with the most useful part first. The tooltip shows the
 * whole text.
 */
export function tile(trans: TranslationBundle, name: string, model: Pool): string {
  if (!model.found.found) {
    return trans.__('%1: no GPU found. Choose this kernel to see what to do.', name);
  }
  const what = trans.__('gets a GPU when cells use CUDA');
  // The tile shows the first line, the tooltip also shows the others.
  const first = [trans.__('%1: %2.', name, what)];
  const more: string[] = [];
  const view = model.broker.status === 'up' ? model.view : null;
  if (view) {
    const free = view.devices.map(device => device.memory_free ?? 0);
    const all = view.devices.reduce((sum, one) => sum + one.memory_capacity, 0);
    const sum = free.reduce((some, one) => some + one, 0);
    first.push(trans.__('%1 is free.', part(trans, sum, all)));
    more.push(trans.__('At most %1 is free on one GPU.', bytes(Math.max(0, ...free))));
  }
  if (view ? view.emulated : model.found.emulated) {
    more.push(trans.__('EMULATED: no real GPU is used.'));
  }
  return [first.join(' '), ...more].join('\n');
}

/**
 * Return a kernel outside the pool with the same language as the pooled kernel `name`:
 * if possible, JupyterLab's default kernel.
 */
export function otherKernel(
  model: Pick<IPoolModel, 'isPooled'>,
  specs: KernelSpec.ISpecModels | null,
  name: string
): KernelSpec.ISpecModel | null {
  const all = Object.values(specs?.kernelspecs ?? {}).filter(
    spec => spec !== undefined
  );
  const language = specs?.kernelspecs[name]?.language;
  const others = all.filter(
    spec => !model.isPooled(spec.name) && spec.language === language
  );
  const usual = others.find(spec => spec.name === specs?.default);
  return usual ?? others[0] ?? null;
}

function kernelOf(args: ReadonlyPartialJSONObject): string {
  const name = args['gpupoolKernel'];
  return typeof name === 'string' ? name : '';
}

type Item = ILauncher.IItemOptions;

/**
 * Return the pool's own launcher item if JupyterLab's `item` is for a pooled kernel;
 * otherwise null.
 *
 * A kernel on another machine keeps JupyterLab's item, because the free memory and the
 * missing GPU of this machine do not matter to that kernel.
 */
export function ownItem(
  model: Pick<IPoolModel, 'isPooled' | 'isRemote'>,
  item: Item
): Item | null {
  const name = item.args?.['kernelName'] ?? item.args?.['kernelPreference'];
  const kernel =
    typeof name === 'string' ? name : (name as { name?: unknown } | undefined)?.name;
  if (
    !CREATE.has(item.command) ||
    typeof kernel !== 'string' ||
    !model.isPooled(kernel) ||
    model.isRemote(kernel)
  ) {
    return null;
  }
  return {
    ...item,
    command: NEW,
    args: { ...item.args, gpupoolCommand: item.command, gpupoolKernel: kernel }
  };
}

export const launcherPlugin: JupyterFrontEndPlugin<void> = {
  id: '@jupyter-gpupool/labextension:launcher',
  description: 'The tile of a pooled kernel: what it does, and why there is no GPU.',
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
    commands.addCommand(NEW, {
      label: args => {
        const name = kernelOf(args);
        // The kernelspec's short name saves room in the toolbar. The tile also names
        // the language.
        const shown =
          name === OWN
            ? trans.__('Pooled GPU (Python 3)')
            : kernelspecs.specs?.kernelspecs[name]?.display_name;
        return tile(trans, shown ?? trans.__('Pooled GPU'), model);
      },
      // Use the icon of JupyterLab's own command, because JupyterLab shows the icon of
      // the first tile also beside the title of the section.
      icon: args => {
        const create = args['gpupoolCommand'];
        return typeof create === 'string' ? commands.icon(create, args) : logoIcon;
      },
      execute: async args => {
        const { gpupoolCommand } = args;
        const rest = Object.fromEntries(
          Object.entries(args).filter(([name]) => !name.startsWith('gpupool'))
        );
        const create =
          typeof gpupoolCommand === 'string' ? gpupoolCommand : 'notebook:create-new';
        const name = kernelOf(args);
        // `found` may be old: the server wrote it into the page before the broker
        // answered.
        if (!model.found.found) {
          await model.refresh();
        }
        if (model.found.found) {
          return commands.execute(create, rest) as Promise<unknown>;
        }
        const other = otherKernel(model, kernelspecs.specs, name);
        const start = await explain(
          trans,
          trans.__('No GPU found'),
          explanation(trans, model.found.reason),
          other ? trans.__('Start %1 without a GPU', other.display_name) : undefined
        );
        return start && other
          ? (commands.execute('notebook:create-new', {
              cwd: args['cwd'] ?? '',
              kernelName: other.name
            }) as Promise<unknown>)
          : undefined;
      },
      describedBy: {
        args: {
          type: 'object',
          properties: {
            cwd: {
              type: 'string',
              description: trans.__('The folder of the new notebook')
            },
            gpupoolKernel: {
              type: 'string',
              description: trans.__('Name of the kernelspec')
            },
            gpupoolCommand: {
              type: 'string',
              description: trans.__('The command that creates the document')
            }
          }
        }
      }
    });
    if (launcher) {
      replaceTiles(model, launcher as Model);
    }
  }
};

/**
 * The launcher's model. The launcher draws its items again when the model emits
 * `stateChanged`.
 */
type Model = ILauncher & {
  items(): Iterable<Item>;
  readonly stateChanged?: Signal<unknown, void>;
};

/**
 * Replace JupyterLab's tile of a pooled kernel by the pool's own tile. On a machine
 * without a GPU, JupyterLab's tile would fail without an explanation. With both tiles,
 * users would not know which one to use.
 */
export function replaceTiles(model: IPoolModel, launcher: Model): void {
  const items = launcher.items.bind(launcher);
  // Return the same object for an item each time, because the launcher compares
  // objects.
  const own = new WeakMap<Item, Item>();
  let asked = -Infinity;
  launcher.items = () => {
    const shown = [...items()].map(item => {
      const known = own.get(item) ?? ownItem(model, item);
      if (known) {
        own.set(item, known);
      }
      return known ?? item;
    });
    // While no pooled kernel runs, the pool sends no messages to the page. So request
    // the view, because the tile shows the free memory.
    if (!model.live && shown.some(item => item.command === NEW)) {
      const now = performance.now();
      if (now - asked > AGAIN) {
        asked = now;
        void model.refresh();
      }
    }
    return shown[Symbol.iterator]();
  };
  let last = '';
  const update = () => {
    const free = model.view?.devices.map(device => device.memory_free);
    const now = JSON.stringify([model.found, model.broker.status, free]);
    if (now !== last) {
      last = now;
      launcher.stateChanged?.emit();
    }
  };
  model.changed.connect(update);
  launcher.stateChanged?.emit();
}
