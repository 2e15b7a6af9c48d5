// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** A part of the panel with a heading that folds it; a folded part is not drawn. */
import * as React from 'react';

import { useTools } from './tools';

export interface ISectionProps {
  /** The name by which the panel remembers that the section is folded. */
  readonly name: string;
  readonly title: string;
  /** A few words beside the heading; a folded section also shows them. */
  readonly aside?: string;
  readonly children: React.ReactNode;
}

export function Section(props: ISectionProps): React.ReactElement {
  const { folded } = useTools();
  const [open, setOpen] = React.useState(!folded.has(props.name));
  // Two panels may be open (in the side bar and in a tab), so each id must be unique.
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

/** From the 11th kernel on, the colours repeat; the number tells the kernels apart. */
export function hue(number: number): string {
  return `jp-gpupool-hue${((number - 1) % 10) + 1}`;
}
