// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.
const base = require('@jupyterlab/galata/lib/playwright-config');

module.exports = {
  ...base,
  testDir: './tests',
  outputDir: './results/failures',
  // Each has a server and a broker of its own, if nobody keeps one (setup.ts). The tests wait more
  // than they compute: three use what one leaves idle.
  workers: process.env.GPUPOOL_UI_TESTS ? 1 : 3,
  fullyParallel: false,
  retries: 0,
  // Only for a hang: with all of `make test` beside it, a test of 13 s has taken two minutes.
  timeout: 300_000,
  globalTimeout: 900_000,
  expect: { timeout: 30_000 },
  reporter: [['list']],
  use: {
    ...base.use,
    viewport: { width: 1280, height: 800 },
    video: 'off',
    // Pictures of each action would be half of the time; a failed test attaches its last one.
    trace: { mode: 'retain-on-failure', screenshots: false, snapshots: false },
    launchOptions: {
      executablePath: process.env.CHROMIUM || '/usr/bin/chromium',
      args: [
        ...(process.getuid() === 0 ? ['--no-sandbox'] : []),
        '--disable-gpu',
        '--disable-quic',
        '--no-first-run',
        '--disable-background-networking',
        '--disable-component-update',
        '--disable-sync'
      ]
    }
  }
};
