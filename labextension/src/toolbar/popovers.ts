// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** The only popover of a page, and the places where it can open. */
import type { CommandRegistry } from '@lumino/commands';
import { Token } from '@lumino/coreutils';
import { DisposableDelegate, type IDisposable } from '@lumino/disposable';
import { Signal, type ISignal } from '@lumino/signaling';
import * as React from 'react';

import type { IPoolSettings } from '../tokens';
import { Card } from './card';
import { Popover } from './popover';
import type { Followed, KernelWatch } from './watch';

const SHOW_PANEL = 'gpupool:show-panel';
const KEEP_MINUTES = 10;

/** A place beside which the popover can open. */
export interface IPlace {
  readonly watch: KernelWatch;
  /** The button that opens the popover; null while the button is not drawn. */
  readonly button: () => HTMLElement | null;
}

export interface IPoolPopovers {
  /** The place where the popover is open, or null. */
  readonly place: IPlace | null;
  readonly changed: ISignal<IPoolPopovers, void>;
  /** Open the popover at a place, or close it if it is open there. */
  toggle(place: IPlace): void;
  /** Close the popover; with `place`, only if it is open there. */
  close(place?: IPlace): void;
  /** Let {@link openFor} choose this place, until the returned object is disposed. */
  offer(place: IPlace): IDisposable;
  /**
   * Open the popover at the first visible place of a notebook. Return false if the
   * notebook has no visible place.
   */
  openFor(context: Followed): boolean;
}

export const IPoolPopovers = new Token<IPoolPopovers>(
  '@jupyter-gpupool/labextension:IPoolPopovers',
  'The popover of what can be done for a notebook’s GPU.'
);

export class PoolPopovers implements IPoolPopovers {
  constructor(
    private readonly _commands: CommandRegistry,
    private readonly _settings: IPoolSettings | null
  ) {}

  get place(): IPlace | null {
    return this._place;
  }

  get changed(): ISignal<IPoolPopovers, void> {
    return this._changed;
  }

  toggle(place: IPlace): void {
    const here = this._place === place;
    this.close();
    if (!here) {
      this._open(place);
    }
  }

  close(place: IPlace | null = this._place): void {
    if (place === this._place) {
      this._popover?.dispose();
    }
  }

  offer(place: IPlace): IDisposable {
    this._offers.push(place);
    return new DisposableDelegate(() => {
      this._offers = this._offers.filter(offer => offer !== place);
      this.close(place);
    });
  }

  openFor(context: Followed): boolean {
    const place = this._offers.find(
      offer => offer.watch.context === context && seen(offer.button())
    );
    if (!place) {
      return false;
    }
    if (this._place !== place) {
      this.toggle(place);
    }
    return true;
  }

  private _open(place: IPlace): void {
    const { watch, button } = place;
    const close = () => popover.dispose();
    const onShowPool = this._commands.hasCommand(SHOW_PANEL)
      ? () => {
          close();
          void this._commands.execute(SHOW_PANEL);
        }
      : null;
    const popover = new Popover(
      () => {
        const found = button();
        return seen(found) ? found : null;
      },
      labelId =>
        React.createElement(Card, {
          watch,
          labelId,
          keepMinutes: this._settings?.keepMinutes ?? KEEP_MINUTES,
          onClose: close,
          onShowPool
        })
    );
    const onChanged = () => {
      if (watch.situation === null) {
        close();
      }
    };
    watch.changed.connect(onChanged);
    popover.disposed.connect(() => {
      watch.changed.disconnect(onChanged);
      this._popover = null;
      this._place = null;
      this._changed.emit();
    });
    this._popover = popover;
    this._place = place;
    this._changed.emit();
    popover.open();
  }

  private _popover: Popover | null = null;
  private _place: IPlace | null = null;
  private _offers: IPlace[] = [];
  private readonly _changed = new Signal<IPoolPopovers, void>(this);
}

/** Whether an element is drawn; false in a hidden tab or a closed menu. */
function seen(element: HTMLElement | null): element is HTMLElement {
  return element !== null && element.getClientRects().length > 0;
}
