// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.
const tests = require('./playwright.config.js');

process.env.GPUPOOL_UI_DEVICE = '24GiB'; // server.py reads these variables
process.env.GPUPOOL_UI_TURNS = 'no';

/** `jlpm screenshots`: takes the documentation's pictures from a real JupyterLab. */
module.exports = {
  ...tests,
  testDir: './screenshots',
  use: { ...tests.use, trace: 'off', deviceScaleFactor: 2 }
};
