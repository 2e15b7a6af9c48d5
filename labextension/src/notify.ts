// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Warns that an idle kernel will soon lose its slice, if its resume will be slow. */
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { Notification } from '@jupyterlab/apputils';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { IDisposable } from '@lumino/disposable';
import { Signal } from '@lumino/signaling';

import type { IIdleWarning } from './api';
import { duration, keepSeconds } from './keeping';
import { Documents } from './panel/documents';
import { allOf, followPool, tell } from './tell';
import { IPoolModel, IPoolSettings } from './tokens';
import { about, bytes, localTime, timeOfDay } from './words';

/**
 * A longer document name is cut to this many characters, because JupyterLab shows only
 * 140 characters of a notification.
 */
const NAME = 28;

/**
 * Two warnings about one kernel count as the same warning if the times at which the
 * slice leaves differ by fewer seconds than this.
 */
const SAME = 1;

/**
 * The text of a warning; `name` is the name of the document. The text has a time of day
 * and no count-down, because a shown text is not updated.
 */
export function warning(
  trans: TranslationBundle,
  name: string,
  warned: IIdleWarning,
  leaves: Date
): string {
  const short = name.length > NAME ? `${name.slice(0, NAME - 1)}…` : name;
  const at = timeOfDay(trans, leaves, true);
  const size = warned.bytes === null ? trans.__('its data') : bytes(warned.bytes);
  return warned.resume_seconds === null
    ? trans.__(
        '%1: its GPU slice goes back to the pool at %2. The time to restore %3 is not known yet.',
        short,
        at,
        size
      )
    : trans.__(
        '%1: its GPU slice goes back to the pool at %2. It takes %4 to restore %3.',
        short,
        at,
        size,
        about(trans, warned.resume_seconds)
      );
}

/**
 * Shows one notification for each kernel, and removes it when its text is no longer
 * true.
 */
export class IdleWarnings implements IDisposable {
  constructor(
    private readonly _model: IPoolModel,
    private readonly _settings: IPoolSettings,
    private readonly _name: (kernelId: string) => string | null,
    private readonly _trans: TranslationBundle
  ) {
    _model.warned.connect(this._onWarned, this);
    _model.changed.connect(this._onChanged, this);
  }

  get isDisposed(): boolean {
    return this._isDisposed;
  }

  dispose(): void {
    this._isDisposed = true;
    Signal.clearData(this);
    for (const kernelId of [...this._shown.keys()]) {
      this._take(kernelId);
    }
  }

  private readonly _onWarned = (_: IPoolModel, warned: IIdleWarning): void => {
    if (!this._settings.idleWarning) {
      return;
    }
    const trans = this._trans;
    const { kernel_id: kernelId } = warned;
    const seconds = keepSeconds(this._settings.keepMinutes, this._model.view);
    const { client } = this._model;
    const session = this._model.session(kernelId);
    const at = session?.leaves_at ?? this._model.now() + warned.seconds_left;
    const shown = this._shown.get(kernelId);
    if (shown && Math.abs(shown.at - at) < SAME) {
      // When the page reconnects, the server sends the warning again. Do not show it
      // again, because the user may have closed it.
      return;
    }
    this._take(kernelId);
    const name = this._name(kernelId) ?? trans.__('A kernel without a document');
    const id = Notification.warning(
      warning(trans, name, warned, localTime(this._model, at)),
      {
        autoClose: Math.max(1000, warned.seconds_left * 1000),
        actions: [
          ...(seconds === null
            ? []
            : [
                {
                  label: trans.__('Keep for %1', duration(trans, seconds)),
                  caption: trans.__(
                    'Keep the slice for this long even if the kernel is idle'
                  ),
                  displayType: 'accent' as const,
                  callback: () =>
                    void tell(trans, kernelId, client.keep(kernelId, seconds))
                }
              ]),
          {
            label: trans.__('Release now'),
            caption: trans.__('Give the slice back to the pool at once'),
            callback: () => void tell(trans, kernelId, client.release(kernelId))
          }
        ]
      }
    );
    this._shown.set(kernelId, { id, at, leavesAt: session?.leaves_at ?? null });
  };

  /**
   * Remove each warning that is no longer true, because the slice was used again, kept,
   * pinned or taken.
   */
  private readonly _onChanged = (): void => {
    for (const [kernelId, { leavesAt }] of [...this._shown]) {
      const session = this._model.session(kernelId);
      if (session?.state !== 'idle' || session.leaves_at !== leavesAt) {
        this._take(kernelId);
      }
    }
  };

  private _take(kernelId: string): void {
    const shown = this._shown.get(kernelId);
    if (shown) {
      this._shown.delete(kernelId);
      Notification.dismiss(shown.id);
    }
  }

  private readonly _shown = new Map<
    string,
    { readonly id: string; readonly at: number; readonly leavesAt: number | null }
  >();
  private _isDisposed = false;
}

export const notifyPlugin: JupyterFrontEndPlugin<void> = {
  id: '@jupyter-gpupool/labextension:notify',
  description: 'Warns before an idle kernel leaves its GPU, if coming back takes long.',
  autoStart: true,
  requires: [IPoolModel, IPoolSettings],
  optional: [ITranslator],
  activate: (
    app: JupyterFrontEnd,
    model: IPoolModel,
    settings: IPoolSettings,
    translator: ITranslator | null
  ): void => {
    const documents = new Documents(app);
    followPool(model);
    const trans = (translator ?? nullTranslator).load('jupyter_gpupool');
    model.noticed.connect((_, { kernel_id: kernelId, message }) => {
      const name = documents.name(kernelId)?.name;
      // An admin's order is important, so its notification stays until the user closes
      // it.
      const text = name ? trans.__('%1: %2', name, message) : message;
      Notification.warning(text, { autoClose: false, actions: allOf(trans, text) });
    });
    new IdleWarnings(
      model,
      settings,
      kernelId => documents.name(kernelId)?.name ?? null,
      trans
    );
  }
};
