// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * Adds the pool's kernels to JupyterLab's list of running kernels, with a button to
 * release each slice.
 */
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import type { IRunningSessions } from '@jupyterlab/running';
import { IRunningSessionManagers } from '@jupyterlab/running';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { ISignal } from '@lumino/signaling';
import { Signal } from '@lumino/signaling';

import type { ISession, State } from './api';
import { logoIcon } from './icons';
import type { IDocuments } from './panel/documents';
import { Documents } from './panel/documents';
import { tell } from './tell';
import { IPoolModel, isMine } from './tokens';
import { type ISaid, say } from './words';

const HOLDS: ReadonlySet<State> = new Set(['attaching', 'active', 'idle']);

export class RunningSlices implements IRunningSessions.IManager {
  constructor(
    private readonly _model: IPoolModel,
    private readonly _documents: IDocuments,
    private readonly _trans: TranslationBundle
  ) {
    this.name = _trans.__('GPU Pool');
    this.shutdownLabel = _trans.__('Release GPU');
    this.shutdownAllLabel = _trans.__('Release All GPUs');
    this.shutdownAllConfirmationText = _trans.__(
      'Give the GPU slices of all your kernels on this server back to the pool? Their data stays in host memory.'
    );
    _model.changed.connect(this._onChanged, this);
    _documents.changed.connect(this._emit, this);
  }

  readonly name: string;
  readonly shutdownLabel: string;
  readonly shutdownAllLabel: string;
  readonly shutdownAllConfirmationText: string;

  get runningChanged(): ISignal<RunningSlices, void> {
    return this._runningChanged;
  }

  running(): IRunningSessions.IRunningItem[] {
    return this._sessions().map(session => this._item(session));
  }

  shutdownAll(): void {
    for (const session of this._sessions()) {
      if (HOLDS.has(session.state)) {
        this._release(session);
      }
    }
  }

  refreshRunning(): void {
    // Without a Pooled GPU kernel, the page sends no request.
    if (this._model.live) {
      void this._model.refresh();
    }
  }

  private _sessions(): ISession[] {
    const { view, live } = this._model;
    const all = live ? (view?.sessions ?? []) : [];
    return all.filter(isMine).filter(({ here, state }) => here && state !== 'ended');
  }

  private _item(session: ISession): IRunningSessions.IRunningItem {
    const said = () => this._said(session);
    const name = this._documents.name(session.kernel_id);
    return {
      context: session.kernel_id,
      icon: () => logoIcon,
      label: () => name?.name ?? session.label,
      labelTitle: () => `${name?.path ?? session.label}\n${said().still}`,
      // The list has room for only a few letters beside a name.
      detail: () => (said().counts ? said().still : said().short),
      open: () => this._documents.open(session.kernel_id),
      // Only a session with a slice gets the button to release it. A kernel that waits
      // or is in host memory has no slice.
      ...(HOLDS.has(session.state) && { shutdown: () => this._release(session) })
    };
  }

  /**
   * The texts of a session. They have no count-down (`leaves_at` is null), because this
   * list is not drawn each second.
   */
  private _said(session: ISession): ISaid {
    const { view } = this._model;
    const still = { ...session, leaves_at: null };
    return say(this._trans, still, view?.devices ?? [], this._model.now());
  }

  private _release(session: ISession): void {
    const { kernel_id: kernel } = session;
    void tell(this._trans, kernel, this._model.client.release(kernel));
  }

  /**
   * Draw the list only if a state or text in it has changed. Most changes of the pool
   * concern other kernels.
   */
  private readonly _onChanged = (): void => {
    const shown = this._sessions()
      .map(session => `${session.id} ${session.state} ${this._said(session).still}`)
      .join('\n');
    if (shown !== this._shown) {
      this._shown = shown;
      this._emit();
    }
  };

  private readonly _emit = (): void => this._runningChanged.emit();

  private _shown = '';
  private readonly _runningChanged = new Signal<RunningSlices, void>(this);
}

export const runningPlugin: JupyterFrontEndPlugin<void> = {
  id: '@jupyter-gpupool/labextension:running',
  description: 'Lists what the kernels of the pool have among all that runs.',
  autoStart: true,
  requires: [IPoolModel],
  optional: [IRunningSessionManagers, ITranslator],
  activate: (
    app: JupyterFrontEnd,
    model: IPoolModel,
    managers: IRunningSessionManagers | null,
    translator: ITranslator | null
  ): void => {
    const trans = (translator ?? nullTranslator).load('jupyter_gpupool');
    managers?.add(new RunningSlices(model, new Documents(app), trans));
  }
};
