// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import { act, fireEvent, render, screen, waitFor } from '@testing-library/react';
import * as React from 'react';

import type { IExplanation, ISession } from '../api';
import { FakeModel, GIB, queued, session, trans } from '../toolbar/__tests__/fakes';
import { WaitActions } from '../waits/actions';
import { WAIT_TYPE, waitFactory } from '../waits/output';
import { aSession } from './defaults';

const alpha = (changes: Partial<ISession> = {}) =>
  aSession({
    id: 's2',
    kernel_id: 'k2',
    label: 'alpha.ipynb',
    devices: ['GPU-1'],
    granted_bytes: 6 * GIB,
    ...changes
  });

const plan = (changes: Partial<IExplanation> = {}): IExplanation => ({
  lines: [],
  standing: [],
  starts_with_bytes: 3 * GIB,
  holders: [
    { session: 's2', own: true, bytes: 6 * GIB, use: 'busy' },
    { session: 's3', own: false, bytes: 5 * GIB, use: 'busy' }
  ],
  ...changes
});

function actions(model: FakeModel, found: IExplanation | null = plan()) {
  render(
    <WaitActions
      trans={trans}
      model={model.asModel()}
      session={model.session('k1')!}
      plan={found}
    />
  );
}

const buttons = () => screen.getAllByRole('button').map(node => node.textContent);
const press = async (name: string) => {
  await act(async () => {
    fireEvent.click(screen.getByRole('button', { name }));
    await Promise.resolve();
  });
};

describe('the buttons of a waiting kernel', () => {
  it('a waiting kernel has its four buttons, and they work', async () => {
    const model = new FakeModel(session(queued), alpha());
    model.client.change.mockResolvedValue({ request: {}, note: 'It starts.' });
    actions(model);
    expect(buttons()).toEqual([
      'Start now with 3 GiB',
      'Stop waiting',
      'Tell me when it starts',
      'Release'
    ]);
    screen.getByText('alpha.ipynb (yours) holds 6 GiB');
    await press('Start now with 3 GiB');
    expect(model.client.change).toHaveBeenCalledWith('k1', { memory: 3 * GIB });
    await press('Release the GPU of alpha.ipynb');
    expect(model.client.release).toHaveBeenCalledWith('k2');
    await press('Stop waiting');
    expect(model.client.interrupt).toHaveBeenCalledWith('k1');
    screen.getByText('The kernel is interrupted.');
  });

  it('a button is missing if its action is not possible', () => {
    actions(
      new FakeModel(session({ ...queued, here: false })),
      plan({ starts_with_bytes: null })
    );
    expect(buttons()).toEqual(['Tell me when it starts']);
  });

  it('a pending release cannot be requested again', () => {
    actions(new FakeModel(session(queued), alpha({ release_asked: true })));
    screen.getByText(
      'alpha.ipynb (yours) gives 6 GiB back when its work on the GPU is done.'
    );
    expect(buttons()).not.toContain('Release');
  });

  it('a leaving kernel or a missing plan hides the release button', () => {
    const gone = alpha({ state: 'detaching' });
    actions(new FakeModel(session(queued), gone));
    expect(buttons()).not.toContain('Release');
    actions(new FakeModel(session(queued), alpha()), null);
    expect(screen.queryByText(/alpha/)).toBeNull();
  });
});

describe('a notice of the start', () => {
  const shown: string[] = [];

  class FakeNotification {
    static permission = 'default';
    static asked = 0;
    static answer = 'granted';

    static requestPermission() {
      FakeNotification.asked += 1;
      FakeNotification.permission = FakeNotification.answer;
      return Promise.resolve(FakeNotification.answer);
    }

    constructor(text: string) {
      shown.push(text);
    }
  }

  beforeEach(() => {
    shown.length = FakeNotification.asked = 0;
    FakeNotification.permission = 'default';
    (globalThis as { Notification?: unknown }).Notification = FakeNotification;
  });

  afterEach(() => {
    delete (globalThis as { Notification?: unknown }).Notification;
  });

  it('the notice asks for permission on a click and appears once', async () => {
    const model = new FakeModel(session({ ...queued, label: 'beta.ipynb' }));
    actions(model);
    expect(FakeNotification.asked).toBe(0);
    await press('Tell me when it starts');
    expect(FakeNotification.asked).toBe(1);
    screen.getByText('You will get a notice when it starts.');
    act(() => model.becomes({ ...queued, queue_position: 1 }));
    expect(shown).toEqual([]);
    act(() => model.becomes({ state: 'active' }));
    act(() => model.becomes({ state: 'idle' }));
    expect(shown).toEqual(['beta.ipynb has its GPU.']);
  });

  it('no notice appears if the user stopped the wait', async () => {
    const model = new FakeModel(session(queued));
    actions(model);
    await press('Tell me when it starts');
    act(() => model.becomes({ state: 'detached', granted_bytes: 0, devices: [] }));
    act(() => model.becomes({ state: 'active' }));
    expect(shown).toEqual([]);
  });

  it('without permission, the notice appears inside JupyterLab', async () => {
    FakeNotification.answer = 'denied';
    actions(new FakeModel(session(queued)));
    await press('Tell me when it starts');
    screen.getByText(
      /^Your browser blocks notifications, so this page shows a message/
    );
    FakeNotification.answer = 'granted';
  });
});

describe('the output of a waiting cell', () => {
  it('a waiting cell shows the agent’s line and its buttons', async () => {
    const model = new FakeModel(session(queued));
    model.client.why.mockResolvedValue(plan({ holders: [] }));
    const widget = waitFactory(model.asModel(), trans).createRenderer({} as never);
    document.body.append(widget.node);
    const data = { session: 's1', text: 'Waiting for 8 GiB.', hint: 'Interrupt it.' };
    await act(async () => {
      await widget.renderModel({ data: { [WAIT_TYPE]: data } } as never);
    });
    screen.getByText('Waiting for 8 GiB.');
    await waitFor(() => screen.getByRole('button', { name: 'Start now with 3 GiB' }));
    act(() => model.becomes({ state: 'active' }));
    expect(screen.queryByRole('button')).toBeNull();
    screen.getByText('Interrupt it.');
    widget.dispose();
  });
});
