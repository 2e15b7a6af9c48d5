// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Notifications about the results of actions, and dialogs for longer texts. */
import { Dialog, Notification, showDialog } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { ISignal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';

import { PoolError } from './api';
import type { IBroker } from './tokens';

/** JupyterLab shows this many characters of a notification, and cuts the rest. */
const SHOWN = 140;

/** Milliseconds for which a result is shown. */
const RESULT = 5000;

/**
 * The notification of a refusal is shown for `REFUSAL` milliseconds. The notification
 * of a request without an answer is shown for `OUTAGE` milliseconds.
 */
export const REFUSAL = 10_000;
export const OUTAGE = 60_000;

/**
 * Codes that mean that no broker answers: the socket does not exist (`no-broker`), or
 * no broker listens at it, or the connection to the broker has ended.
 */
const NO_BROKER: ReadonlySet<string> = new Set(['no-broker', 'broker-unavailable']);

/** Whether a code means that there is no broker. */
export function noBroker(code: string | undefined): boolean {
  return code !== undefined && NO_BROKER.has(code);
}

/** Whether the pool has not answered a request. A refusal counts as an answer. */
export function unanswered(error: unknown): boolean {
  return (
    error instanceof PoolError && (error.code === 'network' || error.status >= 500)
  );
}

/**
 * What the user can do after an error: the server's advice. For a lost broker, a
 * sentence about its restart comes first.
 */
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

/**
 * The text for a failed request: the server's message, and what the user can do next.
 */
export function refusal(trans: TranslationBundle, error: unknown): string {
  if (error instanceof PoolError) {
    const next = nextStep(trans, error.code, error.nextStep);
    return [error.message, next].filter(Boolean).join(' ');
  }
  return error instanceof Error ? error.message : String(error);
}

/** Maps a cause to the id of its notification. A cause has at most one notification. */
const standing = new Map<string, string>();

/**
 * The causes of the notifications that the pool does not answer. These notifications
 * become wrong when the pool answers again.
 */
const outages = new Set<string>();

type Options = Parameters<typeof Notification.error>[1];

/**
 * Show a notification. If JupyterLab still has a notification of the same cause, change
 * that notification, so that each cause has only one.
 */
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
 * Show the result of an action for a kernel. Resolves to true if the action succeeded,
 * and to false if it failed; never rejects.
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

/** Show why a request failed. A long text has a button that shows all of it. */
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

/**
 * The button that shows the whole text of a notification. The list is empty if the
 * notification itself shows the whole text.
 */
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
    // Do this only at the moment when the pool comes back. If a request fails while the
    // websocket works, the notification of that failure must stay.
    if (up && !was) {
      outages.forEach(takeBack);
      outages.clear();
    }
  });
}

/**
 * Split a server's sentence at its backticks. A part between two backticks is a
 * command, and has `code` true.
 */
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

/**
 * Show paragraphs in a dialog. Resolves to true if the user chose the button `action`.
 */
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
