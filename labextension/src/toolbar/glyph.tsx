// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Small pictures of states. They differ by shape, and not only by colour. */
import * as React from 'react';

import type { Tone } from '../words';

interface IProps {
  readonly tone: Tone;
  /** Share of the slice in use, 0 to 1; null if not known. */
  readonly filled: number | null;
}

/** A 16 px picture of a state; the words beside it say the same. */
export function Glyph({ tone, filled }: IProps): React.JSX.Element {
  return (
    <svg
      className={`jp-gpupool-Glyph jp-mod-${tone}`}
      viewBox="0 0 16 16"
      width="16"
      height="16"
      aria-hidden="true"
      focusable="false"
    >
      {shape(tone, filled)}
    </svg>
  );
}

/** The picture of a slice: a horizontal battery. */
const CASE = (
  <>
    <rect
      x="1"
      y="4"
      width="12"
      height="8"
      rx="1.5"
      className="jp-gpupool-Glyph-line"
    />
    <path d="M14.5 6.5v3" className="jp-gpupool-Glyph-line" />
  </>
);

function shape(tone: Tone, filled: number | null): React.JSX.Element {
  switch (tone) {
    case 'busy':
      return (
        <>
          {CASE}
          <rect
            x="2.5"
            y="5.5"
            width={Math.max(1, 9 * (filled ?? 1))}
            height="5"
            rx="0.5"
            className="jp-gpupool-Glyph-fill"
          />
        </>
      );
    case 'idle':
      return (
        <>
          {CASE}
          <path
            d="M3 10.5l3-5M6 10.5l3-5M9 10.5l2.4-4"
            className="jp-gpupool-Glyph-hatch"
          />
        </>
      );
    case 'wait':
      return (
        <path
          d="M4 2h8M4 14h8M5 2v2.5L8 8l3-3.5V2M5 14v-2.5L8 8l3 3.5V14"
          className="jp-gpupool-Glyph-line"
        />
      );
    case 'move':
      return (
        <path
          d="M2 6h10M9 3l3 3-3 3M14 11H4M7 8.5L4 11l3 3"
          className="jp-gpupool-Glyph-line jp-gpupool-Glyph-moving"
        />
      );
    case 'host':
      return (
        // A memory module. Do not use an arrow into a tray: that picture looks like a
        // download.
        <>
          <rect
            x="1.5"
            y="4"
            width="13"
            height="7"
            rx="1"
            className="jp-gpupool-Glyph-line"
          />
          <path
            d="M4.5 6.5v2M8 6.5v2M11.5 6.5v2M3.5 11v2M6.5 11v2M9.5 11v2M12.5 11v2"
            className="jp-gpupool-Glyph-line"
          />
        </>
      );
    case 'away':
      return (
        <>
          <circle cx="8" cy="8" r="6" className="jp-gpupool-Glyph-line" />
          <path d="M8 4.5V9M8 11v.6" className="jp-gpupool-Glyph-line" />
        </>
      );
    default:
      return CASE;
  }
}

/** The picture of "get a slice": the battery with a plus. */
export function GlyphOfGet(): React.JSX.Element {
  return (
    <svg
      className="jp-gpupool-Glyph"
      viewBox="0 0 16 16"
      width="16"
      height="16"
      aria-hidden="true"
      focusable="false"
    >
      {CASE}
      <path d="M7 6v4M5 8h4" className="jp-gpupool-Glyph-line" />
    </svg>
  );
}
