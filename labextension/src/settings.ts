// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * The settings of this user interface, with types; the defaults are those of the
 * schema.
 */
import type { JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import type { ISignal } from '@lumino/signaling';
import { Signal } from '@lumino/signaling';

import schema from '../schema/plugin.json';
import { IPoolSettings } from './tokens';

const ID = '@jupyter-gpupool/labextension:plugin';

const DEFAULTS = {
  idleWarning: schema.properties.idleWarning.default,
  statusBar: schema.properties.statusBar.default,
  keepMinutes: schema.properties.keepMinutes.default
};

export class PoolSettings implements IPoolSettings {
  /** Take the values from the user's settings, now and after each change of them. */
  follow(settings: ISettingRegistry.ISettings): void {
    const update = () => {
      this._values = { ...DEFAULTS, ...settings.composite };
      this._changed.emit();
    };
    settings.changed.connect(update);
    update();
  }

  get idleWarning(): boolean {
    return this._values.idleWarning;
  }

  get statusBar(): boolean {
    return this._values.statusBar;
  }

  get keepMinutes(): number {
    // The server counts whole minutes. So round the value here: the page then shows the
    // same number that it sends.
    return Math.max(1, Math.round(this._values.keepMinutes));
  }

  get changed(): ISignal<IPoolSettings, void> {
    return this._changed;
  }

  private readonly _changed = new Signal<IPoolSettings, void>(this);
  private _values = DEFAULTS;
}

export const settingsPlugin: JupyterFrontEndPlugin<IPoolSettings> = {
  id: ID,
  description: 'The settings of the GPU pool’s user interface.',
  autoStart: true,
  optional: [ISettingRegistry],
  provides: IPoolSettings,
  activate: (_, registry: ISettingRegistry | null): IPoolSettings => {
    const settings = new PoolSettings();
    if (registry) {
      // The defaults apply until the settings are loaded. They remain if loading fails.
      registry.load(ID).then(
        loaded => settings.follow(loaded),
        (error: unknown) => console.error('GPU pool: no settings', error)
      );
    }
    return settings;
  }
};
