// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** A small graph of the last minutes, with gaps where nothing was measured. */
import * as React from 'react';

import { useTools } from './tools';

/** Seconds from the left edge to the right edge. */
export const SPAN = 300;

const WIDTH = 150;
const HEIGHT = 20;

type Values = readonly (number | null)[];

/**
 * Return the SVG path of the line, in a box of `WIDTH` by `HEIGHT`. `top` is the value
 * at the upper edge of the box.
 */
export function path(
  time: readonly number[],
  values: Values,
  now: number,
  top: number,
  span = SPAN
): string {
  let drawn = '';
  let pen = false;
  // Several points may have the same `x`: draw only the highest one. Otherwise a short
  // peak would appear and disappear while the points move to the left.
  let column = { x: -1, share: 0 };
  const draw = () => {
    const { x, share } = column;
    if (x >= 0) {
      const y = (HEIGHT - 1 - share * (HEIGHT - 2)).toFixed(1);
      // `h0` is a line of length zero. Its round ends make a single point visible.
      drawn += pen ? `L${x} ${y}` : `M${x} ${y}h0`;
      pen = true;
    }
    column = { x: -1, share: 0 };
  };
  for (const [i, value] of values.entries()) {
    const at = time[i];
    if (value === null || at === undefined || at < now - span) {
      draw();
      pen = false;
      continue;
    }
    const x = Math.round(((at - now + span) / span) * WIDTH);
    const share = Math.min(1, Math.max(0, value / (top || 1)));
    if (column.x !== x) {
      draw();
    }
    column = { x, share: Math.max(share, column.share) };
  }
  draw();
  return drawn;
}

export interface ISparklineProps {
  /** The name of the figure, such as `Memory`. */
  readonly name: string;
  /** The full name, for screen readers and the tooltip. */
  readonly full?: string;
  readonly time: readonly number[];
  readonly values: Values;
  readonly now: number;
  /**
   * The value at the upper edge. If the line has a higher value, the edge is that
   * value.
   */
  readonly top: number;
  readonly say: (value: number) => string;
  /**
   * The time between the left and the right edge: `span` in seconds, `during` in words.
   */
  readonly span?: number;
  readonly during?: string;
}

export function Sparkline(props: ISparklineProps): React.ReactElement {
  const { trans } = useTools();
  const { name, full = name, time, values, now, say } = props;
  const during = props.during ?? trans.__('in the last 5 minutes');
  const known = values.filter(value => value !== null);
  const least = known.reduce((a, b) => Math.min(a, b), Infinity);
  const most = known.reduce((a, b) => Math.max(a, b), -Infinity);
  const current = values[values.length - 1] ?? null;
  const label =
    known.length === 0
      ? trans.__('%1 %2: not known', full, during)
      : trans.__(
          '%1 %2: least %3, most %4, now %5',
          full,
          during,
          say(least),
          say(most),
          current === null ? trans.__('not known') : say(current)
        );
  return (
    <div className="jp-gpupool-spark">
      <span className="jp-gpupool-sparkName" aria-hidden="true">
        {name}
      </span>
      <svg
        role="img"
        aria-label={label}
        viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
        preserveAspectRatio="none"
      >
        <title>{label}</title>
        <path d={path(time, values, now, Math.max(props.top, most), props.span)} />
      </svg>
      <span className="jp-gpupool-sparkNow" aria-hidden="true">
        {current === null ? '?' : say(current)}
      </span>
    </div>
  );
}
