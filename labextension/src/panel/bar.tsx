// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** One device: its name, a bar to scale of its memory, and the figures. */
import * as React from 'react';

import type { IDeviceRow } from './arrange';
import { granted, notes, partText, summary, unsaid, utilisation } from './describe';
import type { IPart } from './geometry';
import { fill, parts, percent } from './geometry';
import { hue } from './section';
import { useTools } from './tools';

/** Parts with a smaller share have no room for their number. */
const ROOM = 0.07;

export const DeviceBar = React.memo(function DeviceBar(props: {
  readonly row: IDeviceRow;
}): React.ReactElement {
  const { trans } = useTools();
  const { device, slices } = props.row;
  const shown = React.useMemo(() => parts(device, slices), [device, slices]);
  const [focused, setFocused] = React.useState<string | null>(null);
  const pointed = shown.find(part => part.key === focused);
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
          title={trans.__('Of the whole device, by all processes, as NVML reports')}
        >
          {utilisation(trans, device)}
        </span>
      </div>
      <Bar label={summary(trans, device)} parts={shown} onPointed={setFocused} />
      <div className="jp-gpupool-figure" aria-hidden="true">
        {pointed ? partText(trans, pointed) : granted(trans, device)}
      </div>
      {notes(trans, device).map(note => (
        <div key={note} className="jp-gpupool-note">
          {note}
        </div>
      ))}
    </div>
  );
});

interface IBarProps {
  readonly label: string;
  readonly parts: readonly IPart[];
  /** The key of the part with the focus; null if none has it. */
  readonly onPointed: (key: string | null) => void;
}

/** The parts in a row. One stop for the tab key; arrow keys go from part to part. */
function Bar(props: IBarProps): React.ReactElement {
  const { trans, open } = useTools();
  const [stop, setStop] = React.useState<string | null>(null);
  const at = Math.max(
    0,
    props.parts.findIndex(part => part.key === stop)
  );
  const bar = React.useRef<HTMLDivElement>(null);
  const last = React.useRef<{ key: string; at: number } | null>(null);
  // A removed part would lose the focus without an event: its neighbour gets it.
  React.useLayoutEffect(() => {
    if (last.current === null) {
      return;
    }
    const { key, at: old } = last.current;
    const now = props.parts.findIndex(part => part.key === key);
    if (now >= 0) {
      last.current = { key, at: now };
      return;
    }
    last.current = null;
    const all = bar.current?.children;
    if (all && document.activeElement === document.body) {
      (all[Math.min(old, all.length - 1)] as HTMLElement | undefined)?.focus();
    }
  }, [props.parts]);
  const go = (event: React.KeyboardEvent<HTMLElement>): void => {
    const all = event.currentTarget.parentElement?.children;
    const next = {
      ArrowRight: at + 1,
      ArrowLeft: at - 1,
      Home: 0,
      End: all?.length ?? 0
    }[event.key];
    const kernel = kernelOf(props.parts[at]);
    if (next !== undefined && all) {
      const to = Math.min(Math.max(next, 0), all.length - 1);
      (all[to] as HTMLElement).focus();
      event.preventDefault();
    } else if (event.key === 'Enter' && kernel) {
      open(kernel);
    }
  };
  return (
    <div
      ref={bar}
      className="jp-gpupool-bar"
      role="listbox"
      aria-orientation="horizontal"
      aria-label={props.label}
    >
      {props.parts.map((part, i) => {
        const text = partText(trans, part);
        const kernel = kernelOf(part);
        return (
          <span
            key={part.key}
            className={classes(part)}
            style={{ width: percent(part.share) }}
            role="option"
            aria-selected={part.key === stop}
            aria-label={text}
            title={text}
            tabIndex={i === at ? 0 : -1}
            onKeyDown={go}
            onFocus={() => {
              last.current = { key: part.key, at: i };
              setStop(part.key);
              props.onPointed(part.key);
            }}
            onBlur={() => {
              last.current = null;
              props.onPointed(null);
            }}
            onDoubleClick={kernel ? () => open(kernel) : undefined}
          >
            <Used part={part} />
            {part.kind === 'mine' && part.slice && part.share >= ROOM && (
              <span className="jp-gpupool-number" aria-hidden="true">
                {part.slice.number}
              </span>
            )}
          </span>
        );
      })}
    </div>
  );
}

/** Only the bar, for many devices; the parent describes it in words. */
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
