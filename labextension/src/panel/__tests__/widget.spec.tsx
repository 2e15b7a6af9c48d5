// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import { MessageLoop } from '@lumino/messaging';
import { Widget } from '@lumino/widgets';
import { act, screen } from '@testing-library/react';

import { drawn } from '../../__tests__/drawn';
import * as describing from '../describe';
import { PanelWidget } from '../widget';
import {
  device,
  FakeDocuments,
  FakeModel,
  FakePast,
  FakeSettings,
  mine,
  NOW,
  pool,
  trans
} from './fakes';

function made(changed: Partial<FakeModel> = {}) {
  const model = Object.assign(new FakeModel(pool([device(0)], [mine('a')])), changed);
  const past = new FakePast();
  const documents = new FakeDocuments();
  const settings = new FakeSettings();
  const panel = new PanelWidget({ model, past, settings, documents, trans });
  return { model, past, documents, panel };
}

describe('PanelWidget', () => {
  let open: PanelWidget | null = null;

  function attach(panel: PanelWidget): void {
    open = panel;
    drawn(() => Widget.attach(panel, document.body));
  }

  afterEach(() => {
    drawn(() => open?.dispose());
    open = null;
  });

  it('the panel has a name and an icon', () => {
    const { panel } = made();
    attach(panel);
    expect(panel.id).toBe('jp-gpupool-panel');
    expect(panel.title.caption).toBe('GPU Pool');
    expect(panel.title.icon).toBeTruthy();
    screen.getByRole('region', { name: 'GPU Pool' });
  });

  it('the panel draws the data of the model and the documents', () => {
    const { panel, model, documents } = made();
    attach(panel);
    screen.getByRole('button', { name: 'Release the slice of label of a' });
    documents.names.set('kernel-a', { name: 'a.ipynb', path: 'a.ipynb' });
    drawn(() => documents.changed.emit());
    screen.getByRole('button', { name: 'Release the slice of a.ipynb' });
    drawn(() => model.change(pool([device(0), device(1)])));
    expect(screen.getAllByRole('img', { name: / in slices, / })).toHaveLength(2);
  });

  it('the panel draws, fetches and counts nothing while hidden', () => {
    jest.useFakeTimers();
    try {
      const { panel, model, past } = made();
      panel.hide();
      attach(panel);
      const summary = jest.spyOn(describing, 'summary');
      drawn(() => model.change(pool([device(0)])));
      expect(panel.node.childElementCount).toBe(0);
      expect([past.holders, model.refreshed]).toEqual([0, 0]);

      const idle = mine('a', { state: 'idle', leaves_at: NOW + 9 });
      drawn(() => model.change(pool([device(0)], [idle])));
      drawn(() => panel.show());
      expect(summary).toHaveBeenCalledTimes(1);
      expect(past.holders).toBe(1);
      act(() => jest.advanceTimersByTime(1));
      expect(jest.getTimerCount()).toBe(1);

      drawn(() => panel.hide());
      expect(past.holders).toBe(0);
      expect(jest.getTimerCount()).toBe(0);
      drawn(() => model.change(pool([device(0), device(1)], [idle])));
      expect(summary).toHaveBeenCalledTimes(1);

      drawn(() => panel.show());
      expect(screen.getAllByRole('img', { name: / in slices, / })).toHaveLength(2);
    } finally {
      jest.useRealTimers();
    }
  });

  it('without a kernel, the panel fetches each time it is shown', () => {
    const { panel, model, past } = made({ live: false });
    panel.hide();
    attach(panel);
    expect(model.refreshed).toBe(0);
    drawn(() => panel.show());
    expect(model.refreshed).toBe(1);
    drawn(() => panel.hide());
    drawn(() => panel.show());
    expect(model.refreshed).toBe(2);
    expect(past.holders).toBe(1);
  });

  it('the panel shows no kernel after the last kernel has ended', () => {
    const { panel, model } = made();
    attach(panel);
    screen.getByRole('button', { name: 'Release the slice of label of a' });
    screen.getByText('1 GPU · 1 kernel has a slice · 0 wait');
    // When the last kernel ends, the page closes its websocket, often before a message
    // reports the end. So the view still contains the kernel.
    model.live = false;
    drawn(() => model.changed.emit({ all: true }));
    expect(screen.queryByText('label of a')).toBeNull();
    expect(screen.queryByRole('button', { name: /^Release/ })).toBeNull();
    screen.getByText('1 GPU · 0 kernels have a slice · 0 wait');
    screen.getByText(/^No Pooled GPU kernel is open/);
  });

  it('the panel does not fetch while the model is live', () => {
    const { panel, model } = made();
    attach(panel);
    expect(model.refreshed).toBe(0);
  });

  it('the panel takes the focus when a command shows it', () => {
    const { panel } = made();
    attach(panel);
    drawn(() => MessageLoop.sendMessage(panel, Widget.Msg.ActivateRequest));
    expect(document.activeElement).toBe(panel.node);
  });

  it('a disposed panel holds nothing and follows no signal', () => {
    const { panel, past, model, documents } = made();
    attach(panel);
    const update = jest.spyOn(panel, 'update').mockImplementation(() => undefined);
    // A disposed widget never draws, even if it still gets signals. So check that a
    // signal causes no call of `update` or `isVisible`.
    const asked = jest.spyOn(panel, 'isVisible', 'get').mockReturnValue(true);
    model.changed.emit({ all: true });
    documents.changed.emit();
    expect(update).toHaveBeenCalledTimes(2);
    drawn(() => panel.dispose());
    update.mockClear();
    asked.mockClear();
    model.changed.emit({ all: true });
    documents.changed.emit();
    expect([update, asked].map(spy => spy.mock.calls.length)).toEqual([0, 0]);
    expect(past.holders).toBe(0);
  });
});
