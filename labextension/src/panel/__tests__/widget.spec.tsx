// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import { act, screen } from '@testing-library/react';
import { MessageLoop } from '@lumino/messaging';
import { Widget } from '@lumino/widgets';

import * as describing from '../describe';
import { PanelWidget } from '../widget';
import {
  device,
  FakeDocuments,
  FakeModel,
  FakePast,
  mine,
  NOW,
  pool,
  trans
} from './fakes';

// What browsers have and jsdom lacks.
Object.assign(globalThis, {
  requestIdleCallback: (told: () => void) => setTimeout(told),
  IS_REACT_ACT_ENVIRONMENT: true
});

function made(changed: Partial<FakeModel> = {}) {
  const model = Object.assign(new FakeModel(pool([device(0)], [mine('a')])), changed);
  const past = new FakePast();
  const documents = new FakeDocuments();
  const panel = new PanelWidget({ model, past, documents, trans });
  const settle = () => act(() => MessageLoop.flush());
  return { model, past, documents, panel, settle };
}

describe('PanelWidget', () => {
  let open: PanelWidget | null = null;

  function attach(panel: PanelWidget): void {
    open = panel;
    act(() => Widget.attach(panel, document.body));
  }

  afterEach(() => {
    act(() => open?.dispose());
    open = null;
  });

  it('has a name and an icon', () => {
    const { panel } = made();
    attach(panel);
    expect(panel.id).toBe('jp-gpupool-panel');
    expect(panel.title.caption).toBe('GPU Pool');
    expect(panel.title.icon).toBeTruthy();
    screen.getByRole('region', { name: 'GPU Pool' });
  });

  it('draws what the model and the documents tell', () => {
    const { panel, model, documents, settle } = made();
    attach(panel);
    screen.getByText('label of a');
    documents.names.set('kernel-a', { name: 'a.ipynb', path: 'a.ipynb' });
    act(() => documents.changed.emit());
    settle();
    screen.getByText('a.ipynb');
    act(() => model.change(pool([device(0), device(1)])));
    settle();
    expect(screen.getAllByRole('listbox')).toHaveLength(2);
  });

  it('draws nothing, asks nothing and counts nothing while hidden', () => {
    jest.useFakeTimers();
    try {
      const { panel, model, past, settle } = made();
      panel.hide();
      attach(panel);
      const summary = jest.spyOn(describing, 'summary');
      act(() => model.change(pool([device(0)])));
      settle();
      expect(panel.node.childElementCount).toBe(0);
      expect([past.holders, model.refreshed]).toEqual([0, 0]);

      const idle = mine('a', { state: 'idle', leaves_at: NOW + 9 });
      act(() => model.change(pool([device(0)], [idle])));
      act(() => panel.show());
      settle();
      expect(summary).toHaveBeenCalledTimes(1);
      expect(past.holders).toBe(1);
      act(() => jest.advanceTimersByTime(1));
      expect(jest.getTimerCount()).toBe(1);

      act(() => panel.hide());
      expect(past.holders).toBe(0);
      expect(jest.getTimerCount()).toBe(0);
      act(() => model.change(pool([device(0), device(1)], [idle])));
      settle();
      expect(summary).toHaveBeenCalledTimes(1);

      act(() => panel.show());
      settle();
      expect(screen.getAllByRole('listbox')).toHaveLength(2);
    } finally {
      jest.useRealTimers();
    }
  });

  it('asks once when first shown, if nobody else does', () => {
    const { panel, model, past } = made({ live: false });
    panel.hide();
    attach(panel);
    expect(model.refreshed).toBe(0);
    act(() => panel.show());
    act(() => panel.hide());
    act(() => panel.show());
    expect(model.refreshed).toBe(1);
    expect(past.holders).toBe(1);
  });

  it('leaves the asking to the model while that is live', () => {
    const { panel, model } = made();
    attach(panel);
    expect(model.refreshed).toBe(0);
  });

  it('takes the focus when it is shown by a command', () => {
    const { panel } = made();
    attach(panel);
    act(() => MessageLoop.sendMessage(panel, Widget.Msg.ActivateRequest));
    expect(document.activeElement).toBe(panel.node);
  });

  it('lets go of all when it is disposed', () => {
    const { panel, past, model } = made();
    attach(panel);
    act(() => panel.dispose());
    expect(past.holders).toBe(0);
    model.change(null);
    expect(panel.isDisposed).toBe(true);
  });
});
