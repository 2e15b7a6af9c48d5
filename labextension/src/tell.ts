// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Notifications about the results of actions, and dialogs for longer texts. */
import { Dialog, Notification, showDialog } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { ISignal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';

import { PoolError } from './api';
import type { IBroker } from './tokens';

/** The number of characters of a notification that JupyterLab shows. */
const SHOWN = 140;

/** Milliseconds for which a result is shown. */
const RESULT = 5000;

/**
 * Milliseconds for which a notification is shown: `REFUSAL` for a refusal, `OUTAGE` for
 * a request without an answer.
 */
export const REFUSAL = 10_000;
export const OUTAGE = 60_000;

/** Codes of an absent broker: no process listens, or the process has ended. */
const NO_BROKER: ReadonlySet<string> = new Set(['no-broker', 'broker-unavailable']);

/** Whether a code means that there is no broker. */
export function noBroker(code: string | undefined): boolean {
  return code !== undefined && NO_BROKER.has(code);
}

/** Whether a request got no answer; a refusal is an answer. */
export function unanswered(error: unknown): boolean {
  return (
    error instanceof PoolError && (error.code === 'network' || error.status >= 500)
  );
}

/** The next step after an error: the server's advice, and where to find more help. */
export function nextStep(trans: TranslationBundle, code: string, next: string): string {
  // If the socket is missing (`no-broker`), the server's text already contains this
  // sentence.
  return code === 'broker-unavailable'
    ? [
        trans.__(
          'If the broker has ended, it starts again by itself. Only a broker that your admin runs may need help from your admin. Kernels keep their GPU state until then.'
        ),
        next
      ]
        .filter(Boolean)
        .join(' ')
    : next;
}

/** A refusal in the server's words, with what to do next. */
export function refusal(trans: TranslationBundle, error: unknown): string {
  if (error instanceof PoolError) {
    const next = nextStep(trans, error.code, error.nextStep);
    return [error.message, next].filter(Boolean).join(' ');
  }
  return error instanceof Error ? error.message : String(error);
}

/** For each cause, the id of its only notification on the screen. */
const standing = new Map<string, string>();

/** Causes whose notifications become wrong when the pool answers. */
const outages = new Set<string>();

type Options = Parameters<typeof Notification.error>[1];

/** Notify, and remove an earlier notification of the same cause. */
function toast(
  cause: string,
  type: 'success' | 'error' | 'info',
  text: string,
  options: Options
): void {
  const message = unmarked(text);
  const shown = standing.get(cause);
  if (
    shown !== undefined &&
    Notification.update({ id: shown, message, type, ...options })
  ) {
    return;
  }
  standing.set(cause, Notification.emit(message, type, options));
}

function takeBack(cause: string): void {
  const shown = standing.get(cause);
  if (shown !== undefined) {
    standing.delete(cause);
    Notification.dismiss(shown);
  }
}

/**
 * Show the result of an action for a kernel. Resolves to whether the action succeeded,
 * and never rejects.
 */
export async function tell(
  trans: TranslationBundle,
  kernelId: string,
  action: Promise<{ readonly note: string }>
): Promise<boolean> {
  try {
    const { note } = await action;
    // Each kernel has only its latest notification.
    toast(`done ${kernelId}`, 'success', note || trans.__('Done.'), {
      autoClose: RESULT
    });
    return true;
  } catch (error) {
    takeBack(`done ${kernelId}`);
    tellRefusal(trans, error);
    return false;
  }
}

/** Show in full why a request failed, even if the text is long. */
export function tellRefusal(trans: TranslationBundle, error: unknown): void {
  const text = refusal(trans, error);
  const cause = `refused ${text}`;
  const outage = unanswered(error);
  if (outage) {
    outages.add(cause);
  }
  toast(cause, 'error', text, {
    autoClose: outage ? OUTAGE : REFUSAL,
    actions: allOf(trans, text)
  });
}

/** The action that shows a whole text, if JupyterLab shows only its beginning. */
export function allOf(trans: TranslationBundle, text: string): Notification.IAction[] {
  return text.length > SHOWN
    ? [
        {
          label: trans.__('Show all'),
          callback: () => void explain(trans, trans.__('GPU Pool'), [text])
        }
      ]
    : [];
}

/** Notify of something that is not an error. */
export function tellCalmly(text: string): void {
  toast(`calm ${text}`, 'info', text, { autoClose: RESULT });
}

/** Remove notifications about the pool's absence once it is back. */
export function followPool(model: {
  readonly broker: IBroker;
  readonly changed: ISignal<unknown, unknown>;
}): void {
  let up = model.broker.status === 'up';
  model.changed.connect(() => {
    const was = up;
    up = model.broker.status === 'up';
    // Remove the notifications only when the pool comes back. A request may fail while
    // the websocket works, and the notification of that failure must stay.
    if (up && !was) {
      outages.forEach(takeBack);
      outages.clear();
    }
  });
}

/** The parts of a server's sentence, in which commands are between backticks. */
export function marked(
  line: string
): { readonly text: string; readonly code: boolean }[] {
  return line
    .split(/`([^`]*)`/)
    .map((text, at) => ({ text, code: at % 2 === 1 }))
    .filter(({ text }) => text !== '');
}

/** The sentence without its backticks, for places that show only text. */
export function unmarked(line: string): string {
  return line.replace(/`([^`]*)`/g, '$1');
}

/** Show paragraphs in a dialog; resolves to whether the user chose its `action`. */
export async function explain(
  trans: TranslationBundle,
  title: string,
  lines: readonly string[],
  action?: string
): Promise<boolean> {
  const body = new Widget();
  body.addClass('jp-gpupool-Explanation');
  for (const line of lines) {
    const paragraph = document.createElement('p');
    for (const { text, code } of marked(line)) {
      const node = code ? document.createElement('code') : null;
      node?.append(text);
      paragraph.append(node ?? text);
    }
    body.node.append(paragraph);
  }
  const close = Dialog.cancelButton({ label: trans.__('Close') });
  const buttons = action ? [close, Dialog.okButton({ label: action })] : [close];
  const result = await showDialog({ title, body, buttons });
  return result.button.accept;
}
