// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Follows the state of one document's kernel in the pool. */
import type { ISessionContext } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { IDisposable } from '@lumino/disposable';
import { Signal, type ISignal } from '@lumino/signaling';

import type { IPoolModel } from '../tokens';
import { situation, whatOf, type ISituation } from './situation';
import { ticker, type Ticker } from '../ticker';

/** The parts of a session context that a watch uses. */
export type Followed = Pick<
  ISessionContext,
  | 'session'
  | 'type'
  | 'kernelChanged'
  | 'statusChanged'
  | 'propertyChanged'
  | 'disposed'
>;

/**
 * Watches the kernel of a notebook or console. It emits `changed` when the situation
 * that the page shows for the kernel changes.
 *
 * `situation` is null while the notebook has no kernel of the pool.
 */
export class KernelWatch implements IDisposable {
  constructor(
    readonly model: IPoolModel,
    readonly context: Followed,
    readonly trans: TranslationBundle,
    private readonly _ticker: Ticker = ticker
  ) {
    model.changed.connect(this.refresh, this);
    context.kernelChanged.connect(this.refresh, this);
    context.statusChanged.connect(this.refresh, this);
    context.propertyChanged.connect(this.refresh, this);
    context.disposed.connect(() => this.dispose(), this);
    this.refresh();
  }

  get situation(): ISituation | null {
    return this._situation;
  }

  /** The word for the document that uses the kernel, such as `notebook`. */
  get what(): string {
    return whatOf(this.trans, this.context.type);
  }

  /** The pooled kernel, or null. */
  get kernelId(): string | null {
    return this._kernelId;
  }

  get changed(): ISignal<this, void> {
    return this._changed;
  }

  get isDisposed(): boolean {
    return this._isDisposed;
  }

  dispose(): void {
    if (this._isDisposed) {
      return;
    }
    this._isDisposed = true;
    this._ticks?.dispose();
    this._kernelId = null;
    this._situation = null;
    this._changed.emit();
    Signal.clearData(this);
  }

  /** Read the situation again. */
  readonly refresh = (): void => {
    if (this._isDisposed) {
      return;
    }
    const kernel = this.context.session?.kernel;
    const pooled = kernel && !kernel.isDisposed && this.model.isPooled(kernel.name);
    const id = pooled ? kernel.id : null;
    const now = id === null ? null : situation(this.trans, this.model, id, this.what);
    const same = id === this._kernelId && alike(now, this._situation);
    this._count(now?.said.counts ?? false);
    if (!same) {
      this._kernelId = id;
      this._situation = now;
      this._changed.emit();
    }
  };

  private _count(counts: boolean): void {
    if (!counts) {
      this._ticks?.dispose();
      this._ticks = null;
    } else {
      this._ticks ??= this._ticker.add(this.refresh);
    }
  }

  private _situation: ISituation | null = null;
  private _kernelId: string | null = null;
  private _ticks: IDisposable | null = null;
  private _isDisposed = false;
  private readonly _changed = new Signal<this, void>(this);
}

/**
 * Whether two situations look the same. Most changes of the pool concern other kernels:
 * after such a change, nothing needs to be drawn.
 */
function alike(one: ISituation | null, other: ISituation | null): boolean {
  if (one === null || other === null) {
    return one === other;
  }
  return (
    one.kind === other.kind &&
    one.said.text === other.said.text &&
    one.headline === other.headline &&
    one.session === other.session &&
    one.emulated === other.emulated &&
    one.nearlyFull === other.nearlyFull &&
    one.broker.message === other.broker.message &&
    one.view?.limits === other.view?.limits &&
    one.view?.problem === other.view?.problem &&
    one.view?.queue_length === other.view?.queue_length
  );
}
