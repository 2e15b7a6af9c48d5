// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Views of the pool and the changes between them. Pure: nothing here changes its arguments. */
import type { Delta, IAnySession, IDevice, IPool, ISession } from './api';
import type { Change } from './tokens';

type Session = ISession | IAnySession;

const uuid = (device: IDevice): string => device.uuid;
const id = (session: Session): string => session.id;

/** Return the view after a delta. It shares the unchanged parts with the old view. */
export function applyDelta(view: IPool, delta: Delta): IPool {
  const { removed = [], devices = [], sessions = [], ...rest } = delta;
  return {
    ...view,
    ...rest,
    devices: replace(view.devices, devices, removed, uuid),
    sessions: replace(view.sessions, sessions, removed, id)
  };
}

/** Combine two changes into one change; `second` is the later change. */
export function mergeChanges(first: Change, second: Change): Change {
  if (first.all || second.all) {
    return { all: true };
  }
  const [old, young] = [first.delta, second.delta];
  const gone = young.removed ?? [];
  const devices = replace(old.devices ?? [], young.devices ?? [], gone, uuid);
  const sessions = replace(old.sessions ?? [], young.sessions ?? [], gone, id);
  const there = new Set([...devices.map(uuid), ...sessions.map(id)]);
  const removed = [...new Set([...(old.removed ?? []), ...gone])].filter(
    name => !there.has(name)
  );
  return {
    all: false,
    delta: {
      ...old,
      ...young,
      ...(devices.length > 0 && { devices }),
      ...(sessions.length > 0 && { sessions }),
      removed
    }
  };
}

/**
 * Return the list after a change. Changed entries keep their places, new entries are
 * last.
 */
function replace<T>(
  entries: readonly T[],
  changed: readonly T[],
  removed: readonly string[],
  key: (entry: T) => string
): readonly T[] {
  if (changed.length === 0 && removed.length === 0) {
    return entries;
  }
  const news = new Map(changed.map(entry => [key(entry), entry]));
  const gone = new Set(removed);
  const kept: T[] = [];
  let same = true;
  for (const entry of entries) {
    const name = key(entry);
    const found = news.get(name);
    if (found !== undefined) {
      news.delete(name);
      kept.push(found);
      same = false;
    } else if (gone.has(name)) {
      same = false;
    } else {
      kept.push(entry);
    }
  }
  kept.push(...news.values());
  return same && news.size === 0 ? entries : kept;
}
