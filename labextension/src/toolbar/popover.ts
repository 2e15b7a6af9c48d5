// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * A dialog beside its button. The dialog stays inside the window and keeps the focus.
 * Escape or a click outside closes the dialog.
 */
import { ReactWidget } from '@jupyterlab/ui-components';
import type { Message } from '@lumino/messaging';
import { Widget } from '@lumino/widgets';
import type * as React from 'react';

/**
 * Pixels between the dialog and its anchor, and between the dialog and the window's
 * edges.
 */
const GAP = 4;

const FOCUSABLE = 'button, input, [href], [tabindex]:not([tabindex="-1"])';

let ids = 0;

export class Popover extends ReactWidget {
  /**
   * @param anchor Returns the dialog's anchor. The page may render the anchor again at
   *   any time. The dialog closes if the result is null.
   * @param content Renders the dialog's content. Its argument is the id for the element
   *   that labels the dialog.
   */
  constructor(
    private readonly _anchor: () => HTMLElement | null,
    private readonly _content: (labelId: string) => React.JSX.Element
  ) {
    super();
    this.addClass('jp-ThemedContainer');
    this.addClass('jp-gpupool-Popover');
    this._labelId = `jp-gpupool-popover-${++ids}`;
    this.node.setAttribute('role', 'dialog');
    this.node.setAttribute('aria-labelledby', this._labelId);
    this.node.tabIndex = -1;
    this._sizes = new ResizeObserver(() => this.place());
  }

  open(): void {
    Widget.attach(this, document.body);
    this.place();
    // A screen reader reads the label when the dialog gets the focus, so render the
    // label first.
    void this.renderPromise?.then(() => {
      if (!this.isDisposed) {
        this.place();
        this.node.focus({ preventScroll: true });
      }
    });
  }

  /**
   * Close the dialog. Move the focus to the anchor, unless an element outside the
   * dialog has the focus.
   */
  override dispose(): void {
    if (this.isDisposed) {
      return;
    }
    const focused = document.activeElement;
    const lost =
      focused === null || focused === document.body || this.node.contains(focused);
    super.dispose();
    if (lost) {
      this._anchor()?.focus();
    }
  }

  /**
   * Put the dialog below its anchor, or above it if there is more room there. Keep the
   * dialog inside the window.
   */
  place(): void {
    if (!this.isAttached) {
      return;
    }
    const anchor = this._anchor();
    if (anchor === null) {
      this.dispose();
      return;
    }
    const { style } = this.node;
    style.maxHeight = '';
    const at = anchor.getBoundingClientRect();
    const { width, height } = this.node.getBoundingClientRect();
    const page = document.documentElement;
    const below = page.clientHeight - at.bottom - 2 * GAP;
    const above = at.top - 2 * GAP;
    const under = height <= below || below >= above;
    const room = Math.max(0, under ? below : above);
    const shown = Math.min(height, room);
    style.maxHeight = `${room}px`;
    style.top = `${under ? at.bottom + GAP : at.top - GAP - shown}px`;
    const left = Math.min(at.left, page.clientWidth - width - GAP);
    style.left = `${Math.max(GAP, left)}px`;
  }

  handleEvent(event: Event): void {
    switch (event.type) {
      case 'keydown':
        this._onKey(event as KeyboardEvent);
        break;
      case 'pointerdown':
        this._onPointer(event);
        break;
      case 'resize':
        this.place();
        break;
      case 'scroll':
        if (!this._within(event.target)) {
          this.place();
        }
        break;
      default:
        break;
    }
  }

  render(): React.JSX.Element {
    return this._content(this._labelId);
  }

  protected override onAfterAttach(msg: Message): void {
    super.onAfterAttach(msg);
    // `true`: handle these events in the capture phase, before JupyterLab's keyboard
    // shortcuts and before code that stops the propagation of an event.
    document.addEventListener('keydown', this, true);
    document.addEventListener('pointerdown', this, true);
    document.addEventListener('scroll', this, true);
    window.addEventListener('resize', this);
    this._sizes.observe(this.node);
  }

  protected override onBeforeDetach(msg: Message): void {
    this._sizes.disconnect();
    document.removeEventListener('keydown', this, true);
    document.removeEventListener('pointerdown', this, true);
    document.removeEventListener('scroll', this, true);
    window.removeEventListener('resize', this);
    super.onBeforeDetach(msg);
  }

  private _onKey(event: KeyboardEvent): void {
    const inside = this._within(event.target) || event.target === document.body;
    if (
      event.key === 'Escape' &&
      (inside || this._anchor()?.contains(event.target as Node))
    ) {
      event.preventDefault();
      event.stopPropagation();
      this.dispose();
    } else if (event.key === 'Tab' && inside) {
      this._cycle(event);
    }
  }

  /**
   * When the user presses Tab, keep the focus inside the dialog. Otherwise the focus
   * would leave the page, because the dialog is the document's last element.
   */
  private _cycle(event: KeyboardEvent): void {
    const all = [...this.node.querySelectorAll<HTMLElement>(FOCUSABLE)];
    const [first, last] = [all[0], all[all.length - 1]];
    const at = document.activeElement;
    const inside = at !== this.node && this.node.contains(at);
    if (event.shiftKey && (at === first || !inside)) {
      event.preventDefault();
      last?.focus();
    } else if (!event.shiftKey && (at === last || !inside)) {
      event.preventDefault();
      first?.focus();
    }
  }

  private _onPointer(event: Event): void {
    if (this._within(event.target) || this._anchor()?.contains(event.target as Node)) {
      return;
    }
    // Close the dialog only after the click. The click may move the focus to another
    // element, and `dispose` must see that.
    window.setTimeout(() => this.dispose());
  }

  private _within(target: EventTarget | null): boolean {
    return target instanceof Node && this.node.contains(target);
  }

  private readonly _labelId: string;
  private readonly _sizes: ResizeObserver;
}
