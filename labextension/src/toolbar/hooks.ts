// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** React's view of a watch, and of what the server answers. */
import {
  useCallback,
  useState,
  useSyncExternalStore,
  type Dispatch,
  type SetStateAction
} from 'react';

import { refusal } from '../tell';
import type { ISituation } from './situation';
import type { KernelWatch } from './watch';

/** The newest situation; renders again when it changes. */
export function useSituation(watch: KernelWatch): ISituation | null {
  const subscribe = useCallback(
    (update: () => void) => {
      watch.changed.connect(update);
      return () => watch.changed.disconnect(update);
    },
    [watch]
  );
  return useSyncExternalStore(subscribe, () => watch.situation);
}

/** What came of an action: its note, or why it was refused and what to do. */
export interface IAnswer {
  readonly refused: boolean;
  readonly text: string;
}

/** Does one thing at a time, and keeps the last answer. */
export function useAnswer(): {
  readonly answer: IAnswer | null;
  readonly busy: boolean;
  readonly say: Dispatch<SetStateAction<IAnswer | null>>;
  readonly run: (ask: () => Promise<{ readonly note: string }>) => Promise<boolean>;
} {
  const [answer, say] = useState<IAnswer | null>(null);
  const [busy, setBusy] = useState(false);
  const run = async (ask: () => Promise<{ readonly note: string }>) => {
    if (busy) {
      return false;
    }
    setBusy(true);
    say(null);
    try {
      say({ refused: false, text: (await ask()).note });
      return true;
    } catch (error) {
      say({ refused: true, text: refusal(error) });
      return false;
    } finally {
      setBusy(false);
    }
  };
  return { answer, busy, say, run };
}
