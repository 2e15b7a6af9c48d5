// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** The session context of a notebook, a console, or another widget with a kernel. */
import type { ISessionContext } from '@jupyterlab/apputils';
import type { Widget } from '@lumino/widgets';

interface IHasContext {
  readonly sessionContext?: ISessionContext;
  readonly context?: { readonly sessionContext?: ISessionContext };
}

export function contextOf(widget: Widget | null): ISessionContext | null {
  const has: (Widget & IHasContext) | null = widget;
  return has?.sessionContext ?? has?.context?.sessionContext ?? null;
}

/**
 * Return the context of the widget that shows the kernel; null if no widget shows it.
 */
export function contextFor(
  widgets: Iterable<Widget>,
  kernelId: string
): ISessionContext | null {
  for (const widget of widgets) {
    const context = contextOf(widget);
    if (context?.session?.kernel?.id === kernelId) {
      return context;
    }
  }
  return null;
}
