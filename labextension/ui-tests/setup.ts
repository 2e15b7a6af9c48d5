// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Starts `server.py` for a worker of the test runner, and ends it with the worker. */
import { spawn } from 'child_process';
import * as path from 'path';
import { createInterface } from 'readline';

/** What `server.py` says when it is ready; the tests find it in the environment. */
export interface IStage {
  readonly url: string;
  readonly control: string;
  /** What the server serves. */
  readonly folder: string;
}

/** A developer may set it before the tests start: a server that keeps running. */
export const VARIABLE = 'GPUPOOL_UI_TESTS';

function python(): string {
  return process.env.PYTHON ?? path.resolve(__dirname, '../../.venv/bin/python');
}

/** Start a server with a broker of its own; return what ends it. */
export async function startStage(): Promise<() => Promise<void>> {
  if (process.env[VARIABLE]) {
    return () => Promise.resolve();
  }
  const server = spawn(python(), [path.join(__dirname, 'server.py')], {
    stdio: ['pipe', 'pipe', 'inherit'],
    // Ctrl-C is for us: closing its input is what ends it, so that it has time to.
    detached: true
  });
  const ended = new Promise<number | null>(done => server.on('exit', done));
  const line = await Promise.race([
    new Promise<string>(done => createInterface(server.stdout).once('line', done)),
    ended.then(code => {
      throw new Error(`server.py ended with ${code}`);
    })
  ]);
  process.env[VARIABLE] = line;
  return async () => {
    process.env[VARIABLE] = '';
    server.stdin.end();
    const code = await ended;
    if (code !== 0) {
      throw new Error(`server.py ended with ${code}`);
    }
  };
}
