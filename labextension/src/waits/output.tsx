// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * The line of a waiting cell, with buttons: JupyterLab's renderer for the agent's
 * output type.
 */
import type { IRenderMime } from '@jupyterlab/rendermime';
import type { TranslationBundle } from '@jupyterlab/translation';
import { ReactWidget } from '@jupyterlab/ui-components';
import * as React from 'react';

import type { ISession } from '../api';
import { isMine, type IPoolModel } from '../tokens';
import { ticker, useTick } from '../ticker';
import { waitTime } from '../words';
import { Offered } from './offered';

/**
 * The MIME type of the agent's line. Other front ends show the HTML or the text of the
 * same output.
 */
export const WAIT_TYPE = 'application/vnd.gpupool.wait+json';

interface IWait {
  /** The session's id in the pool. */
  readonly session: string;
  readonly text: string;
  /**
   * The part of `text` about the time of the wait; empty if `text` does not give the
   * time.
   */
  readonly time: string;
  readonly hint: string;
}

export class WaitOutput extends ReactWidget implements IRenderMime.IRenderer {
  constructor(
    private readonly _model: IPoolModel,
    private readonly _trans: TranslationBundle
  ) {
    super();
    this.addClass('jp-gpupool-Wait');
  }

  renderModel(mime: IRenderMime.IMimeModel): Promise<void> {
    const { session, text, time, hint } = (mime.data[WAIT_TYPE] ??
      {}) as Partial<IWait>;
    this._wait = {
      session: session ?? '',
      text: text ?? '',
      time: time ?? '',
      hint: hint ?? ''
    };
    this.update();
    return this.renderPromise ?? Promise.resolve();
  }

  render(): React.JSX.Element | null {
    return (
      this._wait && <Wait model={this._model} trans={this._trans} wait={this._wait} />
    );
  }

  override dispose(): void {
    if (this.isDisposed) {
      return;
    }
    // The wait is over, so its buttons disappear. If a button had the focus, the
    // notebook gets the focus.
    const focused = this.node.contains(document.activeElement);
    const notebook = this.node.closest<HTMLElement>('.jp-Notebook');
    super.dispose();
    if (focused) {
      notebook?.focus();
    }
  }

  private _wait: IWait | null = null;
}

function Wait(props: {
  readonly model: IPoolModel;
  readonly trans: TranslationBundle;
  readonly wait: IWait;
}): React.JSX.Element {
  const { model, trans, wait } = props;
  const session = useSession(model, wait.session);
  const queued = session?.state === 'queued';
  useTick(ticker, queued);
  // Replace the time in the agent's text, so that the cell, the chip and the panel show
  // the same time.
  const text =
    queued && wait.time
      ? wait.text.replace(wait.time, () => waitTime(trans, session, model.now()))
      : wait.text;
  return (
    <>
      <p>{text}</p>
      <p className="jp-gpupool-Popover-note">{wait.hint}</p>
      {queued ? <Offered model={model} trans={trans} session={session} /> : null}
    </>
  );
}

/**
 * Return the session `id` if it belongs to this user, else null. Each change of the
 * pool's sessions renders the component again.
 */
function useSession(model: IPoolModel, id: string): ISession | null {
  const subscribe = React.useCallback(
    (update: () => void) => {
      model.changed.connect(update);
      return () => model.changed.disconnect(update);
    },
    [model]
  );
  const sessions = React.useSyncExternalStore(subscribe, () => model.view?.sessions);
  const found = sessions?.find(session => session.id === id);
  return found && isMine(found) ? found : null;
}

/** The factory for JupyterLab's registry of output types. */
export function waitFactory(
  model: IPoolModel,
  trans: TranslationBundle
): IRenderMime.IRendererFactory {
  return {
    safe: true,
    mimeTypes: [WAIT_TYPE],
    // JupyterLab shows the type with the lowest rank. The output also has HTML for
    // other front ends, so this rank must be below that of HTML.
    defaultRank: 10,
    createRenderer: () => new WaitOutput(model, trans)
  };
}
