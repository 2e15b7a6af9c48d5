// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import { act } from '@testing-library/react';
import { MessageLoop } from '@lumino/messaging';

/** Run `act`, and the renders that widgets have delayed to the next turn of Lumino's loop. */
export function drawn(does: () => unknown): void {
  act(() => {
    does();
    MessageLoop.flush();
  });
}
