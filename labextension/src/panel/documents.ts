// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Which document uses which kernel, and how to open it. */
import type { JupyterFrontEnd } from '@jupyterlab/application';
import { PathExt } from '@jupyterlab/coreutils';
import type { Session } from '@jupyterlab/services';
import type { ISignal } from '@lumino/signaling';
import { Signal } from '@lumino/signaling';
import type { Widget } from '@lumino/widgets';

import type { IName } from './arrange';

export interface IDocuments {
  name(kernelId: string): IName | null;
  /** The kernel of the document in front; null if there is none. */
  readonly active: string | null;
  open(kernelId: string): void;
  /** End a kernel of this server; its document may stay open. */
  shutDown(kernelId: string): Promise<void>;
  readonly changed: ISignal<unknown, unknown>;
}

/**
 * Maps the type of a session to the command that opens the session's document. A
 * console needs its own command, because it is not a file.
 */
const OPENERS: ReadonlyMap<string, string> = new Map([
  ['notebook', 'docmanager:open'],
  ['file', 'docmanager:open'],
  ['console', 'console:open']
]);

/** The members by which a notebook, a console or another document gives its kernel. */
interface IHasKernel {
  readonly sessionContext?: {
    readonly session?: { readonly kernel?: { readonly id: string } | null } | null;
  };
  readonly context?: IHasKernel;
}

/** A signal that only some shells have. */
interface ITellsLayout {
  readonly layoutModified?: ISignal<unknown, unknown>;
}

export class Documents implements IDocuments {
  constructor(private readonly _app: JupyterFrontEnd) {
    const { sessions } = _app.serviceManager;
    sessions.runningChanged.connect(() => this._changed.emit());
    // Not every shell knows which widget is in front.
    _app.shell.currentChanged?.connect(() => this._changed.emit());
    // `currentChanged` does not report that a document behind others is closed.
    // JupyterLab's shell reports it by `layoutModified`, but emits this signal at each
    // resize, too. So check whether the open documents have changed.
    const shell: JupyterFrontEnd.IShell & ITellsLayout = _app.shell;
    let open = this._open();
    shell.layoutModified?.connect(() => {
      const before = open;
      open = this._open();
      if (open !== before) {
        this._changed.emit();
      }
    });
  }

  get changed(): ISignal<Documents, void> {
    return this._changed;
  }

  name(kernelId: string): IName | null {
    const session = this._session(kernelId);
    return (
      session && {
        name: session.name || PathExt.basename(session.path),
        path: this._widget(kernelId) || this._opener(session) ? session.path : '',
        closed: this._widget(kernelId) === null
      }
    );
  }

  get active(): string | null {
    return kernelOf(this._app.shell.currentWidget);
  }

  open(kernelId: string): void {
    const { shell, commands } = this._app;
    const widget = this._widget(kernelId);
    if (widget) {
      shell.activateById(widget.id);
      return;
    }
    const session = this._session(kernelId);
    const opener = session && this._opener(session);
    if (opener) {
      void commands.execute(opener, { path: session.path });
    }
  }

  async shutDown(kernelId: string): Promise<void> {
    const { sessions, kernels } = this._app.serviceManager;
    const session = this._session(kernelId);
    await (session ? sessions.shutdown(session.id) : kernels.shutdown(kernelId));
  }

  private _session(kernelId: string): Session.IModel | null {
    for (const session of this._app.serviceManager.sessions.running()) {
      if (session.kernel?.id === kernelId) {
        return session;
      }
    }
    return null;
  }

  /** The kernels of all open documents, as one text. */
  private _open(): string {
    return [...this._app.shell.widgets('main')].map(kernelOf).join();
  }

  /** The widget that shows the document of a kernel. */
  private _widget(kernelId: string): Widget | null {
    for (const widget of this._app.shell.widgets('main')) {
      if (kernelOf(widget) === kernelId) {
        return widget;
      }
    }
    return null;
  }

  /** The command that opens the session's document; empty if there is none. */
  private _opener(session: Session.IModel): string {
    const command = OPENERS.get(session.type) ?? '';
    return this._app.commands.hasCommand(command) ? command : '';
  }

  private readonly _changed = new Signal<Documents, void>(this);
}

function kernelOf(widget: Widget | null): string | null {
  const has: (Widget & IHasKernel) | null = widget;
  const context = has?.sessionContext ?? has?.context?.sessionContext;
  return context?.session?.kernel?.id ?? null;
}
