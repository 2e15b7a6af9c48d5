// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * The admin's orders: each one shows a form, checks the values, and sends a request.
 */
import { Dialog, showDialog } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import { Widget } from '@lumino/widgets';

import type { IDevice, INote, PoolClient } from '../api';
import type { IRow } from './rows';

/**
 * The highest number of minutes until a recall takes a slice back. The broker allows at
 * most 7 days.
 */
export const MOST_MINUTES = 7 * 24 * 60;

/** The most characters of a reason. */
const REASON = 200;

/**
 * Return the minutes in a field; null if the text is not a whole number from 1 to
 * `MOST_MINUTES`.
 */
export function readMinutes(text: string): number | null {
  const trimmed = text.trim();
  const value = Number(trimmed);
  return /^\d+$/.test(trimmed) && value >= 1 && value <= MOST_MINUTES ? value : null;
}

interface ITyped {
  readonly minutes: string;
  readonly choice: string;
  readonly reason: string;
}

interface IForm {
  readonly title: string;
  /** Sentences that say what the order does. */
  readonly lines: readonly string[];
  readonly accept: string;
  /** Whether the order cannot be undone. */
  readonly harm?: boolean;
  readonly minutes?: boolean;
  readonly choices?: readonly string[];
  readonly choice?: string;
}

let forms = 0;

/** Text and fields of a dialog. */
export class OrderForm extends Widget implements Dialog.IBodyWidget<ITyped> {
  constructor(
    private readonly _trans: TranslationBundle,
    form: IForm,
    typed: ITyped,
    fault: string
  ) {
    super();
    this.addClass('jp-gpupool-Order');
    forms += 1;
    for (const line of form.lines) {
      const paragraph = document.createElement('p');
      paragraph.textContent = line;
      this.node.append(paragraph);
    }
    if (form.minutes) {
      this._minutes = this._input('minutes', _trans.__('Minutes until then'), 'number');
      this._minutes.min = '1';
      this._minutes.max = String(MOST_MINUTES);
      this._minutes.step = '1';
      this._minutes.required = true;
      this._minutes.value = typed.minutes;
      // Select the number: a user who types wants to replace it, not to append digits.
      this._minutes.addEventListener('focus', () => this._minutes?.select());
    }
    if (form.choices) {
      this._choice = document.createElement('select');
      for (const name of form.choices) {
        this._choice.add(new Option(name, name, false, name === typed.choice));
      }
      this._field('class', _trans.__('Priority class'), this._choice);
    }
    this._reason = this._input(
      'reason',
      _trans.__('Reason, for the owner (optional)'),
      'text'
    );
    this._reason.maxLength = REASON;
    this._reason.value = typed.reason;
    this._fault.className = 'jp-gpupool-result jp-mod-bad';
    this._fault.setAttribute('role', 'alert');
    this._fault.textContent = fault;
    this.node.append(this._fault);
    this.node.addEventListener('input', () => {
      const bad = this._minutes && readMinutes(this._minutes.value) === null;
      this._fault.textContent = bad ? minutesFault(this._trans) : '';
    });
  }

  getValue(): ITyped {
    return {
      minutes: this._minutes?.value ?? '',
      choice: this._choice?.value ?? '',
      reason: this._reason.value
    };
  }

  private _input(name: string, label: string, type: string): HTMLInputElement {
    const input = document.createElement('input');
    input.type = type;
    input.className = 'jp-mod-styled';
    this._field(name, label, input);
    return input;
  }

  private _field(name: string, text: string, field: HTMLElement): void {
    field.id = `jp-gpupool-order-${name}-${forms}`;
    const label = document.createElement('label');
    label.htmlFor = field.id;
    label.textContent = text;
    this.node.append(label, field);
  }

  private readonly _fault = document.createElement('p');
  private readonly _reason: HTMLInputElement;
  private readonly _minutes: HTMLInputElement | null = null;
  private readonly _choice: HTMLSelectElement | null = null;
}

function minutesFault(trans: TranslationBundle): string {
  return trans.__('Type a whole number of minutes from 1 to %1.', MOST_MINUTES);
}

/**
 * Show the form until its values are valid. Resolves to the values, or to null if the
 * admin cancels.
 */
async function ask(
  trans: TranslationBundle,
  form: IForm
): Promise<{ minutes: number; choice: string; reason: string } | null> {
  let typed: ITyped = { minutes: '5', choice: form.choice ?? '', reason: '' };
  let fault = '';
  for (;;) {
    const { button, value } = await showDialog({
      title: form.title,
      body: new OrderForm(trans, form, typed, fault),
      buttons: [
        Dialog.cancelButton({ label: trans.__('Cancel') }),
        (form.harm ? Dialog.warnButton : Dialog.okButton)({ label: form.accept })
      ],
      // The Enter key must not give an order that cannot be undone, so it chooses
      // `Cancel`.
      ...(form.harm ? { defaultButton: 0 } : { focusNodeSelector: 'input, select' })
    });
    if (!button.accept || value === null) {
      return null;
    }
    const minutes = form.minutes ? readMinutes(value.minutes) : 0;
    if (minutes !== null) {
      return { minutes, choice: value.choice, reason: value.reason.trim() };
    }
    // If the field has no valid number, nothing is sent and the form is shown again.
    [typed, fault] = [value, minutesFault(trans)];
  }
}

function called(trans: TranslationBundle, row: IRow): string {
  return trans.__('%1 (%2)', row.name, row.owner);
}

/**
 * Gives orders. Each method resolves to the broker's answer, or to null if the admin
 * cancels.
 */
export class Orders {
  constructor(
    private readonly _client: PoolClient,
    private readonly _trans: TranslationBundle
  ) {}

  async recall(row: IRow): Promise<INote | null> {
    const trans = this._trans;
    const typed = await ask(trans, {
      title: trans.__('Take the slice of %1 back?', called(trans, row)),
      lines: [
        trans.__('The state of the kernel moves to host memory. Nothing is lost.'),
        trans.__(
          'A running cell then waits for a new slice, behind the kernels in the queue.'
        )
      ],
      accept: trans.__('Take it back'),
      minutes: true
    });
    return (
      typed && this._client.adminRecall(row.session.id, typed.minutes, typed.reason)
    );
  }

  async keep(row: IRow): Promise<INote | null> {
    return this._client.adminKeep(row.session.id);
  }

  async prioritise(row: IRow, classes: readonly string[]): Promise<INote | null> {
    const trans = this._trans;
    const typed = await ask(trans, {
      title: trans.__('Change the priority of %1?', called(trans, row)),
      lines: [trans.__('The kernel’s priority class is now %1.', row.session.priority)],
      accept: trans.__('Change it'),
      choices: classes,
      choice: row.session.priority
    });
    return (
      typed && this._client.adminPriority(row.session.id, typed.choice, typed.reason)
    );
  }

  async end(row: IRow): Promise<INote | null> {
    const trans = this._trans;
    const typed = await ask(trans, {
      title: trans.__('Shut down %1?', called(trans, row)),
      lines: [
        trans.__('The variables of the kernel are lost, but its files are kept.'),
        trans.__(
          'The owner’s Jupyter server may then restart the kernel, without variables.'
        )
      ],
      accept: trans.__('Shut it down'),
      harm: true
    });
    return typed && this._client.adminEnd(row.session.id, typed.reason);
  }

  async device(
    device: IDevice,
    action: 'drain' | 'pause' | 'resume'
  ): Promise<INote | null> {
    const trans = this._trans;
    const forms: Record<typeof action, IForm> = {
      drain: {
        title: trans.__('Drain GPU %1?', device.index),
        lines: [
          trans.__('No kernel gets a slice of this GPU until you put it back.'),
          trans.__(
            'Kernels leave this GPU when they are idle, and continue on other GPUs.'
          )
        ],
        accept: trans.__('Drain it')
      },
      pause: {
        title: trans.__('Pause GPU %1?', device.index),
        lines: [
          trans.__('Kernels leave this GPU when they are idle.'),
          trans.__(
            'Then the pool closes the device file of the GPU, so that maintenance can begin.'
          )
        ],
        accept: trans.__('Pause it')
      },
      resume: {
        title: trans.__('Put GPU %1 back into service?', device.index),
        lines: [trans.__('The pool tests the GPU first.')],
        accept: trans.__('Put it back')
      }
    };
    const typed = await ask(trans, forms[action]);
    return typed && this._client.adminDevice(device.uuid, action, typed.reason);
  }
}
