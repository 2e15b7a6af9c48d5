// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * The tools that all parts of the panel share. The object with the tools never changes,
 * so it causes no render.
 */
import type { TranslationBundle } from '@jupyterlab/translation';
import type { IDisposable } from '@lumino/disposable';
import type { ISignal } from '@lumino/signaling';
import * as React from 'react';

import type { IHistory, IHour, IMachines } from '../api';
import { keepSeconds } from '../keeping';
import type { IPoolModel, IPoolSettings } from '../tokens';
import type { Ticker } from '../ticker';

/**
 * The history, the last hour and the machines. The page fetches them only while a
 * component needs them (see `hold`).
 */
export interface IPast {
  readonly latest: IHistory | null;
  /**
   * Figures of the last hour for the devices and the queue. Null before the first
   * answer. Always null if the server is too old to send them.
   */
  readonly hour: IHour | null;
  /** The machines of the cluster; null if this machine is in no cluster. */
  readonly machines: IMachines | null;
  readonly changed: ISignal<unknown, unknown>;
  hold(): IDisposable;
}

export interface ILink {
  readonly label: string;
  readonly go: () => void;
}

export interface ITools {
  readonly trans: TranslationBundle;
  readonly model: IPoolModel;
  readonly ticker: Ticker;
  readonly past: IPast;
  readonly settings: Pick<IPoolSettings, 'keepMinutes' | 'changed'>;
  /** Names of the folded sections; they are kept as long as the panel exists. */
  readonly folded: Set<string>;
  /** Bring the document of a kernel to the front. */
  readonly open: (kernelId: string) => void;
  /** Ask the user, and then end a kernel of this server. */
  readonly shutDown: (kernelId: string, name: string) => Promise<{ note: string }>;
  /** Links to other places of this user interface, such as the admin's page. */
  readonly links: () => readonly ILink[];
}

export const Tools = React.createContext<ITools | null>(null);

export function useTools(): ITools {
  const tools = React.useContext(Tools);
  if (tools === null) {
    throw new Error('A part of the panel is drawn outside of it.');
  }
  return tools;
}

/** The newest history; renders again for a new one. */
export function useHistory(): IHistory | null {
  const { past } = useTools();
  return useTold(past.changed, () => past.latest);
}

/** Return the newest data of the last hour. New data renders the component again. */
export function useHour(): IHour | null {
  const { past } = useTools();
  return useTold(past.changed, () => past.hour);
}

/** Return the machines of the cluster. A change renders the component again. */
export function useMachines(): IMachines | null {
  const { past } = useTools();
  return useTold(past.changed, () => past.machines);
}

/** For how many minutes the user wants to keep an idle slice. */
function useKeepMinutes(): number {
  const { settings } = useTools();
  return useTold(settings.changed, () => settings.keepMinutes);
}

/**
 * For how many seconds an idle slice is kept: the time that the user has set, but at
 * most the pool's `max_keep`. Null if one of the two times is not positive.
 */
export function useKeepSeconds(): number | null {
  const { model } = useTools();
  const minutes = useKeepMinutes();
  return useTold(model.changed, () => keepSeconds(minutes, model.view));
}

/** Whether the pool can be reached. */
export function useUp(): boolean {
  const { model } = useTools();
  return useTold(model.changed, () => model.broker.status === 'up');
}

function useTold<T>(changed: ISignal<unknown, unknown>, get: () => T): T {
  const subscribe = React.useCallback(
    (told: () => void) => {
      const slot = () => told();
      changed.connect(slot);
      return () => {
        changed.disconnect(slot);
      };
    },
    [changed]
  );
  return React.useSyncExternalStore(subscribe, get);
}
