// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** The use of a slice, beside its guarantee and its limit. */
import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import type { INamedDevice, ISession } from '../api';
import { bytes, gpus, part } from '../words';
import { usedBytes } from './situation';

export function Bar(props: {
  readonly trans: TranslationBundle;
  readonly session: ISession;
  readonly devices: readonly INamedDevice[];
}): React.JSX.Element {
  const { trans, session } = props;
  const used = usedBytes(session);
  const devices = Math.max(1, session.devices.length);
  const asked = session.request.memory * devices;
  // A slice may be smaller than the request. In that case only the bytes of the slice
  // are guaranteed.
  const guaranteed = Math.min(asked, session.granted_bytes);
  const limit = session.request.limit * devices;
  const whole = Math.max(limit, session.granted_bytes, used ?? 0, 1);
  const percent = (value: number) =>
    `${(Math.min(1, value / whole) * 100).toFixed(1)}%`;
  const words = [
    used === null ? trans.__('use not measured') : trans.__('%1 used', bytes(used)),
    ...(asked > guaranteed
      ? [
          trans.__('%1 granted', bytes(guaranteed)),
          trans.__('%1 asked for', bytes(asked))
        ]
      : [trans.__('%1 guaranteed', bytes(guaranteed))]),
    ...(limit > asked ? [trans.__('up to %1', bytes(limit))] : [])
  ];
  // Slices on several devices grow separately, so list each one.
  const each = session.slices.map(({ device, granted_bytes: size, used_bytes: use }) =>
    trans.__(
      '%1: %2',
      gpus(trans, [device], props.devices),
      typeof use === 'number' ? part(trans, use, size) : bytes(size)
    )
  );
  return (
    <div className="jp-gpupool-Popover-bar">
      <div
        className={`jp-gpupool-Popover-track jp-mod-${session.state}`}
        aria-hidden="true"
      >
        <div
          className="jp-gpupool-Popover-granted"
          style={{ width: percent(session.granted_bytes) }}
        />
        <div
          className="jp-gpupool-Popover-used"
          style={{ width: percent(used ?? 0) }}
        />
        {limit > guaranteed ? (
          <div
            className="jp-gpupool-Popover-mark"
            style={{ left: percent(guaranteed) }}
          />
        ) : null}
      </div>
      <p className="jp-gpupool-Popover-note">{words.join(' · ')}</p>
      {each.length > 1 ? (
        <p className="jp-gpupool-Popover-note">{each.join(' · ')}</p>
      ) : null}
    </div>
  );
}
