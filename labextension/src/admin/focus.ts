// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Moves the focus to a button nearby when the focused button disappears. */
import * as React from 'react';

/**
 * Return `ref` and `onFocus` for the page's element. An order may remove the focused
 * button: "Pause…" becomes "Put back…", and the row of an ended session disappears. The
 * browser then moves the focus to the start of the document. This hook moves the focus
 * to the first button of the same list item or row instead. If that item or row has no
 * button or is gone, the page's element gets the focus.
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
