// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import type { ISession } from '../api';
import {
  about,
  bytes,
  clock,
  dayAndTime,
  goesBack,
  goingBack,
  gpus,
  grant,
  localTime,
  ordinal,
  part,
  range,
  say,
  timeOfDay,
  waited,
  waitSentence,
  waitTime
} from '../words';
import { aDevice, aSession, GIB, trans } from './defaults';
import SIZES from './sizes.json';
import WAITS from './waits.json';

const MIB = 1024 ** 2;
describe('sizes', () => {
  test.each(SIZES.printed as [number, string][])('%p bytes in words', (value, text) => {
    expect(bytes(value)).toBe(text);
  });

  test.each(SIZES.granted as [number, number, string][])(
    '%p bytes with %p guaranteed bytes have the right text',
    (granted, guaranteed, text) => {
      expect(grant(trans, granted, guaranteed)).toBe(text);
    }
  );

  test('two sizes with the same unit show the unit only once', () => {
    expect(part(trans, 6 * GIB, 8 * GIB)).toBe('6 of 8 GiB');
    expect(part(trans, 512 * MIB, 8 * GIB)).toBe('512 MiB of 8 GiB');
    expect(part(trans, 0, 512 * MIB)).toBe('0 of 512 MiB');
  });
});

describe('times', () => {
  test.each([
    [-3, '0:00'],
    [0.2, '0:01'],
    [59.5, '1:00'],
    [725, '12:05'],
    [3725, '1:02:05']
  ])('a count-down from %p s has the right text', (seconds, text) => {
    expect(clock(seconds)).toBe(text);
  });

  test.each([
    [0.2, '~1 s'],
    [89, '~89 s'],
    [90, '~2 min'],
    [7200, '~2 h']
  ])('an estimate of %p s has the right text', (seconds, text) => {
    expect(about(trans, seconds)).toBe(text);
  });

  test.each(WAITS.left as [number, number, string][])(
    'an expected wait of %p to %p s has the right text',
    (least, most, text) => {
      expect(range(trans, least, most)).toBe(text);
    }
  );

  test.each(WAITS.waited as [number, string][])('a wait of %p s so far', (so, text) => {
    expect(waited(trans, so)).toBe(text);
  });

  test('the broker’s times become times of this computer’s clock', () => {
    jest.spyOn(Date, 'now').mockReturnValue(50_000_000);
    // This computer's clock shows 50,000 s, and the broker's clock shows 1,000 s. Both
    // clocks run at the same speed.
    expect(localTime({ now: () => 1000 }, 1040).getTime()).toBe(50_040_000);
  });

  test('a time of day has the format of the interface’s language', () => {
    const time = new Date(2026, 10, 21, 14, 2, 35);
    const of = (locale: string, seconds = false) =>
      timeOfDay({ ...trans, locale } as never, time, seconds).replace(/\s/g, ' ');
    jest.spyOn(navigator, 'languages', 'get').mockReturnValue(['fr', 'en-US']);
    expect(of('de_DE')).toBe('14:02');
    expect(of('de-DE', true)).toBe('14:02:35');
    expect(of('en')).toBe('02:02 PM');
    jest.spyOn(navigator, 'languages', 'get').mockReturnValue(['en-GB']);
    expect(of('en')).toBe('14:02');
    expect(of('no language')).toMatch(/02/);
  });
});

test('a time of another day is written with its date', () => {
  const today = new Date(2026, 10, 21, 23, 0);
  const at = (day: number, hour: number) =>
    dayAndTime(
      { ...trans, locale: 'en' } as never,
      new Date(2026, 10, day, hour),
      today
    );
  expect(at(21, 23)).toMatch(/^11:00/);
  expect(at(22, 1)).toMatch(/^Sun, Nov 22/);
});

test('ordinals have the right endings', () => {
  const all = [1, 2, 3, 4, 11, 12, 13, 21, 112, 122].map(n => ordinal(trans, n));
  expect(all.join(' ')).toBe('1st 2nd 3rd 4th 11th 12th 13th 21st 112th 122nd');
});

test('devices are named by their numbers', () => {
  const devices = [aDevice(), aDevice({ index: 1 })];
  expect(gpus(trans, ['GPU-1'], devices)).toBe('GPU 1');
  expect(gpus(trans, ['GPU-1', 'GPU-0'], devices)).toBe('GPUs 0, 1');
  expect(gpus(trans, ['GPU-9'], devices)).toBe('GPU ?');
});

describe('a session', () => {
  const NOW = 1000;
  const of = (changes: Partial<ISession> | null) =>
    say(
      trans,
      changes && aSession(changes),
      [aDevice(), aDevice({ index: 1 }), aDevice({ index: 2, can_suspend: false })],
      NOW
    );
  const idle = { state: 'idle' } as const;
  const soon = { since: NOW + 24, until: NOW + 58 };

  test.each([
    [{ leaves_at: NOW + 42 }, 'Idle, back to the pool in 0:42', true],
    [{ leaves_at: NOW }, 'Idle, back to the pool in 0:00', true],
    // The text remains a count-down until 2 s after `leaves_at`, because the clocks of
    // the broker and the page may differ, and a message takes time.
    [{ leaves_at: NOW - 2 }, 'Idle, back to the pool in 0:00', true],
    [{ leaves_at: NOW - 2.1 }, 'Idle on GPU 0, about to leave', false],
    [{ leaves_at: null }, 'Idle on GPU 0', false],
    [{ wanted: true }, 'Idle: may move to host memory at any moment', false],
    [{ wanted: true, keep_until: NOW + 60 }, 'Idle on GPU 0, kept', false],
    [{ stays_reason: 'Host memory is full.' }, 'Idle on GPU 0, stays', false],
    [
      { devices: ['GPU-2'], stays_reason: 'State on this GPU cannot be moved.' },
      'Idle on GPU 2, stays',
      false
    ],
    [{ pinned_reason: 'It maps a file.' }, 'Idle on GPU 0, pinned', false]
  ])('an idle session with %p has the right text', (changes, text, counts) => {
    const said = of({ ...idle, ...changes });
    expect([said.text, said.counts, said.tone]).toEqual([text, counts, 'idle']);
  });

  test('a session’s text begins with its label, which has no seconds', () => {
    const said = of({ ...idle, leaves_at: NOW + 42 });
    expect(said.still).toBe('Idle, back to the pool');
    expect(said.text.startsWith(said.still)).toBe(true);
    const still = of({});
    expect(still.still).toBe(still.text);
  });

  test.each([
    [{}, '6/8 GiB', '6/8'],
    [{ used_bytes: 320 * MIB }, '0.3/8 GiB', '0.3/8'],
    [{ used_bytes: null, footprint_bytes: null }, '8 GiB', '8'],
    [{ ...idle, leaves_at: NOW + 42 }, '0:42', '0:42'],
    [{ ...idle, stays_reason: 'Host memory is full.' }, 'Stays', ''],
    [{ state: 'queued', queue_position: 2, expected: soon }, '2nd · 20 to 60 s', '2'],
    [{ state: 'queued', queue_position: 2, queued_at: NOW - 4 }, '2nd · for 4 s', '2'],
    [{ state: 'queued', queue_position: 2 }, '2nd', '2'],
    [{ state: 'queued' }, 'Waiting', ''],
    [{ state: 'detached', suspended_bytes: GIB }, 'Host 1 GiB', ''],
    [{ state: 'detached' }, 'No GPU', '']
  ] as const)('a session with %p has two shorter texts', (changes, short, least) => {
    const said = of(changes);
    expect([said.short, said.least]).toEqual([short, least]);
  });

  test.each([
    [{ expected: soon }, 'Waiting: 2nd, 20 to 60 s left'],
    [
      { expected: { since: NOW - 5, until: NOW + 11 } },
      'Waiting: 2nd, up to 15 s left'
    ],
    [{ queued_at: NOW - 0.5 }, 'Waiting: 2nd, no estimate yet'],
    [{ queued_at: NOW - 4.5 }, 'Waiting: 2nd, for 4 s, no estimate yet'],
    [{ queued_at: NOW - 47 }, 'Waiting: 2nd, for 40 s, no estimate yet'],
    [
      { queued_at: NOW - 47, expected: { since: NOW - 9, until: NOW } },
      'Waiting: 2nd, for 40 s, no estimate yet'
    ]
  ])('a waiting session with %p shows its time', (changes, text) => {
    const said = of({ state: 'queued', queue_position: 2, ...changes });
    expect([said.text, said.still, said.counts]).toEqual([text, 'Waiting: 2nd', true]);
    const session = aSession({ state: 'queued', ...changes });
    const time = text.replace(/^Waiting: 2nd(, )?/, '').replace(/^for/, 'waiting for');
    expect(waitTime(trans, session, NOW)).toBe(time);
    const figure = /\d.*(?= left)|(?<=for )\d+ s/.exec(time)?.[0] ?? 'no estimate';
    expect(waitSentence(trans, session, NOW)).toContain(figure);
  });

  test('the text of a pending release says when the slice goes back', () => {
    const asked = { release_asked: true };
    expect(goesBack(aSession(asked))).toBe(true);
    expect(goingBack(trans, aSession(asked))).toBe(
      'Goes back to the pool when its work on the GPU is done.'
    );
    expect(goingBack(trans, aSession({ ...asked, ...idle }))).toBe(
      'Goes back to the pool as soon as it can be moved.'
    );
    expect(goesBack(aSession())).toBe(false);
    expect(goesBack(aSession({ ...asked, state: 'detached', granted_bytes: 0 }))).toBe(
      false
    );
    expect(goesBack(aSession({ ...asked, state: 'detaching' }))).toBe(false);
    expect(goesBack(null)).toBe(false);
  });

  test.each([
    [null, 'No GPU', 'none'],
    [{}, '6 of 8 GiB on GPU 0', 'busy'],
    [{ used_bytes: null, footprint_bytes: null }, '8 GiB on GPU 0', 'busy'],
    [
      { devices: ['GPU-0', 'GPU-1'], granted_bytes: 20 * GIB },
      '20 GiB, 16 guaranteed on GPUs 0, 1',
      'busy'
    ],
    [{ granted_bytes: 9 * GIB }, '9 GiB, 8 guaranteed on GPU 0', 'busy'],
    [
      { budgets: [{ group: '', seconds: 3600, left: 360, spent: false }] },
      '6 of 8 GiB on GPU 0, 360 GPU-seconds left today',
      'busy'
    ],
    [
      { budgets: [{ group: '', seconds: 3600, left: 400, spent: false }] },
      '6 of 8 GiB on GPU 0',
      'busy'
    ],
    [{ state: 'queued', preempted: 'its turn is over' }, 'Preempted', 'wait'],
    [
      {
        state: 'queued',
        preempted: 'its turn is over',
        queue_position: 2,
        expected: soon
      },
      'Preempted: 2nd, 20 to 60 s left',
      'wait'
    ],
    [
      { state: 'detaching', preempted: 'its turn is over' },
      'Preempted, moving…',
      'move'
    ],
    [{ state: 'detached' }, 'No GPU', 'none'],
    [{ state: 'detached', suspended_bytes: GIB }, 'In host memory: 1 GiB', 'host'],
    [{ state: 'queued' }, 'Waiting', 'wait'],
    [{ state: 'queued', queue_position: 2 }, 'Waiting: 2nd, no estimate yet', 'wait'],
    [{ state: 'attaching' }, 'Attaching…', 'move'],
    [{ state: 'attaching', suspended_bytes: GIB }, 'Restoring 1 GiB…', 'move'],
    [{ state: 'detaching' }, 'Moving to host memory…', 'move']
  ] as const)('a session with %p has the right text', (changes, text, tone) => {
    const said = of(changes);
    expect([said.text, said.tone]).toEqual([text, tone]);
    // The text of a wait shows a time, so the page draws the text again each second.
    const waits = tone === 'wait' && said.text.includes('2nd');
    expect(said.counts).toBe(waits);
  });
});
