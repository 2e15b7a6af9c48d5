// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * A section of the panel. Its heading folds it; the content of a folded section is not
 * drawn.
 */
import * as React from 'react';

import { useTools } from './tools';

export interface ISectionProps {
  /** The panel remembers under this name whether the section is folded. */
  readonly name: string;
  readonly title: string;
  /** A few words beside the heading; a folded section also shows them. */
  readonly aside?: string;
  readonly children: React.ReactNode;
}

export function Section(props: ISectionProps): React.ReactElement {
  const { folded } = useTools();
  const [open, setOpen] = React.useState(!folded.has(props.name));
  // A page may have two panels, in the side bar and in a tab. So each id must be
  // unique.
  const id = React.useId();
  return (
    <section className="jp-gpupool-section" aria-labelledby={id}>
      <details
        open={open}
        onToggle={event => {
          const { open: now } = event.currentTarget;
          folded[now ? 'delete' : 'add'](props.name);
          setOpen(now);
        }}
      >
        <summary>
          <svg className="jp-gpupool-caret" viewBox="0 0 16 16" aria-hidden="true">
            <path d="M4 6l4 4 4-4" />
          </svg>
          <h3 id={id}>{props.title}</h3>
          {props.aside && <span className="jp-gpupool-aside">{props.aside}</span>}
        </summary>
        <div className="jp-gpupool-sectionBody">{open && props.children}</div>
      </details>
    </section>
  );
}

/** The mark of one of my kernels: a colour and a number. */
export function Badge({ number }: { readonly number: number }): React.ReactElement {
  return (
    <span className={`jp-gpupool-badge ${hue(number)}`} aria-hidden="true">
      {number}
    </span>
  );
}

/**
 * Return the style class of a kernel's colour. There are 10 colours, so kernel 11 has
 * the colour of kernel 1. The numbers tell these two kernels apart.
 */
export function hue(number: number): string {
  return `jp-gpupool-hue${((number - 1) % 10) + 1}`;
}
