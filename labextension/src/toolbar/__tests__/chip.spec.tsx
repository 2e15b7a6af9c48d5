// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import { CommandRegistry } from '@lumino/commands';
import { Widget } from '@lumino/widgets';
import { act, fireEvent, screen, waitFor } from '@testing-library/react';

import { drawn } from '../../__tests__/drawn';
import { StatusItem } from '../../statusbar/item';
import { Chip } from '../chip';
import { PoolPopovers } from '../popovers';
import { KernelWatch } from '../watch';
import {
  anOrder,
  detached,
  FakeContext,
  FakeModel,
  GIB,
  queued,
  session,
  trans
} from './fakes';

// jsdom has no layout, so let every element that is not hidden count as visible.
beforeEach(() => {
  jest.spyOn(Element.prototype, 'getClientRects').mockImplementation(function (
    this: Element
  ) {
    const seen = this.isConnected && !this.closest('.lm-mod-hidden');
    return (seen ? [{}] : []) as unknown as DOMRectList;
  });
});

const made: Widget[] = [];

afterEach(() => {
  drawn(() => {
    for (const widget of made.splice(0)) {
      widget.dispose();
    }
  });
  expect(dialog()).toBeNull();
  document.body.textContent = '';
});

async function show<T extends Widget>(widget: T): Promise<T> {
  made.push(widget);
  await act(async () => {
    Widget.attach(widget, document.body);
    await Promise.resolve();
  });
  return widget;
}

async function chip(model: FakeModel, context = new FakeContext()) {
  const popovers = new PoolPopovers(new CommandRegistry(), null);
  const watch = new KernelWatch(model.asModel(), context.asContext(), trans);
  const widget = await show(new Chip(watch, popovers));
  return { widget, popovers, context, button: () => button(widget)! };
}

const button = (widget: Widget) => widget.node.querySelector('button');
const heard = (widget: Widget) =>
  widget.node.querySelector('[role=status]')?.textContent;
const dialog = () => document.querySelector<HTMLElement>('[role=dialog]');

/**
 * Run `does`, and wait until `holds` no longer throws, because Lumino renders later.
 */
async function until(does: () => void, holds: () => void): Promise<void> {
  act(does);
  await waitFor(holds);
}

/**
 * Open the popover, and check that its label exists when the popover gets the focus.
 */
async function opened(from: HTMLElement): Promise<HTMLElement> {
  const focus = jest.spyOn(HTMLElement.prototype, 'focus');
  focus.mockImplementationOnce(function (this: HTMLElement) {
    expect(this.textContent).toContain('This notebook');
    focus.mockRestore();
    this.focus();
  });
  await until(
    () => from.click(),
    () => expect(document.activeElement).toBe(dialog())
  );
  return dialog()!;
}

describe('the chip', () => {
  it('the chip is a button with the state in its text and name', async () => {
    const { widget, button } = await chip(new FakeModel(session()));
    expect(button().textContent).toBe('6 of 8 GiB on GPU 1');
    const full = 'GPU of this notebook: 6 of 8 GiB on GPU 1 (emulated)';
    expect(button().title).toBe(full);
    // The button's name begins with the visible text.
    expect(button().getAttribute('aria-label')).toBe(
      '6 of 8 GiB on GPU 1 (emulated), GPU of this notebook'
    );
    expect(button().getAttribute('aria-haspopup')).toBe('dialog');
    expect(widget.isHidden).toBe(false);
  });

  it('the chip’s tooltip says why an idle slice stays', async () => {
    const idle = { state: 'idle', stays_reason: 'Host memory is full.' } as const;
    const { button } = await chip(new FakeModel(session(idle)));
    expect(button().textContent).toBe('Idle on GPU 1, stays');
    expect(button().title).toBe(
      'GPU of this notebook: Idle on GPU 1, stays (emulated)\nHost memory is full.'
    );
  });

  it('the chip has a short text that screen readers do not read', async () => {
    const { button } = await chip(new FakeModel(session(queued)));
    expect(button().textContent).toBe('Waiting: 2nd, 20 to 60 s left');
    const short = button().querySelector<HTMLElement>('.jp-gpupool-Chip-short')!;
    expect(short.dataset['short']).toBe('2nd · 20 to 60 s');
    expect(short.getAttribute('aria-hidden')).toBe('true');
  });

  it('the chip shows that the administrator has paused the pool', async () => {
    const model = new FakeModel(session(queued));
    model.shows({ maintenance: [anOrder()] });
    const { button } = await chip(model);
    expect(button().textContent).toBe('Waiting: the administrator has paused all GPUs');
    const short = button().querySelector<HTMLElement>('.jp-gpupool-Chip-short')!;
    expect(short.dataset['short']).toBe('Paused');
    expect(screen.getAllByRole('status').map(node => node.textContent)).toContain(
      'Waiting for a GPU: the administrator has paused all GPUs (new driver)'
    );
  });

  it('the chip says that the kernel was preempted, and why', async () => {
    const preempted = 'its time slice is over, and another kernel has its turn';
    const model = new FakeModel(session({ ...queued, preempted }));
    const { button } = await chip(model);
    expect(button().textContent).toBe('Preempted: 2nd, 20 to 60 s left');
    expect(button().title.split('\n')[1]).toBe(
      'Its time slice is over, and another kernel has its turn.'
    );
    expect(screen.getAllByRole('status').map(node => node.textContent)).toContain(
      `Preempted: ${preempted}`
    );
  });

  it('the chip has group, share and budget in its tooltip', async () => {
    const standing = [
      'Your group is bio.',
      'You have 70 of 100 GPU-seconds left today.'
    ];
    const { button } = await chip(new FakeModel(session({ standing })));
    expect(button().title.split('\n').slice(-2)).toEqual(standing);
  });

  it('the chip’s name and tooltip say that a release is pending', async () => {
    const { button } = await chip(new FakeModel(session({ release_asked: true })));
    const back = 'Goes back to the pool when its work on the GPU is done.';
    expect(button().title.split('\n')[1]).toBe(back);
    expect(button().getAttribute('aria-label')).toBe(
      `6 of 8 GiB on GPU 1 (emulated), GPU of this notebook. ${back}`
    );
  });

  it('the chip is in the tab order when its toolbar is shown again', async () => {
    const { widget, button } = await chip(new FakeModel(session()));
    const toolbar = document.createElement('jp-toolbar');
    document.body.append(toolbar);
    toolbar.append(widget.node);
    // Without `reduceFocusableElements`, the toolbar cannot put the chip into the tab
    // order. So the chip sets its `tabIndex` itself.
    Object.assign(toolbar, { reduceFocusableElements: undefined });
    drawn(() => widget.hide());
    button().tabIndex = -1;
    drawn(() => widget.show());
    expect(button().tabIndex).toBe(0);
    // With `reduceFocusableElements`, the chip calls this method when the chip becomes
    // visible.
    const looks = jest.fn();
    Object.assign(toolbar, { reduceFocusableElements: looks });
    drawn(() => widget.hide());
    expect(looks).not.toHaveBeenCalled();
    drawn(() => widget.show());
    expect(looks).toHaveBeenCalledTimes(1);
  });

  it('the chip is absent for kernels outside the pool', async () => {
    const { widget, context } = await chip(
      new FakeModel(session()),
      new FakeContext('python3')
    );
    expect(widget.isHidden).toBe(true);
    expect(button(widget)).toBeNull();
    await until(
      () => context.choose('gpupool-python3', 'k1'),
      () => expect(button(widget)?.textContent).toContain('GPU 1')
    );
    expect(widget.isHidden).toBe(false);
    await until(
      () => context.choose('python3'),
      () => expect(button(widget)).toBeNull()
    );
    expect(widget.isHidden).toBe(true);
  });

  it('the chip announces states, not figures and seconds', async () => {
    const model = new FakeModel(session());
    const { widget, button } = await chip(model);
    expect(heard(widget)).toBe('Working on GPU 1');
    await until(
      () => model.becomes({ used_bytes: 7 * GIB, granted_bytes: 9 * GIB }),
      () => expect(button().textContent).toContain('9 GiB, 8 guaranteed')
    );
    expect(heard(widget)).toBe('Working on GPU 1');
    await until(
      () => model.becomes({ state: 'idle', leaves_at: 1042 }),
      () => expect(button().textContent).toContain('0:42')
    );
    const idle = heard(widget);
    expect(idle).toBe('Idle on GPU 1, goes back to the pool by itself');
    expect(button().getAttribute('aria-label')).toBe(
      'Idle, back to the pool (emulated), GPU of this notebook'
    );
    model.time += 12;
    await until(
      () => model.becomes({ state: 'idle', leaves_at: 1042 }),
      () => expect(button().textContent).toContain('0:30')
    );
    expect(heard(widget)).toBe(idle);
    await until(
      () => model.becomes(queued),
      () => expect(heard(widget)).toBe('Waiting for a GPU: 2nd')
    );
  });
});

describe('the popover', () => {
  it('the popover gets a label and the focus; Escape closes it', async () => {
    const { button } = await chip(new FakeModel(session()));
    const found = await opened(button());
    await waitFor(() => expect(document.activeElement).toBe(found));
    const label = document.getElementById(found.getAttribute('aria-labelledby')!);
    expect(label?.textContent).toContain('This notebook uses');
    await waitFor(() => expect(button().getAttribute('aria-expanded')).toBe('true'));
    drawn(() => fireEvent.keyDown(found, { key: 'Escape' }));
    expect(dialog()).toBeNull();
    expect(document.activeElement).toBe(button());
    await waitFor(() => expect(button().getAttribute('aria-expanded')).toBe('false'));
  });

  it('the popover closes at a second click or a click outside', async () => {
    const { button } = await chip(new FakeModel(session()));
    await opened(button());
    drawn(() => button().click());
    expect(dialog()).toBeNull();
    await opened(button());
    await until(
      () => void fireEvent.pointerDown(document.body),
      () => expect(dialog()).toBeNull()
    );
    expect(document.activeElement).toBe(button());
  });

  it('the focus stays where a click outside the popover moved it', async () => {
    const { button } = await chip(new FakeModel(session()));
    const cell = document.body.appendChild(document.createElement('input'));
    await opened(button());
    await until(
      () => {
        fireEvent.pointerDown(cell);
        cell.focus();
      },
      () => expect(dialog()).toBeNull()
    );
    expect(document.activeElement).toBe(cell);
  });

  it('the Tab key stays inside the popover', async () => {
    const { button } = await chip(new FakeModel(session()));
    const found = await opened(button());
    const all = [...found.querySelectorAll<HTMLElement>('button, input')];
    fireEvent.keyDown(found, { key: 'Tab' });
    expect(document.activeElement).toBe(all[0]);
    fireEvent.keyDown(all[0]!, { key: 'Tab', shiftKey: true });
    expect(document.activeElement).toBe(all[all.length - 1]);
    fireEvent.keyDown(document.activeElement!, { key: 'Tab' });
    expect(document.activeElement).toBe(all[0]);
  });

  it('the popover closes if its notebook hides or changes kernel', async () => {
    const { widget, button, context } = await chip(new FakeModel(session()));
    await opened(button());
    drawn(() => widget.hide());
    expect(dialog()).toBeNull();
    drawn(() => widget.show());
    await opened(button());
    drawn(() => context.choose('python3'));
    expect(dialog()).toBeNull();
  });

  it('a command opens the popover of a given notebook', async () => {
    const { popovers, context } = await chip(new FakeModel(session()));
    let done = popovers.openFor(new FakeContext().asContext());
    expect(done).toBe(false);
    drawn(() => {
      done = popovers.openFor(context.asContext());
      popovers.openFor(context.asContext());
    });
    expect(done).toBe(true);
    expect(document.querySelectorAll('[role=dialog]')).toHaveLength(1);
  });
});

describe('the status bar item', () => {
  const follow = (item: StatusItem, context: FakeContext | null) =>
    drawn(() => item.follow(context as unknown as Parameters<StatusItem['follow']>[0]));

  it('the status item is inactive for a plain kernel', async () => {
    const model = new FakeModel(session());
    const popovers = new PoolPopovers(new CommandRegistry(), null);
    const item = await show(new StatusItem(model.asModel(), popovers, trans));
    const told: boolean[] = [];
    item.activeChanged.connect(() => told.push(item.active));
    expect(item.active).toBe(false);
    follow(item, new FakeContext());
    expect(item.active).toBe(true);
    await waitFor(() => expect(button(item)?.textContent).toBe('6 of 8 GiB on GPU 1'));
    await until(
      () => model.becomes({ ...detached, suspended_bytes: 6 * GIB }),
      () => expect(button(item)?.textContent).toBe('In host memory: 6 GiB')
    );
    follow(item, new FakeContext('python3'));
    expect(item.active).toBe(false);
    follow(item, null);
    expect(told).toEqual([true, true, false, false]);
  });

  it('the status item’s popover closes for another notebook', async () => {
    const popovers = new PoolPopovers(new CommandRegistry(), null);
    const item = await show(
      new StatusItem(new FakeModel(session()).asModel(), popovers, trans)
    );
    follow(item, new FakeContext());
    await waitFor(() => expect(button(item)).not.toBeNull());
    await opened(button(item)!);
    expect(item.hasClass('jp-mod-clicked')).toBe(true);
    follow(item, new FakeContext());
    expect(dialog()).toBeNull();
    expect(item.hasClass('jp-mod-clicked')).toBe(false);
  });
});
