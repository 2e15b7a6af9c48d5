// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** How the results of actions are told, and how something longer is. */
import { Dialog, Notification, showDialog } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import { Widget } from '@lumino/widgets';

import { PoolError } from './api';

/** Characters of a notification that JupyterLab shows. */
const SHOWN = 140;

/** Milliseconds for which a result is shown. */
const RESULT = 5000;

/** A refusal in the server's words, with what to do next. */
export function refusal(error: unknown): string {
  if (error instanceof PoolError) {
    return [error.message, error.nextStep].filter(Boolean).join(' ');
  }
  return error instanceof Error ? error.message : String(error);
}

/** Tell what came of an action; returns whether it was done. Never rejects. */
export async function tell(
  trans: TranslationBundle,
  action: Promise<{ readonly note: string }>
): Promise<boolean> {
  try {
    const { note } = await action;
    Notification.success(note || trans.__('Done.'), { autoClose: RESULT });
    return true;
  } catch (error) {
    tellRefusal(trans, error);
    return false;
  }
}

/** Tell why something was not done; the whole of it, however long. */
export function tellRefusal(trans: TranslationBundle, error: unknown): void {
  const text = refusal(error);
  const rest = {
    label: trans.__('Show all'),
    callback: () => void explain(trans, trans.__('GPU Pool'), [text])
  };
  Notification.error(text, {
    autoClose: false,
    ...(text.length > SHOWN && { actions: [rest] })
  });
}

/** Paragraphs in a dialog; resolves with whether its `action` was chosen, if there is one. */
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
    paragraph.textContent = line;
    body.node.append(paragraph);
  }
  const close = Dialog.cancelButton({ label: trans.__('Close') });
  const buttons = action ? [close, Dialog.okButton({ label: action })] : [close];
  const result = await showDialog({ title, body, buttons });
  return result.button.accept;
}
