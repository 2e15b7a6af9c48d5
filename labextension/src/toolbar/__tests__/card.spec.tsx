// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import { act, fireEvent, render, screen, waitFor } from '@testing-library/react';
import * as React from 'react';

import { PoolError } from '../../api';
import { Card } from '../card';
import { OLD, READ } from '../hooks';
import { Ticker } from '../../ticker';
import { KernelWatch } from '../watch';
import { AGAIN } from '../../waits/hooks';
import {
  anOrder,
  detached,
  device,
  FakeContext,
  FakeModel,
  GIB,
  queued,
  session,
  trans
} from './fakes';

function card(
  model: FakeModel,
  onShowPool: (() => void) | null = null,
  context = new FakeContext()
) {
  const watch = new KernelWatch(
    model.asModel(),
    context.asContext(),
    trans,
    new Ticker()
  );
  render(
    <Card
      watch={watch}
      labelId="label"
      keepMinutes={10}
      onClose={jest.fn()}
      onShowPool={onShowPool}
    />
  );
  return watch;
}

afterEach(() => jest.useRealTimers());

const field = () =>
  screen.getByRole<HTMLInputElement>('textbox', { name: 'GPU memory' });
const slider = () => screen.getByRole<HTMLInputElement>('slider');
const press = (name: string) => fireEvent.click(screen.getByRole('button', { name }));
const type = (value: string) => fireEvent.change(field(), { target: { value } });
const alerted = () =>
  screen
    .getAllByRole('alert')
    .map(node => node.textContent)
    .join('');
const status = () =>
  screen
    .getAllByRole('status')
    .map(node => node.textContent)
    .join('');
// Drivers report capacities that are not a whole number of MiB. This limit is such a
// capacity.
const burst = { ...session().request, limit: 12.04 * GIB };

describe('the popover', () => {
  it('use, guarantee and limit of an active slice are shown', () => {
    card(new FakeModel(session({ request: burst })));
    screen.getByRole('heading', {
      name: 'This notebook uses 6 of 8 GiB on GPU 1 (emulated).'
    });
    screen.getByText('6 GiB used · 8 GiB guaranteed · up to 12 GiB');
    screen.getByText('EMULATED');
  });

  it('the granted size is shown if it is less than the request', () => {
    const request = { ...session().request, memory: 11 * GIB, limit: 11 * GIB };
    const granted_bytes = 5 * GIB;
    card(new FakeModel(session({ request, granted_bytes, used_bytes: GIB })));
    screen.getByText('1 GiB used · 5 GiB granted · 11 GiB asked for');
  });

  it.each([
    [detached, 'The kernel gets a slice of 8 GiB when a cell first uses CUDA.'],
    [
      { ...detached, attach: 'cell' as const },
      'The kernel gets a slice of 8 GiB when a cell runs.'
    ],
    [
      { ...detached, suspended_bytes: 6 * GIB },
      'Your data is safe in host memory; the next CUDA call brings it back.'
    ],
    [
      {
        ...detached,
        suspended_bytes: 6 * GIB,
        taken_reason: 'another kernel waits for memory'
      },
      'The pool took the slice while the kernel was idle: another kernel waits for memory.'
    ],
    [{ state: 'idle' as const, leaves_at: 1042 }, 'Idle, back to the pool in 0:42.'],
    [
      { state: 'idle' as const, wanted: true },
      'Idle: may move to host memory at any moment. Other kernels wait for this slice.'
    ],
    [{ state: 'idle' as const, pinned_reason: 'It maps a file.' }, 'It maps a file.'],
    [
      { state: 'idle' as const },
      'The kernel keeps the slice until another kernel needs it.'
    ],
    [{ state: 'idle' as const, leaves_at: 990 }, 'Idle on GPU 1, about to leave.'],
    [
      { state: 'idle' as const, stays_reason: 'State on this GPU cannot be moved.' },
      'State on this GPU cannot be moved.'
    ]
  ])('the popover describes a session with %p', (changes, words) => {
    card(new FakeModel(session(changes)));
    screen.getByText(words);
  });

  it('the popover says who paused the pool, and why', () => {
    const model = new FakeModel(session(queued));
    model.shows({ maintenance: [anOrder()] });
    card(model);
    screen.getByRole('heading', {
      name: 'This notebook waits for a GPU: the administrator has paused all GPUs (new driver).'
    });
  });

  it('a paused pool promises no GPU for the next call', () => {
    const model = new FakeModel(session({ ...detached, suspended_bytes: 6 * GIB }));
    model.shows({ maintenance: [anOrder()] });
    card(model);
    screen.getByText(
      'No kernel gets a GPU now: the administrator has paused all GPUs (new driver).'
    );
    screen.getByText('Your data is safe in host memory, and CPU work goes on.');
    expect(screen.queryByText(/brings it back/)).toBeNull();
  });

  it('the popover shows only the reason if an idle slice stays', () => {
    card(
      new FakeModel(session({ state: 'idle', stays_reason: 'Host memory is full.' }))
    );
    screen.getByText('Host memory is full.');
    expect(screen.queryByText(/until another kernel needs it/)).toBeNull();
  });

  it('the bytes on each of two devices are shown', () => {
    const model = new FakeModel(
      session({
        granted_bytes: 20 * GIB,
        devices: ['GPU-1', 'GPU-2'],
        slices: [
          { device: 'GPU-1', granted_bytes: 12 * GIB, used_bytes: 5 * GIB },
          { device: 'GPU-2', granted_bytes: 8 * GIB, used_bytes: null }
        ]
      })
    );
    model.shows({ devices: [device(1), device(2)] });
    card(model);
    screen.getByText('GPU 1: 5 of 12 GiB · GPU 2: 8 GiB');
  });

  it('the popover says that the server refuses access', () => {
    const model = new FakeModel(session());
    card(model);
    act(() => {
      model.broker = { status: 'away', message: 'No.', nextStep: '', denied: true };
      model.changed.emit({ all: true });
    });
    screen.getByRole('heading', { name: 'This page has no access to the GPU pool.' });
  });

  it('the popover says why the pool is away, and the last state', () => {
    const model = new FakeModel(session());
    card(model);
    act(() => model.away('No broker at its socket.', 'Start it.'));
    screen.getByText('No broker at its socket. Start it.');
    screen.getByText('Last known: 8 GiB on GPU 1.');
  });

  it('the popover says why the machine has no GPU', () => {
    const model = new FakeModel(session(detached));
    model.shows({ devices: [], problem: 'There is no NVIDIA driver.' });
    card(model);
    screen.getByText('There is no NVIDIA driver.');
    screen.getByText(
      'Kernels of the pool cannot start on this machine, but other kernels can.'
    );
    expect(screen.queryByRole('slider')).toBeNull();
  });

  it('a button shows the side panel', () => {
    const show = jest.fn();
    card(new FakeModel(session()), show);
    press('Show the pool');
    expect(show).toHaveBeenCalledTimes(1);
  });
});

describe('a request for memory', () => {
  it('the answer disappears when the request is granted', async () => {
    jest.useFakeTimers();
    const model = new FakeModel(session());
    const request = { ...session().request, memory: 12 * GIB };
    model.client.change.mockResolvedValue({ request, note: 'It waits for it.' });
    card(model);
    type('12');
    press('Ask for it');
    await act(() => Promise.resolve());
    expect(status()).toContain('It waits for it.');
    act(() => model.becomes({ request, granted_bytes: 12 * GIB }));
    act(() => jest.advanceTimersByTime(READ));
    expect(status()).not.toContain('It waits for it.');
  });

  it('a size is not marked as wrong if the pool is unreachable', async () => {
    const model = new FakeModel(session());
    model.client.change.mockRejectedValue(
      new PoolError('No broker.', 'broker-unavailable', 'See the doctor.', 503)
    );
    card(model);
    act(() => model.away());
    type('12');
    press('Ask for it');
    await waitFor(() => expect(alerted()).toContain('No broker.'));
    expect(alerted()).toContain('it starts again by itself');
    expect(field().getAttribute('aria-invalid')).toBe('false');
    act(() => model.back());
    expect(alerted()).toBe('');
    expect(field().value).toBe('12');
  });

  it('the present and the new size have the same notation', () => {
    const request = { ...session().request, memory: 8e9, limit: 8e9 };
    card(new FakeModel(session({ request })));
    expect(field().value).toBe('7.45');
    expect(slider().getAttribute('aria-valuetext')).toBe('7.45 GiB');
    screen.getByText(/Current request: 7\.45 GiB\.$/);
    type('0.0001');
    screen.getByText(/ New request: 0\.102 MiB\. Current request: 7\.45 GiB\.$/);
    expect(slider().getAttribute('aria-valuetext')).toBe('0.102 MiB');
    type('999999999999');
    press('Ask for it');
    expect(alerted()).toContain('is too much. You may ask for at most 24 GiB.');
  });

  it('the form shows the bound and the present size', () => {
    card(new FakeModel(session({ request: burst })));
    expect(field().value).toBe('8');
    screen.getByText(
      'You may ask for up to 24 GiB per GPU. ' +
        'Current request: 8 GiB. The slice may grow to 12 GiB while that much memory is free.'
    );
    expect(slider().getAttribute('aria-valuetext')).toBe('8 GiB');
    expect(slider().max).toBe('48');
  });

  it('a request for two devices has a separate bound per GPU', () => {
    const request = { ...session().request, devices: 2 };
    const model = new FakeModel(session({ request, most_bytes: 12 * GIB }));
    card(model);
    screen.getByText('You may ask for up to 12 GiB per GPU. Current request: 8 GiB.');
    expect(slider().max).toBe('24');
    fireEvent.change(screen.getByRole('textbox'), { target: { value: '13' } });
    press('Ask for it');
    expect(alerted()).toContain('at most 12 GiB');
    expect(model.client.change).not.toHaveBeenCalled();
  });

  it('the form sends a size and shows the answer', async () => {
    const model = new FakeModel(session());
    model.client.change.mockResolvedValue({
      request: { ...session().request, memory: 12 * GIB },
      note: 'The slice is 12 GiB now.'
    });
    card(model);
    fireEvent.change(slider(), { target: { value: '24' } });
    expect(field().value).toBe('12');
    press('Ask for it');
    await waitFor(() => expect(status()).toContain('The slice is 12 GiB now.'));
    expect(model.client.change).toHaveBeenCalledWith('k1', { memory: 12 * GIB });
    // The field shows the kernel's request again.
    act(() => model.becomes({ request: { ...burst, memory: 12 * GIB } }));
    act(() => model.becomes({ request: { ...burst, memory: 4 * GIB } }));
    expect(field().value).toBe('4');
  });

  it('the form shows a refusal, and keeps the typed text', async () => {
    const model = new FakeModel(session());
    model.client.change.mockRejectedValue(
      new PoolError('Your quota is 16 GiB.', 'over-quota', 'Ask for less.', 409)
    );
    card(model);
    type('20 GiB');
    press('Ask for it');
    await waitFor(() => expect(alerted()).toBe('Your quota is 16 GiB. Ask for less.'));
    expect(field().value).toBe('20 GiB');
    expect(field().getAttribute('aria-invalid')).toBe('true');
    type('16');
    expect(alerted()).toBe('');
  });

  it('the form explains bad input and sends nothing', () => {
    const model = new FakeModel(session());
    card(model);
    type('lots');
    press('Ask for it');
    expect(alerted()).toContain('“lots” is not a size');
    type('25');
    press('Ask for it');
    expect(alerted()).toContain('at most 24 GiB');
    expect(field().value).toBe('25');
    expect(model.client.change).not.toHaveBeenCalled();
  });

  it('the form does not send the present size, in any notation', () => {
    const model = new FakeModel(session());
    card(model);
    type('8 GiB');
    press('Ask for it');
    expect(status()).toContain('This notebook already asks for 8 GiB.');
    expect(model.client.change).not.toHaveBeenCalled();
  });

  it('the form keeps input and focus while the kernel changes', () => {
    const model = new FakeModel(session());
    card(model);
    const before = field();
    before.focus();
    type('10.');
    for (const changes of [
      queued,
      { state: 'idle' as const, leaves_at: 1030 },
      detached
    ]) {
      act(() => model.becomes({ ...changes, id: 's2' }));
    }
    // While a kernel restarts, it has no session.
    act(() => model.shows({ sessions: [] }));
    expect(screen.queryByRole('button', { name: 'Release now' })).toBeNull();
    act(() => model.becomes({ ...detached, id: 's3' }));
    act(() => model.away());
    act(() => model.back());
    expect(field()).toBe(before);
    expect(document.activeElement).toBe(before);
    expect(before.value).toBe('10.');
  });
});

describe('a release or a keep', () => {
  it('the popover releases a slice, and shows the answer', async () => {
    const model = new FakeModel(session());
    model.client.release.mockResolvedValue({
      note: 'The slice goes back when the running cell is done.'
    });
    card(model);
    press('Release now');
    await waitFor(() => expect(status()).toContain('when the running cell is done'));
    expect(model.client.release).toHaveBeenCalledWith('k1');
    // The answer is about the old state. After `READ` milliseconds the user has had
    // time to read it, so it disappears.
    jest.useFakeTimers();
    act(() => model.becomes(detached));
    act(() => jest.advanceTimersByTime(READ));
    expect(status()).not.toContain('running cell');
  });

  it('the popover removes an old answer', async () => {
    jest.useFakeTimers();
    const model = new FakeModel(session());
    model.client.release.mockResolvedValue({ note: 'It stays.' });
    card(model);
    press('Release now');
    await act(() => Promise.resolve());
    act(() => jest.advanceTimersByTime(OLD - 1));
    expect(status()).toContain('It stays.');
    act(() => jest.advanceTimersByTime(1));
    expect(status()).not.toContain('It stays.');
  });

  it('the popover removes a refusal after a change of state', async () => {
    jest.useFakeTimers();
    const model = new FakeModel(session());
    model.client.release.mockRejectedValue(new PoolError('Not now.', 'busy', '', 409));
    card(model);
    press('Release now');
    await act(() => Promise.resolve());
    act(() => model.becomes({ state: 'idle' }));
    act(() => jest.advanceTimersByTime(READ - 1));
    expect(alerted()).toBe('Not now.');
    act(() => jest.advanceTimersByTime(1));
    expect(alerted()).toBe('');
  });

  it('the popover shows a pending release and how to cancel it', () => {
    const model = new FakeModel(session());
    card(model);
    expect(screen.queryByText(/^Goes back/)).toBeNull();
    act(() => model.becomes({ release_asked: true }));
    screen.getByText(
      'Goes back to the pool when its work on the GPU is done. To cancel this, keep the slice.'
    );
    const button = screen.getByRole('button', { name: 'Release now' });
    expect(button.getAttribute('aria-disabled')).toBe('true');
    fireEvent.click(button);
    expect(model.client.release).not.toHaveBeenCalled();
    act(() => model.becomes({ ...detached, release_asked: false }));
    expect(screen.queryByText(/To cancel this/)).toBeNull();
  });

  it('the popover does not show a keep that has ended', () => {
    jest.useFakeTimers();
    const model = new FakeModel(session({ keep_until: 1600 }));
    card(model);
    screen.getByText(/^The slice is kept until/);
    model.time = 1600;
    act(() => jest.advanceTimersByTime(600_050));
    expect(screen.queryByText(/^The slice is kept until/)).toBeNull();
    screen.getByRole('button', { name: 'Keep for 10 minutes' });
  });

  it('the release button says why there is nothing to release', () => {
    const model = new FakeModel(session(detached));
    card(model);
    const button = screen.getByRole('button', { name: 'Release now' });
    expect(button.getAttribute('aria-disabled')).toBe('true');
    fireEvent.click(button);
    expect(status()).toContain('The kernel has no slice to give back.');
    expect(model.client.release).not.toHaveBeenCalled();
  });

  it('a keep has the minutes of the settings, and can be stopped', async () => {
    const model = new FakeModel(session());
    model.client.keep.mockResolvedValue({ note: 'Kept.' });
    card(model);
    press('Keep for 10 minutes');
    await waitFor(() => expect(model.client.keep).toHaveBeenLastCalledWith('k1', 600));
    act(() => model.becomes({ keep_until: model.time + 600 }));
    expect(status()).toMatch(
      /^The slice is kept until [^.]*, even while the kernel is idle\.$/
    );
    press('Stop keeping');
    await waitFor(() => expect(model.client.keep).toHaveBeenLastCalledWith('k1', 0));
    await waitFor(() =>
      expect(
        screen
          .getByRole('button', { name: 'Stop keeping' })
          .getAttribute('aria-disabled')
      ).toBe('false')
    );
  });
});

describe('a kernel without a slice', () => {
  it('a kernel without a slice shows no keep and no keep button', () => {
    card(new FakeModel(session({ ...detached, keep_until: 5000 })));
    expect(screen.queryByRole('button', { name: /keep/i })).toBeNull();
    expect(screen.queryByText(/^The slice is kept until/)).toBeNull();
  });

  it('a kernel without a slice can get one, or says why not', async () => {
    const context = new FakeContext();
    const requestExecute = jest.fn(() => ({
      done: Promise.resolve({ content: { status: 'error', evalue: 'No GPU.' } }),
      dispose: jest.fn()
    }));
    Object.assign(context.session!.kernel, {
      info: Promise.resolve({ language_info: { name: 'python' } }),
      requestExecute
    });
    card(new FakeModel(session(detached)), null, context);
    press('Get a GPU now');
    await waitFor(() => expect(alerted()).toBe('No GPU.'));
    expect(requestExecute).toHaveBeenCalledTimes(1);
  });

  it('a kernel that waits or has a slice has no "Get a GPU now"', () => {
    const model = new FakeModel(session(queued));
    card(model);
    expect(screen.queryByRole('button', { name: 'Get a GPU now' })).toBeNull();
    act(() => model.becomes({}));
    expect(screen.queryByRole('button', { name: 'Get a GPU now' })).toBeNull();
  });
});

describe('a slice that is nearly full', () => {
  const text =
    'The slice is nearly full: ask for more memory, or free some in the kernel.';

  it.each([
    [7.1, 8, false],
    [7.2, 8, true],
    [7.9, 12, false],
    [10.8, 12, true]
  ])('the note for %p GiB in use and a limit of %p GiB: %p', (used, limit, full) => {
    const request = { ...session().request, limit: limit * GIB };
    const granted_bytes = Math.max(8, used) * GIB;
    card(new FakeModel(session({ request, granted_bytes, used_bytes: used * GIB })));
    expect(screen.queryByText(text) !== null).toBe(full);
  });
});

describe('the lines of the broker', () => {
  const lines = ['It is 2nd of 3 in the queue: all 39 GiB in use by running cells.'];

  it('the broker’s lines say why a kernel waits', async () => {
    const model = new FakeModel(session(queued));
    model.client.why.mockResolvedValue({ lines });
    card(model);
    screen.getByRole('heading', { name: 'Why am I waiting?' });
    screen.getByRole('button', { name: 'Stop waiting' });
    await screen.findByText(lines[0]!);
  });

  it('the broker’s lines say what other machines have', async () => {
    const model = new FakeModel(session(queued));
    const machines = ['gpu2: no, at most 3 GiB is free on a GPU (NVIDIA A100).'];
    model.client.why.mockResolvedValue({ lines, machines });
    card(model);
    fireEvent.click(await screen.findByText('Other machines'));
    screen.getByText(machines[0]!);
  });

  it('the broker’s lines say who may take a slice', async () => {
    const model = new FakeModel(session());
    model.client.why.mockResolvedValue({ lines: ['No kernel waits for this GPU.'] });
    card(model);
    screen.getByRole('heading', { name: 'Who may take this slice?' });
    await screen.findByText('No kernel waits for this GPU.');
    expect(screen.queryByRole('button', { name: 'Stop waiting' })).toBeNull();
  });

  it('no lines are requested if a kernel has no slice and no wait', () => {
    const model = new FakeModel(session(detached));
    card(model);
    expect(model.client.why).not.toHaveBeenCalled();
  });

  it('the lines are fetched again after a queue move or an interval', async () => {
    jest.useFakeTimers();
    const model = new FakeModel(session(queued));
    model.client.why.mockResolvedValue({ lines });
    card(model);
    await act(() => jest.advanceTimersByTimeAsync(1));
    expect(model.client.why).toHaveBeenCalledTimes(1);
    act(() => model.becomes({ ...queued, idle_seconds: 3 }));
    expect(model.client.why).toHaveBeenCalledTimes(1);
    model.client.why.mockResolvedValue({ lines: ['It is 1st of 3 in the queue.'] });
    await act(() => {
      model.becomes({ ...queued, queue_position: 1 });
      return jest.advanceTimersByTimeAsync(1);
    });
    screen.getByText('It is 1st of 3 in the queue.');
    expect(model.client.why).toHaveBeenCalledTimes(2);
    await act(() => jest.advanceTimersByTimeAsync(AGAIN));
    expect(model.client.why).toHaveBeenCalledTimes(3);
  });

  it('the broker’s lines show shares and budgets', () => {
    const standing = [
      'Your group is bio.',
      'You have 70 of 100 GPU-seconds left today.'
    ];
    card(new FakeModel(session({ ...detached, standing })));
    screen.getByRole('heading', { name: 'My share' });
    standing.forEach(line => screen.getByText(line));
  });

  it('the popover says why a kernel was preempted', () => {
    const preempted = 'a kernel of a higher priority class needs the GPU';
    card(new FakeModel(session({ ...queued, preempted, suspended_bytes: GIB })));
    screen.getByRole('heading', {
      name: 'The pool took the GPU from this notebook. The notebook will continue by itself.'
    });
    screen.getByText('A kernel of a higher priority class needs the GPU.');
    screen.getByText('The kernel’s state is in host memory, and nothing is lost.');
  });
});
