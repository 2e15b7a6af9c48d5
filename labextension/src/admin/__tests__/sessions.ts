// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * An admin's default session and view. A test sets only the fields that matter to it.
 */
import { aDevice, GIB, NOW } from '../../__tests__/defaults';
import type { IAdmin, IAdminSession } from '../../api';

export const session = (more: Partial<IAdminSession> = {}): IAdminSession => ({
  id: 'aa',
  owner: 'ada',
  group: '',
  label: 'work.ipynb',
  state: 'active',
  priority: 'notebook',
  devices: ['GPU-0'],
  granted_bytes: 4 * GIB,
  used_bytes: 3 * GIB,
  footprint_bytes: null,
  suspended_bytes: 0,
  busy_seconds: 90,
  counted_seconds: 100,
  idle_since: null,
  keep_until: null,
  recall_at: null,
  queued_at: null,
  queue_position: null,
  expected: null,
  wait_reason: '',
  pinned_reason: '',
  request: { memory: 4 * GIB, devices: 1 },
  ...more
});

export const view = (sessions: readonly IAdminSession[]): IAdmin => ({
  now: NOW,
  devices: [aDevice()],
  priorities: ['batch', 'notebook'],
  maintenance: [],
  sessions
});
