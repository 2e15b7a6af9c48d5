// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * Makes the button "Tell me when it starts" work: notifies the user when a waiting
 * kernel gets its slice.
 */
import { Notification as Toast } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import { Signal, type ISignal } from '@lumino/signaling';

import type { IPoolModel } from '../tokens';

/** If the browser shows no notice, JupyterLab shows one for this many milliseconds. */
const SHOWN = 20_000;

type Model = Pick<IPoolModel, 'session' | 'changed'>;

export class StartNotices {
  private constructor(
    private readonly _model: Model,
    private readonly _trans: TranslationBundle
  ) {
    _model.changed.connect(this._look, this);
  }

  /**
   * Return the notices for a model. All calls with one model return the same object.
   */
  static of(model: Model, trans: TranslationBundle): StartNotices {
    let found = all.get(model);
    if (!found) {
      found = new StartNotices(model, trans);
      all.set(model, found);
    }
    return found;
  }

  get changed(): ISignal<this, void> {
    return this._changed;
  }

  wanted(kernelId: string): boolean {
    return this._wanted.has(kernelId);
  }

  /**
   * Notify the user when this kernel starts. Resolves to a sentence that says where the
   * notice will appear.
   *
   * Call this from a click, because a browser asks for permission only after a click.
   */
  async want(kernelId: string, name: string): Promise<string> {
    const trans = this._trans;
    this._wanted.set(kernelId, name);
    this._changed.emit();
    return (await permission()) === 'granted'
      ? trans.__('Your browser notifies you when the kernel gets its GPU.')
      : trans.__(
          'Your browser blocks notifications, so this page shows a message when the kernel gets its GPU.'
        );
  }

  private readonly _look = (): void => {
    for (const [kernelId, name] of [...this._wanted]) {
      const session = this._model.session(kernelId);
      if (session?.state === 'queued' || session?.state === 'attaching') {
        continue;
      }
      this._wanted.delete(kernelId);
      this._changed.emit();
      if (session !== null && session.granted_bytes > 0) {
        this._tell(this._trans.__('%1 has its GPU.', name), kernelId);
      }
    }
  };

  private _tell(text: string, kernelId: string): void {
    if (typeof Notification !== 'undefined' && Notification.permission === 'granted') {
      try {
        const note = new Notification(text, { tag: `gpupool ${kernelId}` });
        note.onclick = () => {
          window.focus();
          note.close();
        };
        return;
      } catch {
        // Some browsers allow notifications only from a service worker.
      }
    }
    Toast.success(text, { autoClose: SHOWN });
  }

  private readonly _wanted = new Map<string, string>();
  private readonly _changed = new Signal<this, void>(this);
}

const all = new WeakMap<Model, StartNotices>();

async function permission(): Promise<NotificationPermission> {
  if (typeof Notification === 'undefined') {
    return 'denied';
  }
  return Notification.permission === 'default'
    ? Notification.requestPermission()
    : Notification.permission;
}
