// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Notices for all users: GPUs out of service, and a broker with another configuration. */
import * as React from 'react';

import type { IPool } from '../api';
import { orderText } from '../maintenance';
import { Marked } from '../toolbar/answer';
import { dayAndTime, localTime } from '../words';
import { useTools } from './tools';

export const Notices = React.memo(function Notices(props: {
  readonly view: IPool;
}): React.ReactElement | null {
  const { trans, model } = useTools();
  const { view } = props;
  const orders = view.maintenance ?? [];
  if (orders.length === 0 && !view.configuration_notice) {
    return null;
  }
  return (
    <ul className="jp-gpupool-list jp-gpupool-notices" aria-label={trans.__('Notices')}>
      {orders.map(order => (
        <li key={order.device} className="jp-gpupool-alert">
          {orderText(
            trans,
            order,
            view,
            dayAndTime(trans, localTime(model, order.since))
          )}
          {order.closed ? null : (
            <p>
              {trans.__('Kernels that already use a GPU may finish their work first.')}
            </p>
          )}
        </li>
      ))}
      {view.configuration_notice ? (
        <li className="jp-gpupool-alert">
          <strong>{trans.__('Another configuration is in force')}</strong>
          <p>
            <Marked line={view.configuration_notice} />
          </p>
        </li>
      ) : null}
    </ul>
  );
});
