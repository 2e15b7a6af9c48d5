// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * All devices: a few as full bars, many as a grid of thin bars. A click on a thin bar
 * shows the full bar of its device.
 */
import * as React from 'react';

import { bytes } from '../words';
import type { IDeviceRow } from './arrange';
import { DeviceBar, ThinBar } from './bar';
import { partText, summary, unsaid } from './describe';
import { parts } from './geometry';
import { useTools } from './tools';

/**
 * If there are more devices than this, the panel shows a grid until the user asks for
 * the full bars.
 */
export const FEW = 8;

export const Devices = React.memo(function Devices(props: {
  readonly rows: readonly IDeviceRow[];
}): React.ReactElement {
  const { trans } = useTools();
  const [full, setFull] = React.useState(false);
  const many = props.rows.length > FEW;
  return (
    <>
      {many && (
        <button
          type="button"
          className="jp-gpupool-button jp-gpupool-all"
          aria-pressed={full}
          onClick={() => setFull(!full)}
        >
          {trans.__('Show each GPU')}
        </button>
      )}
      {many && !full ? (
        groups(props.rows).map(rows => (
          <Group key={rows[0]?.device.uuid ?? ''} rows={rows} />
        ))
      ) : (
        <ul className="jp-gpupool-list">
          {props.rows.map(row => (
            <li key={row.device.uuid}>
              <DeviceBar row={row} />
            </li>
          ))}
        </ul>
      )}
      <Legend />
    </>
  );
});

/** Devices of one kind, in the order of the pool. */
export function groups(rows: readonly IDeviceRow[]): IDeviceRow[][] {
  const found = new Map<string, IDeviceRow[]>();
  for (const row of rows) {
    const { name, memory_total, emulated } = row.device;
    const key = JSON.stringify([name, memory_total, emulated]);
    found.set(key, [...(found.get(key) ?? []), row]);
  }
  return [...found.values()];
}

function Group(props: { readonly rows: readonly IDeviceRow[] }): React.ReactElement {
  const { trans } = useTools();
  const [unfolded, setUnfolded] = React.useState<string | null>(null);
  const [stop, setStop] = React.useState<string | null>(null);
  const id = React.useId();
  const first = props.rows[0]?.device;
  const taken = props.rows.filter(row => row.device.memory_granted > 0).length;
  const at = props.rows.some(row => row.device.uuid === stop) ? stop : first?.uuid;
  const onFold = React.useCallback((uuid: string) => {
    setUnfolded(old => (old === uuid ? null : uuid));
  }, []);
  return (
    <div className="jp-gpupool-group">
      <div className="jp-gpupool-line">
        <span id={id} className="jp-gpupool-deviceName" title={first?.name}>
          {first?.name}
        </span>
        {first && unsaid(first) && (
          <span className="jp-gpupool-emulated">{trans.__('EMULATED')}</span>
        )}
        <span className="jp-gpupool-figure">
          {trans.__(
            '%1 of %2 in use · %3',
            taken,
            props.rows.length,
            bytes(first?.memory_total ?? 0)
          )}
        </span>
      </div>
      <ul className="jp-gpupool-grid" aria-labelledby={id}>
        {props.rows.map(row => (
          <React.Fragment key={row.device.uuid}>
            <Cell
              row={row}
              stop={row.device.uuid === at}
              unfolded={row.device.uuid === unfolded}
              onFold={onFold}
              onStop={setStop}
            />
            {row.device.uuid === unfolded && (
              <li className="jp-gpupool-unfolded">
                <DeviceBar row={row} />
              </li>
            )}
          </React.Fragment>
        ))}
      </ul>
    </div>
  );
}

interface ICellProps {
  readonly row: IDeviceRow;
  readonly stop: boolean;
  readonly unfolded: boolean;
  readonly onFold: (uuid: string) => void;
  readonly onStop: (uuid: string) => void;
}

const Cell = React.memo(function Cell(props: ICellProps): React.ReactElement {
  const { trans } = useTools();
  const { device, slices } = props.row;
  const on = parts(device, slices).filter(part => part.slice !== null);
  const label = [summary(trans, device), ...on.map(part => partText(trans, part))];
  return (
    <li>
      <button
        type="button"
        className="jp-gpupool-cell"
        aria-expanded={props.unfolded}
        aria-label={label.reduce((list, entry) => trans.__('%1; %2', list, entry))}
        title={label.join('\n')}
        tabIndex={props.stop ? 0 : -1}
        onClick={() => props.onFold(device.uuid)}
        onFocus={() => props.onStop(device.uuid)}
        onKeyDown={move}
      >
        <span className="jp-gpupool-cellNumber">
          {device.index}
          {device.drained_reason && '!'}
        </span>
        <ThinBar row={props.row} />
      </button>
    </li>
  );
});

/**
 * Move the focus between the cells of the grid with the arrow keys. The page decides
 * how many cells are in a row, so count them there.
 */
function move(event: React.KeyboardEvent<HTMLElement>): void {
  const grid = event.currentTarget.closest('ul');
  const cells = [...(grid?.querySelectorAll<HTMLElement>('.jp-gpupool-cell') ?? [])];
  const at = cells.indexOf(event.currentTarget);
  const top = cells[0]?.offsetTop;
  const across = Math.max(1, cells.filter(cell => cell.offsetTop === top).length);
  const next = {
    ArrowRight: at + 1,
    ArrowLeft: at - 1,
    ArrowDown: at + across,
    ArrowUp: at - across,
    Home: 0,
    End: cells.length - 1
  }[event.key];
  if (next !== undefined) {
    cells[next]?.focus();
    event.preventDefault();
  }
}

/** What the colours and patterns mean. */
const Legend = React.memo(function Legend(): React.ReactElement {
  const { trans } = useTools();
  const mine = 'jp-mod-mine jp-gpupool-hue1';
  const entries: [string, string, boolean][] = [
    [`${mine} jp-mod-active`, trans.__('Yours, in use'), true],
    [`${mine} jp-mod-active`, trans.__('Yours, not in use'), false],
    [`${mine} jp-mod-idle`, trans.__('Idle'), true],
    ['jp-mod-other jp-mod-active', trans.__('Of another user'), false],
    ['jp-mod-foreign', trans.__('Outside the pool'), false],
    ['jp-mod-reserved', trans.__('Reserved'), false],
    ['jp-mod-free', trans.__('Free'), false]
  ];
  return (
    <ul className="jp-gpupool-legend" aria-label={trans.__('Legend')}>
      {entries.map(([name, text, used]) => (
        <li key={text}>
          <span className={`jp-gpupool-part ${name}`} aria-hidden="true">
            {used && <span className="jp-gpupool-used" />}
          </span>
          {text}
        </li>
      ))}
    </ul>
  );
});
