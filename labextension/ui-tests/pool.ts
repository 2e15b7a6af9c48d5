// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * What the tests do with the pool: commands for the broker, neighbours (other kernels
 * of the pool), and code that uses a GPU.
 */
import { existsSync, rmSync, writeFileSync } from 'fs';
import { createConnection } from 'net';
import * as path from 'path';

import { type IStage, VARIABLE } from './setup';

export const KERNEL = 'gpupool-python3';
export const GiB = 2 ** 30;

export function stage(): IStage {
  return JSON.parse(process.env[VARIABLE] ?? '{}') as IStage;
}

/** Let `server.py` run one of its commands; resolves to the result. */
export function ask<T = void>(what: string, fields: object = {}): Promise<T> {
  return new Promise((done, fail) => {
    const socket = createConnection(stage().control);
    let text = '';
    socket.on('error', fail);
    socket.on('data', data => (text += data.toString()));
    socket.on('end', () => {
      const answer = JSON.parse(text) as { ok?: T; error?: string };
      if (answer.error === undefined) {
        done(answer.ok as T);
      } else {
        fail(new Error(`${what}: ${answer.error}`));
      }
    });
    socket.write(JSON.stringify({ do: what, ...fields }) + '\n');
  });
}

export interface ISessionStatus {
  readonly id: string;
  readonly state: string;
  readonly kernel_id: string;
  readonly label: string;
  readonly device: string | null;
  readonly keep_until: number | null;
  readonly recall_at: number | null;
  readonly priority: string;
  readonly request: { readonly memory: number };
  readonly queue_position: number | null;
  readonly queued_at: number | null;
}

/**
 * Return a kernel's session from the broker's own status. The page may show an older
 * state.
 */
export async function session(kernelId: string): Promise<ISessionStatus | undefined> {
  const status = await ask<{ sessions: ISessionStatus[] }>('status');
  return status.sessions.find(found => found.kernel_id === kernelId);
}

/** Options of the broker, with their names in `c.GPUPool`. */
export type Options = Readonly<Record<string, unknown>>;

/**
 * Options for tests in which other kernels wait while a cell works. By default, a
 * kernel counts as idle after a second without a CUDA call. On a busy machine, the
 * cell's process may get no CPU time for a second.
 */
export const STAYS_BUSY = { quiet_after: 10 };

/**
 * Start a neighbour, which gets a slice of `gib` GiB and computes until the command
 * `rests`. With `hold: false`, the neighbour gets no slice before the command `asks`.
 */
export function neighbour(
  name: string,
  fields: {
    gib?: number;
    hold?: boolean;
    alloc?: number;
    priority?: string;
    devices?: number;
    /** The neighbour's user id. By default, all neighbours have the same user id. */
    user?: number;
  } = {}
): Promise<string> {
  return ask('neighbour', { name, ...fields });
}

/** Code that allocates `mib` MiB on the device. */
export function uses(mib: number): string {
  return `
from cuda.core import Device
device = Device(); device.set_current(); stream = device.create_stream()
buffer = device.allocate(${mib} << 20, stream=stream); stream.sync()
`;
}

/** Code that works on the device until `end` is called. */
export class Work {
  constructor(name: string) {
    this._flag = path.join(stage().folder, `${name}.flag`);
    rmSync(this._flag, { force: true });
  }

  get code(): string {
    return `
import time
from pathlib import Path
from cuda.core import Device
device = Device(); device.set_current(); stream = device.create_stream()
small = device.allocate(1 << 20, stream=stream)
while not Path(${JSON.stringify(this._flag)}).exists():
    small.fill(7, stream=stream); stream.sync()
    time.sleep(0.05)
`;
  }

  get ended(): boolean {
    return existsSync(this._flag);
  }

  end(): void {
    writeFileSync(this._flag, '');
  }

  private readonly _flag: string;
}
