// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * Shows what the user can do while a kernel waits, and fetches the broker's plan for
 * the kernel.
 */
import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import type { ISession } from '../api';
import type { IPoolModel } from '../tokens';
import { WaitActions } from './actions';
import { usePlan } from './hooks';

export function Offered(props: {
  readonly trans: TranslationBundle;
  readonly model: IPoolModel;
  readonly session: ISession;
  /** The kernel's name, if several kernels wait. */
  readonly name?: string;
}): React.JSX.Element {
  const { trans, model, session } = props;
  const length = model.view?.queue_length ?? 0;
  const { found } = usePlan(trans, model.client, session.kernel_id, session, length);
  return <WaitActions {...props} plan={found} />;
}
