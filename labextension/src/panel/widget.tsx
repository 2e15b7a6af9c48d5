// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * The panel in the side bar. It draws, fetches and counts down only while it is
 * visible.
 */
import { Dialog, showDialog } from '@jupyterlab/apputils';
import { ReactWidget } from '@jupyterlab/ui-components';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { IDisposable } from '@lumino/disposable';
import type { Message } from '@lumino/messaging';
import * as React from 'react';

import { logoIcon } from '../icons';
import type { IPoolModel, IPoolSettings } from '../tokens';
import { Arranger } from './arrange';
import type { IDocuments } from './documents';
import { Panel } from './panel';
import { Ticker } from '../ticker';
import type { ILink, IPast, ITools } from './tools';

export const PANEL_ID = 'jp-gpupool-panel';

export class PanelWidget extends ReactWidget {
  constructor(options: {
    readonly model: IPoolModel;
    readonly past: IPast;
    readonly settings: Pick<IPoolSettings, 'keepMinutes' | 'changed'>;
    readonly documents: IDocuments;
    readonly trans: TranslationBundle;
    /** The links in the panel's header to other places of this user interface. */
    readonly links?: () => readonly ILink[];
    /** The widget's id; the default is the id of the panel in the side bar. */
    readonly id?: string;
  }) {
    super();
    const { model, past, settings, documents, trans } = options;
    this._documents = documents;
    this._tools = {
      trans,
      model,
      past,
      settings,
      ticker: this._ticker,
      folded: new Set(),
      open: kernel => documents.open(kernel),
      shutDown: (kernel, name) => shutDown(trans, documents, kernel, name),
      links: options.links ?? (() => [])
    };
    this.id = options.id ?? PANEL_ID;
    this.addClass('jp-gpupool-panel');
    this.title.icon = logoIcon;
    this.title.caption = trans.__('GPU Pool');
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', trans.__('GPU Pool'));
    // The panel gets the focus when it is shown, so its element must accept the focus.
    this.node.tabIndex = -1;
    model.changed.connect(this._onChanged);
    documents.changed.connect(this._onChanged);
  }

  override dispose(): void {
    if (this.isDisposed) {
      return;
    }
    this._tools.model.changed.disconnect(this._onChanged);
    this._documents.changed.disconnect(this._onChanged);
    this._seen(false);
    super.dispose();
  }

  protected override render(): React.ReactElement {
    const { view, broker, live, found } = this._tools.model;
    const arranged =
      view &&
      this._arranger.arrange(
        view,
        kernel => this._documents.name(kernel),
        this._documents.active,
        live
      );
    return (
      <Panel
        tools={this._tools}
        view={view}
        broker={broker}
        live={live}
        found={found}
        arranged={arranged}
      />
    );
  }

  protected override onUpdateRequest(msg: Message): void {
    if (this.isVisible) {
      super.onUpdateRequest(msg);
    }
  }

  protected override onAfterAttach(msg: Message): void {
    super.onAfterAttach(msg);
    this._seen(this.isVisible);
  }

  protected override onBeforeDetach(msg: Message): void {
    this._seen(false);
    super.onBeforeDetach(msg);
  }

  protected override onAfterShow(): void {
    this._seen(true);
    this.update();
  }

  protected override onBeforeHide(): void {
    this._seen(false);
  }

  protected override onActivateRequest(): void {
    this.node.focus();
  }

  private _seen(seen: boolean): void {
    this._ticker.shown = seen;
    if (seen) {
      this._held ??= this._tools.past.hold();
      this._look();
    } else {
      this._held?.dispose();
      this._held = null;
    }
  }

  /**
   * If no kernel runs, fetch the view once. The page has no websocket then, so without
   * this request the panel could be empty or show an old view.
   */
  private _look(): void {
    if (!this._tools.model.live) {
      void this._tools.model.refresh();
    }
  }

  private readonly _onChanged = (): void => {
    if (this.isVisible) {
      this.update();
    }
  };

  private readonly _tools: ITools;
  private readonly _documents: IDocuments;
  private readonly _ticker = new Ticker();
  private readonly _arranger = new Arranger();
  private _held: IDisposable | null = null;
}

/**
 * Ask the user, and then end a kernel. `note` is the text for the line below the
 * kernel's buttons.
 */
async function shutDown(
  trans: TranslationBundle,
  documents: IDocuments,
  kernelId: string,
  name: string
): Promise<{ note: string }> {
  const { button } = await showDialog({
    title: trans.__('Shut down the kernel of %1?', name),
    body: trans.__('The kernel’s variables are lost, but its files are kept.'),
    buttons: [
      Dialog.cancelButton({ label: trans.__('Cancel') }),
      Dialog.warnButton({ label: trans.__('Shut it down') })
    ]
  });
  if (!button.accept) {
    return { note: trans.__('The kernel keeps running.') };
  }
  await documents.shutDown(kernelId);
  return { note: trans.__('The kernel has ended.') };
}
