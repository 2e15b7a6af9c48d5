// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Shows totals: the suspended bytes in host memory, and the use of the devices. */
import * as React from 'react';

import { duration } from '../admin/rows';
import type { IBudget, IPool } from '../api';
import { bytes, part } from '../words';
import { percent } from './geometry';
import { useHistory, useTools } from './tools';

interface IMeterProps {
  readonly label: string;
  readonly text: string;
  /** My part and the other users' part, 0 to 1. */
  readonly mine: number;
  readonly others: number;
}

function Meter(props: IMeterProps): React.ReactElement {
  const mine = Math.min(1, Math.max(0, props.mine));
  const others = Math.min(1 - mine, Math.max(0, props.others));
  return (
    <div
      className="jp-gpupool-meter"
      role="meter"
      aria-label={props.label}
      aria-valuemin={0}
      aria-valuemax={100}
      aria-valuenow={Math.round((mine + others) * 100)}
      aria-valuetext={props.text}
    >
      <span className="jp-gpupool-meterMine" style={{ width: percent(mine) }} />
      <span className="jp-gpupool-meterOthers" style={{ width: percent(others) }} />
    </div>
  );
}

export const HostMemory = React.memo(function HostMemory(props: {
  readonly host: IPool['host'];
  /** Suspended bytes of my kernels. */
  readonly suspended: number;
}): React.ReactElement {
  const { trans } = useTools();
  const { budget_bytes: budget, used_bytes: used, available_bytes: left } = props.host;
  const mine = Math.min(props.suspended, used);
  const text = trans.__('%1 used by suspended kernels', part(trans, used, budget));
  return (
    <>
      <Meter
        label={trans.__('Host memory for suspended kernels')}
        text={text}
        mine={budget > 0 ? mine / budget : 0}
        others={budget > 0 ? (used - mine) / budget : 0}
      />
      <p className="jp-gpupool-plain">
        {used > 0 ? trans.__('%1 · yours: %2', text, bytes(mine)) : text}
      </p>
      <p className="jp-gpupool-plain jp-gpupool-figure">
        {trans.__('Free on this machine: %1', left === null ? '?' : bytes(left))}
      </p>
    </>
  );
});

/**
 * Guarantees, shares and daily budgets of the user and their groups, in the broker's
 * words.
 */
export const Share = React.memo(function Share(props: {
  readonly lines: readonly string[];
  readonly budgets: readonly IBudget[];
}): React.ReactElement {
  const { trans } = useTools();
  return (
    <>
      {props.lines.map(line => (
        <p key={line} className="jp-gpupool-plain">
          {line}
        </p>
      ))}
      {props.budgets.map(budget => {
        const used = Math.min(budget.seconds, budget.seconds - budget.left);
        return (
          <Meter
            key={budget.group}
            label={
              budget.group
                ? trans.__('GPU-seconds used by group %1 today', budget.group)
                : trans.__('My GPU-seconds used today')
            }
            text={trans.__(
              '%1 of %2 GPU-seconds',
              Math.round(used),
              Math.round(budget.seconds)
            )}
            mine={budget.seconds > 0 ? used / budget.seconds : 1}
            others={0}
          />
        );
      })}
    </>
  );
});

export const Usage = React.memo(function Usage(): React.ReactElement {
  const { trans } = useTools();
  const history = useHistory();
  if (history === null) {
    return (
      <p className="jp-gpupool-plain">
        {trans.__('Not known. To see your use of the GPUs, open a Pooled GPU kernel.')}
      </p>
    );
  }
  const { attached_seconds: attached, kernel_seconds: open } = history.usage;
  const share = open > 0 ? Math.min(1, attached / open) : null;
  const text =
    share === null
      ? trans.__('None of your kernels has run since the server started.')
      : trans.__(
          'Since the server started, your kernels ran for %2 and had a GPU for %1 (%3 of this time).',
          duration(trans, attached),
          duration(trans, open),
          trans.__('%1 %', Math.round(share * 100))
        );
  return (
    <>
      {/* A meter needs a value, so an unknown share has no meter. */}
      {share !== null && (
        <Meter
          label={trans.__('Share of the time in which your kernels had a slice')}
          text={text}
          mine={share}
          others={0}
        />
      )}
      <p className="jp-gpupool-plain">{text}</p>
    </>
  );
});
