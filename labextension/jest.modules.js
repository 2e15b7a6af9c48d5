// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

// Turns the ES modules of packages into CommonJS, with the compiler that builds the
// extension. That compiler is several times faster than TypeScript's. Most of what the
// tests load is in these packages.
const { createHash } = require('crypto');
const { readFileSync } = require('fs');
const { experiments, rspackVersion } = require('@rspack/core');

const own = readFileSync(__filename);

module.exports = {
  getCacheKey: (text, filename) =>
    createHash('sha1')
      .update([own, rspackVersion, filename, text].join('\0'))
      .digest('hex'),
  process: (text, filename) =>
    experiments.swc.transformSync(text, {
      filename,
      configFile: false,
      swcrc: false,
      module: { type: 'commonjs' },
      jsc: { target: 'es2022' }
    })
};
