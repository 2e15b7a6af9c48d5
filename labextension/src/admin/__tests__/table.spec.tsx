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

/** A busy machine takes its time. */
const PATIENCE = { timeout: 20_000 };
jest.setTimeout(60_000);

/** The dialog of JupyterLab, once it is in the page. */
const dialog = () =>
  waitFor(() => {
    const found = document.querySelector<HTMLElement>('.jp-Dialog');
    expect(found).not.toBeNull();
    return found!;
  }, PATIENCE);

/** Press a button of the dialog, which then goes, unless it `stays`. */
async function answer(accept: boolean, stays = false): Promise<void> {
  const shown = await dialog();
  const button = accept ? '.jp-mod-accept' : '.jp-mod-reject';
  fireEvent.click(shown.querySelector(`.jp-Dialog-footer ${button}`)!);
  if (!stays) {
    await waitFor(() => expect(shown.isConnected).toBe(false), PATIENCE);
  }
}

const told = (text: string) =>
  waitFor(() => expect(screen.getByRole('status').textContent).toBe(text), PATIENCE);

const sessions = () => [
  session(),
  session({ id: 'bb', label: 'late.ipynb', recall_at: NOW + 60 })
];

it('says how many have a GPU and wait, how busy each is, and what is emulated', () => {
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
  screen.getByText('1 GPU · 1 kernel has one · 1 waits');
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
  it('sorts by a click, and says so', () => {
    show();
    const header = (name: RegExp) => screen.getByRole('columnheader', { name });
    expect(header(/^Wasted/).getAttribute('aria-sort')).toBe('descending');
    fireEvent.click(within(header(/^User/)).getByRole('button'));
    expect(header(/^User/).getAttribute('aria-sort')).toBe('ascending');
    fireEvent.click(within(header(/^User/)).getByRole('button'));
    expect(header(/^User/).getAttribute('aria-sort')).toBe('descending');
    expect(header(/^Wasted/).getAttribute('aria-sort')).toBeNull();
  });

  it.each(['', '0', '-3'])('takes no slice for %p minutes', async typed => {
    const { asked } = show();
    await press('Take the slice of work.ipynb back');
    const minutes = within(await dialog()).getByLabelText('Minutes until then');
    fireEvent.input(minutes, { target: { value: typed } });
    within(await dialog()).getByText(/^Type a whole number of minutes/);
    await answer(true, true);
    expect(asked).toEqual([]);
    // It asks on, until there is a number or the admin gives up.
    within(await dialog()).getByText(/^Type a whole number of minutes/);
    await answer(false);
    expect(asked).toEqual([]);
  });

  it('sends an order after the question, and shows the answer', async () => {
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

  it('drops a recall, and shows a refusal', async () => {
    const { asked } = show();
    screen.getByText(/^Taken back at /);
    await press('Let late.ipynb keep its slice');
    await told('late.ipynb: Done: keep bb');
    expect(asked).toEqual(['keep bb']);
    await press('Shut down work.ipynb');
    await answer(true);
    await told('work.ipynb: Not allowed. Ask root.');
  });

  it('forgets an answer when its time is over', async () => {
    show();
    await press('Let late.ipynb keep its slice');
    await told('late.ipynb: Done: keep bb');
    jest.useFakeTimers();
    // The clock of the answer starts with it.
    await press('Let late.ipynb keep its slice');
    act(() => jest.advanceTimersByTime(OLD));
    expect(screen.getByRole('status').textContent).toBe('');
    jest.useRealTimers();
  });

  it('ends no kernel by the enter key alone', async () => {
    const { asked } = show();
    await press('Shut down work.ipynb');
    const shown = await dialog();
    within(shown).getByText('The variables of the kernel are lost. Its files are not.');
    expect(document.activeElement?.textContent).toBe('Cancel');
    await answer(false);
    expect(asked).toEqual([]);
  });

  it('says why a kernel waits, for how long, and how long it will', () => {
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

  it('keeps the focus on the row of a button that goes', () => {
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
    // The button is another one, and the place is the same.
    button('Shut down late.ipynb').focus();
    becomes({ ...view(sessions().slice(0, 1)), maintenance: [order] });
    expect(document.activeElement?.className).toBe('jp-gpupool-adminPage');
    // The admin works elsewhere: nothing draws the focus back.
    button('Shut down work.ipynb').focus();
    const elsewhere = document.body.appendChild(document.createElement('button'));
    elsewhere.focus();
    becomes(view([]));
    expect(document.activeElement).toBe(elsewhere);
    elsewhere.remove();
  });
});
