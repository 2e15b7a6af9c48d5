// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * All plugins of this extension: those for the places in the user interface, and those
 * for the services that other plugins use.
 *
 * The list begins with two services: the settings and the model.
 */
import type { JupyterFrontEndPlugin } from '@jupyterlab/application';

// The settings' schema refers to the logo by its name. This module makes and registers
// the logo.
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
