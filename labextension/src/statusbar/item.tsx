// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** The GPU of the active notebook, in the status bar. */
import type { ISessionContext } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import { ReactWidget } from '@jupyterlab/ui-components';
import type { IDisposable } from '@lumino/disposable';
import { Signal, type ISignal } from '@lumino/signaling';
import * as React from 'react';

import type { IPoolModel } from '../tokens';
import { ChipButton } from '../toolbar/chip';
import type { IPlace, IPoolPopovers } from '../toolbar/popovers';
import { KernelWatch } from '../toolbar/watch';

export class StatusItem extends ReactWidget {
  constructor(
    private readonly _model: IPoolModel,
    private readonly _popovers: IPoolPopovers,
    private readonly _trans: TranslationBundle
  ) {
    super();
    this.addClass('jp-gpupool-StatusItem');
    _popovers.changed.connect(this._onPopover, this);
  }

  /** Whether the item has something to show; if not, the status bar hides it. */
  get active(): boolean {
    return (this._watch?.situation ?? null) !== null;
  }

  get activeChanged(): ISignal<this, void> {
    return this._activeChanged;
  }

  /** Follow another notebook, or none. */
  follow(context: ISessionContext | null): void {
    if (this._watch !== null && this._watch.context === context) {
      return;
    }
    this._drop();
    if (context !== null) {
      const watch = new KernelWatch(this._model, context, this._trans);
      this._watch = watch;
      this._place = { watch, button: () => this.node.querySelector('button') };
      this._offer = this._popovers.offer(this._place);
      watch.changed.connect(this._onChanged, this);
    }
    this._onChanged();
  }

  override dispose(): void {
    if (this.isDisposed) {
      return;
    }
    this._popovers.changed.disconnect(this._onPopover, this);
    this._drop();
    super.dispose();
  }

  render(): React.JSX.Element {
    const situation = this._watch?.situation ?? null;
    const place = this._place;
    return situation === null || place === null ? (
      <></>
    ) : (
      <ChipButton
        trans={this._trans}
        situation={situation}
        expanded={this._popovers.place === place}
        className="jp-StatusBar-GroupItem jp-StatusBar-TextItem"
        onClick={() => this._popovers.toggle(place)}
      />
    );
  }

  private _drop(): void {
    this._offer?.dispose();
    this._watch?.changed.disconnect(this._onChanged, this);
    this._watch?.dispose();
    this._offer = this._watch = this._place = null;
  }

  private readonly _onChanged = (): void => {
    this._activeChanged.emit();
    this.update();
  };

  private readonly _onPopover = (): void => {
    // Mark the item while the popover is open, as JupyterLab marks its own items while
    // their popup is open.
    const open = this._place !== null && this._popovers.place === this._place;
    this.toggleClass('jp-mod-clicked', open);
    this.update();
  };

  private _watch: KernelWatch | null = null;
  private _place: IPlace | null = null;
  private _offer: IDisposable | null = null;
  private readonly _activeChanged = new Signal<this, void>(this);
}
