// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import {
  act,
  fireEvent,
  render,
  screen,
  waitFor,
  within
} from '@testing-library/react';
import * as React from 'react';

import { aDevice, NOW, trans } from '../../__tests__/defaults';
import type { IAdmin, PoolClient } from '../../api';
import { PoolError } from '../../api';
import { OLD } from '../../toolbar/hooks';
import { Orders } from '../orders';
import { AdminPage } from '../table';
import { session, view } from './sessions';

/** Wait for JupyterLab's dialog; return its element. */
const dialog = () =>
  waitFor(() => {
    const found = document.querySelector<HTMLElement>('.jp-Dialog');
    expect(found).not.toBeNull();
    return found!;
  });

/**
 * Press a button of the dialog. Then wait until the dialog disappears; with `stays`, do
 * not wait.
 */
async function answer(accept: boolean, stays = false): Promise<void> {
  const shown = await dialog();
  const button = accept ? '.jp-mod-accept' : '.jp-mod-reject';
  fireEvent.click(shown.querySelector(`.jp-Dialog-footer ${button}`)!);
  if (!stays) {
    await waitFor(() => expect(shown.isConnected).toBe(false));
  }
}

const told = (text: string) =>
  waitFor(() => expect(screen.getByRole('status').textContent).toBe(text));

const sessions = () => [
  session(),
  session({ id: 'bb', label: 'late.ipynb', recall_at: NOW + 60 })
];

it('the admin’s page shows GPUs, waits, utilisation, emulation', () => {
  const found = view([
    session({ granted_bytes: 1 }),
    session({ id: 'bb', state: 'queued', granted_bytes: 0 })
  ]);
  const props = {
    trans,
    orders: new Orders({} as unknown as PoolClient, trans),
    fault: '',
    model: { now: () => NOW },
    refresh: () => undefined
  };
  const { rerender } = render(<AdminPage {...props} view={found} />);
  screen.getByText('1 GPU · 1 kernel has a slice · 1 waits');
  expect(screen.getByRole('list', { name: 'GPUs' }).textContent).toContain('43 % busy');
  expect(screen.queryByText('EMULATED')).toBeNull();
  const devices = found.devices.map(device => ({ ...device, emulated: true }));
  rerender(<AdminPage {...props} view={{ ...found, devices }} />);
  within(screen.getByRole('heading')).getByText('EMULATED');
});

function show() {
  const asked: string[] = [];
  const note = (text: string) => {
    asked.push(text);
    return Promise.resolve({ note: `Done: ${text}` });
  };
  const client = {
    adminRecall: (...args: unknown[]) => note(`recall ${args.join(' ')}`),
    adminKeep: (id: string) => note(`keep ${id}`),
    adminEnd: () =>
      Promise.reject(new PoolError('Not allowed.', 'not-allowed', 'Ask root.', 403))
  } as unknown as PoolClient;
  let refreshed = 0;
  const page = (now: IAdmin) => (
    <AdminPage
      trans={trans}
      orders={new Orders(client, trans)}
      view={now}
      fault=""
      model={{ now: () => NOW }}
      refresh={() => {
        refreshed += 1;
      }}
    />
  );
  const { rerender } = render(page(view(sessions())));
  return {
    asked,
    refreshed: () => refreshed,
    becomes: (now: IAdmin) => rerender(page(now))
  };
}

const press = async (name: string) => {
  await act(async () => {
    fireEvent.click(screen.getByRole('button', { name }));
    await Promise.resolve();
  });
};

describe('the page of admins', () => {
  it('a click on a header sorts the table and marks the column', () => {
    show();
    const header = (name: RegExp) => screen.getByRole('columnheader', { name });
    expect(header(/^Wasted/).getAttribute('aria-sort')).toBe('descending');
    fireEvent.click(within(header(/^User/)).getByRole('button'));
    expect(header(/^User/).getAttribute('aria-sort')).toBe('ascending');
    fireEvent.click(within(header(/^User/)).getByRole('button'));
    expect(header(/^User/).getAttribute('aria-sort')).toBe('descending');
    expect(header(/^Wasted/).getAttribute('aria-sort')).toBeNull();
  });

  it.each(['', '0', '-3'])('the page sends no order for %p minutes', async typed => {
    const { asked } = show();
    await press('Take the slice of work.ipynb back');
    const minutes = within(await dialog()).getByLabelText('Minutes until then');
    fireEvent.input(minutes, { target: { value: typed } });
    within(await dialog()).getByText(/^Type a whole number of minutes/);
    await answer(true, true);
    expect(asked).toEqual([]);
    // The dialog stays open until the admin types a valid number or cancels.
    within(await dialog()).getByText(/^Type a whole number of minutes/);
    await answer(false);
    expect(asked).toEqual([]);
  });

  it('the page asks, sends an order, and shows the answer', async () => {
    const { asked, refreshed } = show();
    await press('Take the slice of work.ipynb back');
    const fields = within(await dialog());
    fireEvent.input(fields.getByLabelText('Minutes until then'), {
      target: { value: '15' }
    });
    fireEvent.input(fields.getByLabelText(/^Reason/), { target: { value: 'a class' } });
    fields.getByText('Take it back');
    await answer(true);
    await told('work.ipynb: Done: recall aa 15 a class');
    expect(asked).toEqual(['recall aa 15 a class']);
    expect(refreshed()).toBe(1);
  });

  it('the page cancels a recall, and shows a refusal', async () => {
    const { asked } = show();
    screen.getByText(/^Goes back at /);
    await press('Let late.ipynb keep its slice');
    await told('late.ipynb: Done: keep bb');
    expect(asked).toEqual(['keep bb']);
    await press('Shut down work.ipynb');
    await answer(true);
    await told('work.ipynb: Not allowed. Ask root.');
  });

  it('the page removes an answer after some time', async () => {
    show();
    await press('Let late.ipynb keep its slice');
    await told('late.ipynb: Done: keep bb');
    jest.useFakeTimers();
    // The timer that removes an answer starts when the answer appears. The first answer
    // has a real timer, so give the order again with fake timers.
    await press('Let late.ipynb keep its slice');
    act(() => jest.advanceTimersByTime(OLD));
    expect(screen.getByRole('status').textContent).toBe('');
    jest.useRealTimers();
  });

  it('the enter key alone does not end a kernel', async () => {
    const { asked } = show();
    await press('Shut down work.ipynb');
    const shown = await dialog();
    within(shown).getByText(
      'The variables of the kernel are lost, but its files are kept.'
    );
    expect(document.activeElement?.textContent).toBe('Cancel');
    await answer(false);
    expect(asked).toEqual([]);
  });

  it('a row says why a kernel waits, and for how long', () => {
    const { becomes } = show();
    const waits = {
      state: 'queued' as const,
      granted_bytes: 0,
      queued_at: NOW - 25,
      wait_reason: 'at most 2 GiB is free on a GPU'
    };
    const row = () => screen.getByRole('row', { name: /^work\.ipynb/ }).textContent;
    becomes(view([session(waits)]));
    expect(row()).toContain(
      'Waits for 4 GiB · no estimate yetAt most 2 GiB is free on a GPU.'
    );
    expect(row()).toContain('20 s');
    becomes(
      view([session({ ...waits, expected: { since: NOW + 5, until: NOW + 9 } })])
    );
    expect(row()).toContain('Waits for 4 GiB · 5 to 10 s left');
  });

  it('the focus stays on the row if its button disappears', () => {
    const { becomes } = show();
    const button = (name: string) => screen.getByRole('button', { name });
    button('GPU 0: Pause…').focus();
    const order = {
      device: aDevice().uuid,
      kind: 'pause' as const,
      text: 'paused by the administrator'
    };
    becomes({ ...view(sessions()), maintenance: [order] });
    expect(document.activeElement).toBe(button('GPU 0: Put back…'));
    // The row of the focused button disappears, so the page's element gets the focus.
    button('Shut down late.ipynb').focus();
    becomes({ ...view(sessions().slice(0, 1)), maintenance: [order] });
    expect(document.activeElement?.className).toBe('jp-gpupool-adminPage');
    // If an element outside the admin's page has the focus, it keeps the focus.
    button('Shut down work.ipynb').focus();
    const elsewhere = document.body.appendChild(document.createElement('button'));
    elsewhere.focus();
    becomes(view([]));
    expect(document.activeElement).toBe(elsewhere);
    elsewhere.remove();
  });
});
