// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import { act } from '@testing-library/react';
import { MessageLoop } from '@lumino/messaging';

/**
 * Run `does`. Then run the renders that widgets have queued in Lumino's message loop.
 */
export function drawn(does: () => unknown): void {
  act(() => {
    does();
    MessageLoop.flush();
  });
}
