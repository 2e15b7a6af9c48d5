// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** One device: its name, a bar with the parts of its memory, and the sessions on it. */
import * as React from 'react';

import type { IDeviceRow } from './arrange';
import {
  activity,
  granted,
  notes,
  partText,
  sizeText,
  somebody,
  summary,
  unsaid,
  utilisation
} from './describe';
import type { IPart } from './geometry';
import { fill, parts, percent } from './geometry';
import { Badge, hue } from './section';
import { useTools } from './tools';

/**
 * A part shows its number only if it fills at least this share of the bar. A smaller
 * part has no room for its number.
 */
const ROOM = 0.07;

export const DeviceBar = React.memo(function DeviceBar(props: {
  readonly row: IDeviceRow;
}): React.ReactElement {
  const { trans } = useTools();
  const { device, slices } = props.row;
  const shown = React.useMemo(() => parts(device, slices), [device, slices]);
  return (
    <div className="jp-gpupool-device">
      <div className="jp-gpupool-line">
        <span className="jp-gpupool-deviceName" title={device.name}>
          <b>{trans.__('GPU %1', device.index)}</b> · {device.name}
        </span>
        {unsaid(device) && (
          <span className="jp-gpupool-emulated">{trans.__('EMULATED')}</span>
        )}
        <span
          className="jp-gpupool-figure"
          title={trans.__(
            'Use of the whole GPU by all processes, as the driver reports it'
          )}
        >
          {utilisation(trans, device)}
        </span>
      </div>
      <Bar label={summary(trans, device)} parts={shown} />
      <div className="jp-gpupool-figure" aria-hidden="true">
        {granted(trans, device)}
      </div>
      {shown.some(part => LISTED.has(part.kind)) && (
        <ul
          className="jp-gpupool-list jp-gpupool-on"
          aria-label={trans.__('On GPU %1', device.index)}
        >
          {shown
            .filter(part => LISTED.has(part.kind))
            .map(part => (
              <OnDevice key={part.key} part={part} />
            ))}
        </ul>
      )}
      {notes(trans, device).map(note => (
        <div key={note} className="jp-gpupool-note">
          {note}
        </div>
      ))}
    </div>
  );
});

/** The parts for which a line is below the bar. */
const LISTED: ReadonlySet<IPart['kind']> = new Set(['mine', 'other', 'foreign']);

/**
 * The line about one part of the bar: who has this part, its size, how much of it is in
 * use, and what the session does with it.
 */
function OnDevice({ part }: { readonly part: IPart }): React.ReactElement {
  const { trans, open } = useTools();
  const { slice } = part;
  if (slice === null) {
    return <li className="jp-gpupool-line">{partText(trans, part)}</li>;
  }
  const kernel = kernelOf(part);
  const figures = (
    <span className="jp-gpupool-figure">
      {sizeText(trans, slice)} · {activity(trans, slice.session)}
    </span>
  );
  if (!slice.session.mine) {
    return (
      <li className="jp-gpupool-line">
        <span className="jp-gpupool-grow">{somebody(trans, slice.session)}</span>
        {figures}
      </li>
    );
  }
  return (
    <li className="jp-gpupool-line">
      <Badge number={slice.number} />
      {slice.session.here && kernel ? (
        <button
          type="button"
          className="jp-gpupool-link"
          aria-current={slice.active || undefined}
          onClick={() => open(kernel)}
        >
          {slice.name}
        </button>
      ) : (
        <span className="jp-gpupool-grow jp-gpupool-strong">
          {trans.__('%1 (yours, on another server)', slice.name)}
        </span>
      )}
      {figures}
    </li>
  );
}

/**
 * The bar: each part is as wide as its share of the memory. The lines below the bar say
 * the same in words.
 */
function Bar(props: {
  readonly label: string;
  readonly parts: readonly IPart[];
}): React.ReactElement {
  const { trans } = useTools();
  const label = [props.label, ...props.parts.map(part => partText(trans, part))];
  return (
    <div
      className="jp-gpupool-bar"
      role="img"
      aria-label={label.reduce((list, entry) => trans.__('%1; %2', list, entry))}
    >
      {props.parts.map(part => (
        <span
          key={part.key}
          className={classes(part)}
          style={{ width: percent(part.share) }}
          title={partText(trans, part)}
          aria-hidden="true"
        >
          <Used part={part} />
          {part.kind === 'mine' && part.slice && part.share >= ROOM && (
            <span className="jp-gpupool-number">{part.slice.number}</span>
          )}
        </span>
      ))}
    </div>
  );
}

/**
 * The bar of a device without text, for the grid of many devices. The parent component
 * describes the device in words.
 */
export const ThinBar = React.memo(function ThinBar(props: {
  readonly row: IDeviceRow;
}): React.ReactElement {
  const { device, slices } = props.row;
  return (
    <span className="jp-gpupool-thin" aria-hidden="true">
      {parts(device, slices).map(part => (
        <span
          key={part.key}
          className={classes(part)}
          style={{ width: percent(part.share) }}
        >
          <Used part={part} />
        </span>
      ))}
    </span>
  );
});

function Used({ part }: { readonly part: IPart }): React.ReactElement | null {
  const used = part.slice && part.kind === 'mine' ? fill(part.slice) : null;
  return used === null ? null : (
    <span
      className="jp-gpupool-used"
      style={{ transform: `scaleX(${used.toFixed(4)})` }}
    />
  );
}

function classes(part: IPart): string {
  const names = ['jp-gpupool-part', `jp-mod-${part.kind}`];
  if (part.slice) {
    names.push(`jp-mod-${part.slice.session.state}`);
    if (part.kind === 'mine') {
      names.push(hue(part.slice.number));
    }
    if (part.slice.active) {
      names.push('jp-mod-front');
    }
  }
  return names.join(' ');
}

function kernelOf(part: IPart | undefined): string {
  const session = part?.slice?.session;
  return session && 'kernel_id' in session ? session.kernel_id : '';
}
