// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import { render, screen } from '@testing-library/react';
import * as React from 'react';

import { path, Sparkline, SPAN } from '../sparkline';
import { Ticker } from '../../ticker';
import { Tools } from '../tools';
import { FakeModel, FakePast, FakeSettings, trans } from './fakes';

const now = 1000;
const at = (...ago: number[]) => ago.map(seconds => now - seconds);

describe('path', () => {
  it('the path goes from left to right, and the scale from 0 up to the top', () => {
    expect(path(at(SPAN, 150, 0), [0, 5, 10], now, 10)).toBe(
      'M0 19.0h0L75 10.0L150 1.0'
    );
  });

  it('the path has a gap where nothing was measured', () => {
    const drawn = path(at(40, 30, 20, 10, 0), [1, 1, null, 1, 1], now, 2);
    expect(drawn.match(/M/g)).toHaveLength(2);
    expect(drawn.match(/L/g)).toHaveLength(2);
  });

  it('the path is empty for nulls, and a dot for a single value', () => {
    expect(path(at(2, 1), [null, null], now, 1)).toBe('');
    expect(path(at(20, 10, 0), [null, 1, null], now, 1)).toBe('M145 1.0h0');
  });

  it('the path omits points older than the span', () => {
    expect(path(at(SPAN + 1, 0), [1, 1], now, 1)).toBe('M150 1.0h0');
  });

  it('the path has at most one point per column, and the last point', () => {
    const time = Array.from({ length: 3001 }, (_, i) => now - 300 + i / 10);
    const drawn = path(
      time,
      time.map(() => 1),
      now,
      1
    );
    expect(drawn.match(/[ML]/g)!.length).toBeLessThanOrEqual(153);
    expect(drawn.endsWith('L150 1.0')).toBe(true);
  });

  it('the path keeps the highest value of a column', () => {
    for (const peak of [0, 1, 2, 3]) {
      const values = [0, 0, 0, 0].map((zero, i) => (i === peak ? 1 : zero));
      expect(path(at(3, 2, 1, 0), values, now, 1)).toContain(' 1.0');
    }
  });

  it('the path stays in its box', () => {
    for (const value of [-5, 0, 7, 1e9]) {
      const y = Number(/ ([\d.-]+)h0/.exec(path(at(0), [value], now, 7))![1]);
      expect(y).toBeGreaterThanOrEqual(1);
      expect(y).toBeLessThanOrEqual(19);
    }
  });
});

describe('Sparkline', () => {
  const draw = (values: (number | null)[]) =>
    render(
      <Tools.Provider
        value={{
          trans,
          model: new FakeModel(null),
          past: new FakePast(),
          settings: new FakeSettings(),
          ticker: new Ticker(),
          folded: new Set(),
          open: () => undefined,
          shutDown: () => Promise.resolve({ note: '' }),
          links: () => []
        }}
      >
        <Sparkline
          name="Memory"
          time={at(...values.map((_, i) => values.length - i))}
          values={values}
          now={now}
          top={1}
          say={value => `${value} GiB`}
        />
      </Tools.Provider>
    );

  it('a sparkline names the least, the most and the present value', () => {
    draw([2, 5, 3]);
    expect(screen.getByRole('img').getAttribute('aria-label')).toBe(
      'Memory in the last 5 minutes: least 2 GiB, most 5 GiB, now 3 GiB'
    );
    expect(screen.getByText('3 GiB')).toBeTruthy();
  });

  it('a sparkline shows an unknown present value as ?, not as 0', () => {
    draw([2, null]);
    expect(screen.getByRole('img').getAttribute('aria-label')).toContain(
      'now not known'
    );
    expect(screen.getByText('?')).toBeTruthy();
  });

  it('a sparkline says that nothing is known', () => {
    draw([null, null]);
    expect(screen.getByRole('img').getAttribute('aria-label')).toContain(': not known');
    expect(screen.getByText('?')).toBeTruthy();
  });
});
