// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Graphs of the last hour: each device, and the queue. */
import * as React from 'react';

import type { IHour } from '../api';
import { bytes } from '../words';
import type { IDeviceRow } from './arrange';
import { FEW } from './devices';
import { Sparkline } from './sparkline';
import { useHour, useTools } from './tools';

/** The time of each point: the middle of its minute. */
export function times(hour: IHour): number[] {
  const { now, step, queue } = hour;
  const last = Math.floor(now / step);
  return queue.map((_, i) =>
    Math.min(now, (last - queue.length + 1 + i) * step + step / 2)
  );
}

/**
 * Combine all devices: the sum of the memory in slices, and the mean of the
 * utilisation.
 */
export function together(hour: IHour): {
  granted: (number | null)[];
  utilisation: (number | null)[];
} {
  const all = Object.values(hour.devices);
  const known = (i: number, of: 'granted' | 'utilisation') =>
    all.map(device => device[of][i] ?? null).filter(value => value !== null);
  const sum = (values: number[]) => values.reduce((a, b) => a + b, 0);
  return {
    granted: hour.queue.map((_, i) => {
      const values = known(i, 'granted');
      return values.length > 0 ? sum(values) : null;
    }),
    utilisation: hour.queue.map((_, i) => {
      const values = known(i, 'utilisation');
      return values.length > 0 ? Math.round(sum(values) / values.length) : null;
    })
  };
}

export const LastHour = React.memo(function LastHour(props: {
  readonly rows: readonly IDeviceRow[];
}): React.ReactElement {
  const { trans } = useTools();
  const hour = useHour();
  const [each, setEach] = React.useState(false);
  if (hour === null) {
    return (
      <p className="jp-gpupool-plain">
        {trans.__('To see the last hour, open a Pooled GPU kernel.')}
      </p>
    );
  }
  const { rows } = props;
  const many = rows.length > FEW;
  const shared = {
    time: times(hour),
    now: hour.now,
    span: hour.step * hour.queue.length,
    during: trans.__('in the last hour')
  };
  const graphs = (name: string, of: ReturnType<typeof together>, top: number) => (
    <>
      <Sparkline
        {...shared}
        name={trans.__('%1 slices', name)}
        full={trans.__('%1, memory in slices', name)}
        values={of.granted}
        top={top}
        say={bytes}
      />
      <Sparkline
        {...shared}
        name={trans.__('%1 busy', name)}
        full={trans.__('%1, busy', name)}
        values={of.utilisation}
        top={100}
        say={value => trans.__('%1 %', value)}
      />
    </>
  );
  const most = rows.reduce((sum, { device }) => sum + device.memory_capacity, 0);
  return (
    <>
      <p className="jp-gpupool-plain jp-gpupool-figure">
        {trans.__(
          'Each point is the mean of one minute. In the graph of the queue, it is the maximum. A gap means that there is no data.'
        )}
      </p>
      {many && (
        <>
          <button
            type="button"
            className="jp-gpupool-button"
            aria-pressed={each}
            onClick={() => setEach(!each)}
          >
            {trans.__('Each GPU')}
          </button>
          {!each && (
            <div className="jp-gpupool-hue1">
              {graphs(trans.__('All'), together(hour), most)}
            </div>
          )}
        </>
      )}
      {(each || !many) &&
        rows.map(({ device }) => {
          const of = hour.devices[device.uuid];
          return (
            of && (
              <div key={device.uuid} className="jp-gpupool-hue1">
                {graphs(
                  trans.__('GPU %1', device.index),
                  { granted: [...of.granted], utilisation: [...of.utilisation] },
                  device.memory_capacity
                )}
              </div>
            )
          );
        })}
      <div className="jp-gpupool-hue2">
        <Sparkline
          {...shared}
          name={trans.__('Queue')}
          full={trans.__('Kernels that waited')}
          values={hour.queue}
          top={1}
          say={String}
        />
      </div>
    </>
  );
});
