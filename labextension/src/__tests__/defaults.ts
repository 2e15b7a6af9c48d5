// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * A default device, session and pool. A test sets only the fields that matter to it.
 */
import { nullTranslator } from '@jupyterlab/translation';

import type { IAnySession, IDevice, IOrder, IPool, ISession, ISlice } from '../api';

export const GIB = 1024 ** 3;
export const NOW = 1000;

export const trans = nullTranslator.load('jupyter_gpupool');

export function aDevice(more: Partial<IDevice> = {}): IDevice {
  const { index = 0 } = more;
  return {
    uuid: `GPU-${index}`,
    index,
    name: 'NVIDIA A100',
    emulated: false,
    tier: 'guarded',
    can_suspend: true,
    memory_total: 16 * GIB,
    memory_capacity: 15 * GIB,
    memory_granted: 0,
    memory_foreign: 0,
    memory_free: 15 * GIB,
    memory_used: null,
    utilisation: 43,
    drained_reason: '',
    ...more
  };
}

export function aSession(more: Partial<ISession> = {}): ISession {
  const { id = 'a' } = more;
  return withSlices({
    id,
    state: 'active',
    priority: 'interactive',
    granted_bytes: 8 * GIB,
    devices: ['GPU-0'],
    queue_position: null,
    mine: true,
    here: true,
    label: `label of ${id}`,
    kernel_id: `kernel-${id}`,
    opened_at: NOW - 100,
    attach: 'lazy',
    footprint_bytes: null,
    used_bytes: 6 * GIB,
    suspended_bytes: 0,
    request: {
      memory: 8 * GIB,
      limit: 8 * GIB,
      devices: 1,
      compute: null,
      priority: 'interactive'
    },
    queue_length: null,
    expected: null,
    queued_at: null,
    wait_reason: '',
    pinned_reason: '',
    idle_seconds: null,
    leaves_at: null,
    wanted: false,
    stays_reason: '',
    most_bytes: 15 * GIB,
    keep_until: null,
    attached_seconds_total: 0,
    wait_seconds_total: 0,
    suspends: 0,
    resumes: 0,
    migrations: 0,
    ...more
  });
}

/** Another user's session, with only the fields that this user may see. */
export function anotherSession(more: Partial<IAnySession> = {}): IAnySession {
  return withSlices({
    id: 'b',
    state: 'active',
    priority: 'batch',
    granted_bytes: 4 * GIB,
    devices: ['GPU-0'],
    queue_position: null,
    mine: false,
    here: false,
    ...more
  });
}

type Slices = Pick<IAnySession, 'device' | 'slices'>;

/**
 * Give a session a slice on each of its devices, all of one size. If the session lists
 * slices already, keep them.
 */
function withSlices<
  S extends Pick<ISession, 'devices' | 'granted_bytes'> & { used_bytes?: number | null }
>(session: S): S & Slices {
  const { devices, granted_bytes: granted, used_bytes: used } = session;
  const slices: ISlice[] = devices.map(device => ({
    device,
    granted_bytes: granted / devices.length,
    used_bytes: used && used / devices.length
  }));
  return { device: devices[0] ?? null, slices, ...session };
}

/** A session without a slice. */
export const NOTHING = { granted_bytes: 0, devices: [], used_bytes: null } as const;

export function aPool(more: Partial<IPool> = {}): IPool {
  return {
    version: '0.1.0',
    now: NOW,
    emulated: false,
    machine: '2x16GiB',
    devices: [aDevice(), aDevice({ index: 1 })],
    sessions: [aSession(), aSession({ id: 'b' })],
    queue_length: 0,
    host: { budget_bytes: 32 * GIB, used_bytes: 0, available_bytes: 64 * GIB },
    settings: { idle_timeout: 60 },
    limits: { memory: 15 * GIB, devices: 2, max_wait: null, priorities: [] },
    problem: '',
    ...more
  };
}

/** An admin's order that pauses the whole pool. */
export function anOrder(more: Partial<IOrder> = {}): IOrder {
  return {
    kind: 'pause',
    device: '',
    reason: 'new driver',
    by: 'root',
    since: NOW - 600,
    closed: true,
    ...more
  };
}
