// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** The chip beside a kernel's name: what its notebook has of the pool, in a few words. */
import { ReactWidget } from '@jupyterlab/ui-components';
import type { Message } from '@lumino/messaging';
import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import { Glyph } from './glyph';
import type { IPlace, IPoolPopovers } from './popovers';
import { staysReason, type ISituation } from './situation';
import type { KernelWatch } from './watch';

export class Chip extends ReactWidget {
  constructor(
    private readonly _watch: KernelWatch,
    private readonly _popovers: IPoolPopovers
  ) {
    super();
    this.addClass('jp-gpupool-Chip');
    this._place = { watch: _watch, button: () => this.node.querySelector('button') };
    this._offer = _popovers.offer(this._place);
    _watch.changed.connect(this._onChanged, this);
    _popovers.changed.connect(this._onPopover, this);
    this.setHidden(_watch.situation === null);
  }

  override dispose(): void {
    if (this.isDisposed) {
      return;
    }
    this._offer.dispose();
    this._popovers.changed.disconnect(this._onPopover, this);
    this._watch.dispose();
    super.dispose();
  }

  render(): React.JSX.Element {
    const it = this._watch.situation;
    const { trans } = this._watch;
    return (
      <>
        {it === null ? null : (
          <ChipButton
            trans={trans}
            situation={it}
            expanded={this._open}
            onClick={() => this._popovers.toggle(this._place)}
          />
        )}
        {/* Apart from the button: it is heard when the state changes, not when seconds pass. */}
        <span role="status" className="jp-gpupool-Chip-heard">
          {it?.news ?? ''}
        </span>
      </>
    );
  }

  protected override onBeforeHide(msg: Message): void {
    this._popovers.close(this._place);
    super.onBeforeHide(msg);
  }

  private readonly _onChanged = (): void => {
    this.setHidden(this._watch.situation === null);
    this.update();
  };

  private readonly _onPopover = (): void => {
    const open = this._popovers.place === this._place;
    if (open !== this._open) {
      this._open = open;
      this.update();
    }
  };

  private readonly _place: IPlace;
  private readonly _offer: { dispose(): void };
  private _open = false;
}

interface IButtonProps {
  readonly trans: TranslationBundle;
  readonly situation: ISituation;
  readonly expanded: boolean;
  readonly onClick: () => void;
  readonly className?: string;
}

/** The button of the chip and of the status bar's item. */
export function ChipButton(props: IButtonProps): React.JSX.Element {
  const { trans, situation, expanded, onClick, className } = props;
  const { said, emulated } = situation;
  const why = situation.kind === 'ours' ? staysReason(situation.session) : '';
  const mark = (text: string) => (emulated ? trans.__('%1 (emulated)', text) : text);
  return (
    <button
      type="button"
      className={`jp-gpupool-chip jp-mod-${said.tone} ${className ?? ''}`}
      title={[trans.__('GPU of this notebook: %1', mark(said.text)), why]
        .filter(Boolean)
        .join('\n')}
      // What is seen comes first: so it is called by who speaks to the computer. But no seconds:
      // a screen reader would say each.
      aria-label={trans.__('%1, GPU of this notebook', mark(said.still))}
      aria-haspopup="dialog"
      aria-expanded={expanded}
      onClick={onClick}
    >
      <Glyph tone={said.tone} filled={situation.filled} />
      <span className="jp-gpupool-Chip-words">{said.text}</span>
    </button>
  );
}
