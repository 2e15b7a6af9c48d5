// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Keeps the keyboard's place on the page when the button that had it goes. */
import * as React from 'react';

/**
 * What to give the page's element. An order takes its own button away: "Pause…" becomes
 * "Put back…", and a session that ends takes its row with it. The focus would go to the start of
 * the document; it goes to the first button of the same list item or row, or else to the page.
 */
export function useKeptFocus(): {
  readonly ref: React.RefObject<HTMLDivElement>;
  readonly onFocus: (event: React.FocusEvent) => void;
} {
  const ref = React.useRef<HTMLDivElement>(null);
  const last = React.useRef<{ element: Element; group: Element | null } | null>(null);
  const onFocus = React.useCallback((event: React.FocusEvent) => {
    const element = event.target;
    last.current = { element, group: element.closest('li, tr') };
  }, []);
  React.useLayoutEffect(() => {
    const lost = last.current;
    const active = document.activeElement;
    if (
      lost === null ||
      lost.element.isConnected ||
      (active !== null && active !== document.body)
    ) {
      return;
    }
    last.current = null;
    const next = lost.group?.isConnected ? lost.group.querySelector('button') : null;
    (next ?? ref.current)?.focus();
  });
  return { ref, onFocus };
}
