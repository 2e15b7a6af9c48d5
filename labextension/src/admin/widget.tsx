// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** The admin's page in the main area: sends requests and draws only while visible. */
import { ReactWidget } from '@jupyterlab/ui-components';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { Message } from '@lumino/messaging';
import { Poll } from '@lumino/polling';
import * as React from 'react';

import type { IAdmin } from '../api';
import { logoIcon } from '../icons';
import { refusal } from '../tell';
import type { IPoolModel } from '../tokens';
import { Orders } from './orders';
import { AdminPage } from './table';

export const ADMIN_ID = 'jp-gpupool-admin';

/** Milliseconds between two requests. */
export const INTERVAL = 2000;

export class AdminWidget extends ReactWidget {
  constructor(
    private readonly _model: IPoolModel,
    private readonly _trans: TranslationBundle
  ) {
    super();
    this.id = ADMIN_ID;
    this.addClass('jp-gpupool-admin');
    this.title.icon = logoIcon;
    this.title.label = _trans.__('GPU Pool: all sessions');
    this.title.closable = true;
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', this.title.label);
    this.node.tabIndex = -1;
    this._orders = new Orders(_model.client, _trans);
    this._poll = new Poll({
      auto: false,
      name: '@jupyter-gpupool/labextension:AdminWidget',
      factory: () => this._ask(),
      frequency: { interval: INTERVAL, backoff: true, max: 30_000 },
      standby: () => !this.isVisible || document.visibilityState === 'hidden'
    });
  }

  override dispose(): void {
    this._poll.dispose();
    super.dispose();
  }

  protected override render(): React.ReactElement {
    return (
      <AdminPage
        trans={this._trans}
        orders={this._orders}
        view={this._view}
        fault={this._fault}
        model={{ now: () => this._now() }}
        refresh={this._refresh}
      />
    );
  }

  protected override onAfterAttach(msg: Message): void {
    super.onAfterAttach(msg);
    void this._poll.start();
  }

  protected override onAfterShow(): void {
    this._refresh();
  }

  protected override onActivateRequest(): void {
    this.node.focus();
  }

  private readonly _refresh = (): void => {
    if (!this.isDisposed) {
      void this._poll.refresh();
    }
  };

  private async _ask(): Promise<void> {
    let fault = '';
    try {
      this._view = await this._model.client.admin();
      this._received = performance.now();
    } catch (error) {
      fault = refusal(this._trans, error);
    }
    this._fault = fault;
    if (!this.isDisposed) {
      this.update();
    }
  }

  /** The time on the broker's clock. */
  private _now(): number {
    return (this._view?.now ?? 0) + (performance.now() - this._received) / 1000;
  }

  private readonly _orders: Orders;
  private readonly _poll: Poll<void>;
  private _view: IAdmin | null = null;
  private _received = 0;
  private _fault = '';
}
