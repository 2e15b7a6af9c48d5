// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.
const base = require('@jupyterlab/galata/lib/playwright-config');

module.exports = {
  ...base,
  testDir: './tests',
  outputDir: './results/failures',
  // Each worker has its own server and broker, unless the developer keeps a server
  // running (setup.ts). The tests wait more than they compute, so three workers use the
  // processor better than one.
  workers: process.env.GPUPOOL_UI_TESTS ? 1 : 3,
  fullyParallel: false,
  retries: 0,
  // This time-out only has to end a hang. During `make test`, a test of 13 s has taken
  // two minutes.
  timeout: 300_000,
  globalTimeout: 900_000,
  // On a busy machine, a kernel may need more than 30 s to start.
  expect: { timeout: 90_000 },
  reporter: [['list']],
  use: {
    ...base.use,
    viewport: { width: 1280, height: 800 },
    video: 'off',
    // Pictures of each action would take half of the time. A failed test attaches a
    // picture of its end.
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
