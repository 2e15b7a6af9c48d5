// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Keeps the focus at its place on the page when the focused button disappears. */
import * as React from 'react';

/**
 * Properties for the page's element. An order removes its own button: "Pause…" becomes
 * "Put back…", and the row of a session disappears when the session ends. Without this
 * hook the focus would go to the start of the document. With this hook, the focus goes
 * to the first button of the same list item or row. If there is no such button, it goes
 * to the page's element.
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
