// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Starts `server.py` for a worker of the test runner, and ends it with the worker. */
import { spawn } from 'child_process';
import * as path from 'path';
import { createInterface } from 'readline';

/**
 * What `server.py` prints when it is ready. The tests read this text from the
 * environment variable `VARIABLE`.
 */
export interface IStage {
  readonly url: string;
  readonly control: string;
  /** The folder that the server serves. */
  readonly folder: string;
}

/**
 * The name of the environment variable for the text that `server.py` prints. A
 * developer sets the variable to test against a server that already runs.
 */
export const VARIABLE = 'GPUPOOL_UI_TESTS';

function python(): string {
  return process.env.PYTHON ?? path.resolve(__dirname, '../../.venv/bin/python');
}

/**
 * Start a server with its own broker, unless `VARIABLE` is set. Resolves to the
 * function that ends the server.
 */
export async function startStage(): Promise<() => Promise<void>> {
  if (process.env[VARIABLE]) {
    return () => Promise.resolve();
  }
  const server = spawn(python(), [path.join(__dirname, 'server.py')], {
    stdio: ['pipe', 'pipe', 'inherit'],
    // Ctrl-C reaches only this process, and not the server. This process then closes
    // the server's input. The server cleans up and ends.
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
