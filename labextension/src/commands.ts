// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Commands for the kernel of the document in front. */
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette, InputDialog } from '@jupyterlab/apputils';
import type { ServiceManager } from '@jupyterlab/services';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { CommandRegistry } from '@lumino/commands';
import type { ReadonlyPartialJSONObject } from '@lumino/coreutils';

import { attachNow } from './attach';
import { duration, keepSeconds } from './keeping';
import { Documents } from './panel/documents';
import { explain, noBroker, tell, tellCalmly, tellRefusal } from './tell';
import { IPoolModel, IPoolSettings } from './tokens';
import { hasSlice } from './toolbar/situation';
import { editable, readSize } from './toolbar/sizes';
import { bytes } from './words';

export namespace CommandIDs {
  export const ask = 'gpupool:ask';
  export const get = 'gpupool:get';
  export const release = 'gpupool:release';
  export const keep = 'gpupool:keep';
  export const why = 'gpupool:why';
  export const refresh = 'gpupool:refresh';
  /** The panel's own command. */
  export const showPanel = 'gpupool:show-panel';
  /**
   * The command that opens the popover. The popover has a better form for memory than a
   * dialog.
   */
  export const open = 'gpupool:open';
}

export interface IOptions {
  readonly commands: CommandRegistry;
  readonly model: IPoolModel;
  readonly settings: Pick<IPoolSettings, 'keepMinutes'>;
  readonly sessions: Pick<ServiceManager.IManager['sessions'], 'running'>;
  readonly kernels: Pick<ServiceManager.IManager['kernels'], 'connectTo'>;
  /** The kernel of the document in front. */
  readonly active: () => string | null;
  readonly trans: TranslationBundle;
}

type Args = ReadonlyPartialJSONObject;

/**
 * Add the commands. The argument `kernelId` chooses the kernel of a command; the
 * default is the kernel of the document in front.
 */
export function addCommands(options: IOptions): void {
  const { commands, model, settings, trans } = options;
  const { client } = model;

  /** Return the id of the kernel that `args` chooses; null if it is not in the pool. */
  const kernel = (args: Args): string | null => {
    const id =
      typeof args['kernelId'] === 'string' ? args['kernelId'] : options.active();
    return id !== null && pooled(id) ? id : null;
  };
  const pooled = (id: string): boolean => {
    for (const session of options.sessions.running()) {
      if (session.kernel?.id === id) {
        return model.isPooled(session.kernel.name);
      }
    }
    return model.session(id) !== null;
  };
  const seconds = (args: Args): number | null =>
    keepSeconds(args['minutes'] ?? settings.keepMinutes, model.view);
  const has = (kernelId: string): boolean => hasSlice(model.session(kernelId));
  const waits = (kernelId: string): boolean =>
    model.session(kernelId)?.state === 'queued';

  /**
   * Add a command for one kernel. It is enabled only if `fits` is true for the kernel.
   */
  const add = (
    id: string,
    label: (args: Args) => string,
    caption: string,
    execute: (kernelId: string, args: Args) => Promise<boolean>,
    fits: (kernelId: string) => boolean = () => true,
    more: Record<string, { type: string; description: string }> = {}
  ) =>
    commands.addCommand(id, {
      label,
      caption,
      isEnabled: args => {
        const kernelId = kernel(args);
        return kernelId !== null && fits(kernelId);
      },
      execute: async args => {
        const kernelId = kernel(args);
        return kernelId === null ? false : execute(kernelId, args);
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
            },
            ...more
          }
        }
      }
    });

  add(
    CommandIDs.ask,
    () => trans.__('Ask for GPU Memory…'),
    trans.__('Ask the GPU pool to change the size of this kernel’s slice'),
    async kernelId => {
      const { open } = CommandIDs;
      // Open the popover if this kernel has a visible chip or status item. Otherwise
      // show a dialog.
      if (
        commands.hasCommand(open) &&
        commands.isEnabled(open, { kernelId }) &&
        (await commands.execute(open, { kernelId })) === true
      ) {
        return true;
      }
      const memory = await askMemory(model, kernelId, trans);
      return memory === null
        ? false
        : tell(trans, kernelId, client.change(kernelId, { memory }));
    }
  );
  add(
    CommandIDs.get,
    () => trans.__('Get a GPU Now'),
    trans.__('Get a slice for this kernel before a cell needs one'),
    async kernelId => {
      for (const { kernel: found } of options.sessions.running()) {
        if (found?.id === kernelId) {
          const connection = options.kernels.connectTo({ model: found });
          const done = await tell(trans, kernelId, attachNow(trans, connection));
          connection.dispose();
          return done;
        }
      }
      return false;
    },
    kernelId => !has(kernelId) && !waits(kernelId)
  );
  add(
    CommandIDs.release,
    () => trans.__('Release the GPU Now'),
    trans.__(
      'Give this kernel’s slice back to the pool, and keep the kernel’s data in host memory'
    ),
    kernelId => tell(trans, kernelId, client.release(kernelId))
  );
  add(
    CommandIDs.keep,
    args => {
      const time = seconds(args);
      return time === null
        ? trans.__('Keep the GPU')
        : trans.__('Keep the GPU for %1', titled(duration(trans, time)));
    },
    trans.__('Keep this kernel’s slice even if the kernel is idle'),
    async (kernelId, args) => {
      const time = seconds(args);
      if (time === null) {
        // The user's time is not a positive number, or the pool's limit is 0. Send no
        // request, because a request with 0 would end a keep.
        tellRefusal(
          trans,
          new Error(
            model.view?.limits.max_keep === 0
              ? trans.__(
                  'This pool does not let a kernel keep an idle slice (c.GPUPool.max_keep is 0).'
                )
              : trans.__('Give a number of minutes above zero.')
          )
        );
        return false;
      }
      return tell(trans, kernelId, client.keep(kernelId, time));
    },
    has,
    {
      minutes: {
        type: 'number',
        description: trans.__('For how many minutes the kernel keeps its slice')
      }
    }
  );
  add(
    CommandIDs.why,
    () => trans.__('Why Does This Kernel Wait or Keep Its GPU?'),
    trans.__(
      'Show the reason, your share of the pool, and what would change the answer'
    ),
    async kernelId => {
      try {
        const { lines, standing } = await client.why(kernelId);
        await explain(trans, trans.__('This kernel’s GPU'), [...lines, ...standing]);
        return true;
      } catch (error) {
        tellRefusal(trans, error);
        return false;
      }
    },
    kernelId => has(kernelId) || waits(kernelId)
  );
  commands.addCommand(CommandIDs.refresh, {
    label: trans.__('Refresh the GPU Pool'),
    caption: trans.__('Ask for the current state of the pool'),
    execute: async () => {
      await model.refresh();
      const { status, code, message, nextStep } = model.broker;
      if (status === 'away' && !model.live && noBroker(code)) {
        // No pooled kernel runs on this server. So an absent broker is normal: a broker
        // ends when no kernel needs it.
        tellCalmly(
          trans.__('The pool starts when the first Pooled GPU kernel starts.')
        );
      } else if (status === 'away') {
        tellRefusal(trans, new Error([message, nextStep].filter(Boolean).join(' ')));
      }
    },
    describedBy: { args: { type: 'object', properties: {} } }
  });
}

/** `10 Minutes`: with capital letters, as in menus. */
function titled(text: string): string {
  return text.replace(/ (\p{L})/gu, (_, letter: string) => ` ${letter.toUpperCase()}`);
}

/**
 * Ask the user for a size, in GiB or with a unit. Resolves to its bytes, or to null if
 * the user cancels.
 */
async function askMemory(
  model: IPoolModel,
  kernelId: string,
  trans: TranslationBundle
): Promise<number | null> {
  const session = model.session(kernelId);
  const most = session ? session.most_bytes : (model.view?.limits.memory ?? null);
  const now = session?.request.memory ?? null;
  const written = now === null ? '' : editable(now);
  let text = written;
  let fault = '';
  for (;;) {
    const bound =
      most === null
        ? trans.__('GiB on each GPU')
        : trans.__('GiB on each GPU, at most %1', bytes(most));
    const { button, value } = await InputDialog.getText({
      title: trans.__('Ask for GPU memory'),
      label: [fault, bound].filter(Boolean).join(' '),
      text,
      okLabel: trans.__('Ask')
    });
    if (!button.accept || value === null) {
      return null;
    }
    if (now !== null && value === written) {
      return now; // the text is unchanged, and `now` may have more digits
    }
    const read = readSize(trans, value, most);
    if ('size' in read) {
      return read.size;
    }
    // The dialog opens again with the typed text.
    [text, fault] = [value, read.fault];
  }
}

export const commandsPlugin: JupyterFrontEndPlugin<void> = {
  id: '@jupyter-gpupool/labextension:commands',
  description: 'Commands for the GPU of the document in front.',
  autoStart: true,
  requires: [IPoolModel, IPoolSettings],
  optional: [ITranslator, ICommandPalette],
  activate: (
    app: JupyterFrontEnd,
    model: IPoolModel,
    settings: IPoolSettings,
    translator: ITranslator | null,
    palette: ICommandPalette | null
  ): void => {
    const trans = (translator ?? nullTranslator).load('jupyter_gpupool');
    const documents = new Documents(app);
    addCommands({
      commands: app.commands,
      model,
      settings,
      sessions: app.serviceManager.sessions,
      kernels: app.serviceManager.kernels,
      active: () => documents.active,
      trans
    });
    const { ask, get, release, keep, why, refresh, showPanel } = CommandIDs;
    let last = '';
    const update = () => {
      const id = documents.active;
      const now = `${id} ${id === null ? '' : model.session(id)?.state}`;
      if (now !== last) {
        last = now;
        [ask, get, release, keep, why].forEach(one =>
          app.commands.notifyCommandChanged(one)
        );
      }
    };
    model.changed.connect(update);
    documents.changed.connect(update);
    for (const command of [get, ask, release, keep, why, refresh, showPanel]) {
      palette?.addItem({ command, category: trans.__('GPU Pool') });
    }
  }
};
