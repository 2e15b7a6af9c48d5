// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * The plugins, one for each place in the user interface, with the services that they use.
 *
 * The settings' plugin and the model's plugin come first. The others follow in the
 * order of the folders.
 */
import type { JupyterFrontEndPlugin } from '@jupyterlab/application';

// The settings' schema names the logo, so import the module that makes and registers
// it.
import './icons';
import { modelPlugin } from './model';
import { panelPlugin } from './panel';
import { adminPlugin } from './admin';
import { settingsPlugin } from './settings';
import { commandsPlugin } from './commands';
import { elsewherePlugin } from './elsewhere/plugin';
import { launcherPlugin } from './launcher';
import { notifyPlugin } from './notify';
import { runningPlugin } from './running';
import { statusbarPlugin } from './statusbar/plugin';
import { popoverPlugin, toolbarPlugin } from './toolbar/plugin';
import { waitsPlugin } from './waits/plugin';

const plugins: JupyterFrontEndPlugin<unknown>[] = [
  settingsPlugin,
  modelPlugin,
  panelPlugin,
  adminPlugin,
  popoverPlugin,
  toolbarPlugin,
  statusbarPlugin,
  commandsPlugin,
  elsewherePlugin,
  launcherPlugin,
  notifyPlugin,
  runningPlugin,
  waitsPlugin
];

export default plugins;
