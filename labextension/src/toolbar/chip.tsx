// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** The chip beside a kernel's name: the slice of its notebook in a few words. */
import { ReactWidget } from '@jupyterlab/ui-components';
import type { Message } from '@lumino/messaging';
import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import { attachNow } from '../attach';
import { tell } from '../tell';
import { goesBack, goingBack } from '../words';
import { Glyph, GlyphOfGet } from './glyph';
import type { IPlace, IPoolPopovers } from './popovers';
import { preemptedReason, staysReason, type ISituation } from './situation';
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
        {it?.kind === 'ours' && it.session?.state === 'detached' ? (
          <button
            type="button"
            className="jp-gpupool-get"
            title={trans.__('Get a GPU now')}
            aria-label={trans.__('Get a GPU now')}
            onClick={this._get}
          >
            <GlyphOfGet />
          </button>
        ) : null}
        {/* This element is outside the button, so that screen readers announce it only
            when the state changes, and not each second. */}
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

  protected override onAfterShow(msg: Message): void {
    super.onAfterShow(msg);
    this._reach();
  }

  /**
   * Put the chip into the tab order. A hidden toolbar takes all items out of the tab
   * order, and checks the items again only when an item is added. So the chip asks for
   * a check when the chip becomes visible.
   */
  private _reach(): void {
    const toolbar = this.node.closest<ICounts>('jp-toolbar');
    const button = this.node.querySelector('button');
    if (toolbar?.reduceFocusableElements) {
      toolbar.reduceFocusableElements();
    } else if (toolbar && button) {
      button.tabIndex = 0; // one more tab stop, so that keys reach the chip
    }
  }

  private readonly _get = (): void => {
    const { trans, context, kernelId } = this._watch;
    const kernel = context.session?.kernel;
    if (kernel && kernelId !== null) {
      void tell(trans, kernelId, attachNow(trans, kernel));
    }
  };

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

/** The part of `jp-toolbar` that sets the tab order. */
interface ICounts extends HTMLElement {
  reduceFocusableElements?(): void;
}

interface IButtonProps {
  readonly trans: TranslationBundle;
  readonly situation: ISituation;
  readonly expanded: boolean;
  readonly onClick: () => void;
  readonly className?: string;
}

/** The button that the chip and the status bar's item use. */
export function ChipButton(props: IButtonProps): React.JSX.Element {
  const { trans, situation, expanded, onClick, className } = props;
  const { said, emulated, what } = situation;
  const session = situation.kind === 'ours' ? situation.session : null;
  const back = goesBack(session) ? goingBack(trans, session) : '';
  const full = situation.nearlyFull
    ? trans.__(
        'The slice is nearly full: ask for more memory, or free some in the kernel.'
      )
    : '';
  const mark = (text: string) => (emulated ? trans.__('%1 (emulated)', text) : text);
  return (
    <button
      type="button"
      className={`jp-gpupool-chip jp-mod-${said.tone} ${full && 'jp-mod-full'} ${className ?? ''}`}
      title={[
        trans.__('GPU of this %1: %2', what, mark(said.text)),
        preemptedReason(session),
        staysReason(session),
        back,
        full,
        ...(session?.standing ?? [])
      ]
        .filter(Boolean)
        .join('\n')}
      // The label begins with the visible text, because users of voice control speak
      // that text. The label has no seconds, because a screen reader would announce
      // each change.
      aria-label={[trans.__('%1, GPU of this %2', mark(said.still), what), back]
        .filter(Boolean)
        .join('. ')}
      aria-haspopup="dialog"
      aria-expanded={expanded}
      onClick={onClick}
    >
      <Glyph tone={said.tone} filled={situation.filled} />
      {/* If the toolbar has no room for the long text, the stylesheet shows a short one
          from these attributes. An attribute does not count as text of the button. */}
      <span className="jp-gpupool-Chip-words">
        <span
          className="jp-gpupool-Chip-short"
          data-short={said.short}
          data-least={said.least}
          aria-hidden="true"
        />
        <span className="jp-gpupool-Chip-long">{said.text}</span>
      </span>
      {emulated && situation.kind === 'ours' ? (
        <span
          className="jp-gpupool-Chip-badge"
          data-text={trans.__('EMULATED')}
          aria-hidden="true"
        />
      ) : null}
    </button>
  );
}
