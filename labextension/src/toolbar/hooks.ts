// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** React hooks for the situation of a kernel, and for the answers to actions. */
import type { TranslationBundle } from '@jupyterlab/translation';
import {
  useCallback,
  useEffect,
  useRef,
  useState,
  useSyncExternalStore,
  type Dispatch,
  type SetStateAction
} from 'react';

import { PoolError } from '../api';
import { refusal, unanswered } from '../tell';
import type { ISituation } from './situation';
import type { KernelWatch } from './watch';

/** Return the newest situation. The component renders again when it changes. */
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

/**
 * The result of an action. `text` is the note, or says why the action was refused and
 * what to do.
 */
export interface IAnswer {
  readonly refused: boolean;
  readonly text: string;
  /** Whether the request itself was wrong, for example its size. */
  readonly fault?: boolean;
  /** Whether the pool could not be reached. */
  readonly outage?: boolean;
}

/** Milliseconds that a user needs to read a sentence. */
export const READ = 5000;

/** A note is removed after `OLD` milliseconds, and a refusal after `OLD_REFUSAL`. */
export const OLD = 15_000;
export const OLD_REFUSAL = 60_000;

/** Runs one action at a time, and keeps the last answer while it may still be true. */
export function useAnswer(
  trans: TranslationBundle,
  /**
   * The kernel's state as a text. When this text changes, an earlier answer is removed
   * as soon as the user has had time to read it.
   */
  state: string,
  /** Whether the pool can be reached. */
  up: boolean
): {
  readonly answer: IAnswer | null;
  readonly busy: boolean;
  readonly say: Dispatch<SetStateAction<IAnswer | null>>;
  readonly run: (ask: () => Promise<{ readonly note: string }>) => Promise<boolean>;
} {
  const [answer, say] = useState<IAnswer | null>(null);
  const [busy, setBusy] = useState(false);
  useForget(answer, say, state);
  useEffect(() => {
    if (up) {
      // The pool is back, so remove the message about its absence.
      say(now => (now?.outage ? null : now));
    }
  }, [up]);
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
      const outage = unanswered(error);
      const fault = error instanceof PoolError && FAULTS.has(error.status);
      say({ refused: true, text: refusal(trans, error), fault, outage });
      return false;
    } finally {
      setBusy(false);
    }
  };
  return { answer, busy, say, run };
}

/** The HTTP status codes of a wrong request. */
const FAULTS: ReadonlySet<number> = new Set([400, 409, 422]);

/** Removes an answer when it is old, or when the state has changed since the answer. */
function useForget(
  answer: IAnswer | null,
  say: Dispatch<SetStateAction<IAnswer | null>>,
  state: string
): void {
  // The state and the time at which the answer came.
  const about = useRef({ answer, state, at: 0 });
  if (about.current.answer !== answer) {
    about.current = { answer, state, at: Date.now() };
  }
  const changed = about.current.state !== state;
  useEffect(() => {
    if (answer === null) {
      return undefined;
    }
    const life = changed ? READ : answer.refused ? OLD_REFUSAL : OLD;
    const left = Math.max(0, about.current.at + life - Date.now());
    const timer = setTimeout(() => say(now => (now === answer ? null : now)), left);
    return () => clearTimeout(timer);
  }, [answer, changed, say]);
}
