// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import { act } from '@testing-library/react';
import { MessageLoop } from '@lumino/messaging';

/** Run `does`, and then the renders that widgets have delayed to Lumino's next turn. */
export function drawn(does: () => unknown): void {
  act(() => {
    does();
    MessageLoop.flush();
  });
}
