// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.
const tests = require('./playwright.config.js');

process.env.GPUPOOL_UI_DEVICE = '24GiB'; // for server.py
process.env.GPUPOOL_UI_TURNS = 'no';

/** `jlpm screenshots`: the pictures of the documentation, from the real thing. */
module.exports = {
  ...tests,
  testDir: './screenshots',
  use: { ...tests.use, trace: 'off', deviceScaleFactor: 2 }
};
