// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** The machines of the cluster; draws nothing if this machine is in no cluster. */
import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import { duration } from '../admin/rows';
import type { IMachine } from '../api';
import { bytes } from '../words';
import { Section } from './section';
import { useMachines, useTools } from './tools';

export const Machines = React.memo(function Machines(): React.ReactElement | null {
  const { trans } = useTools();
  const found = useMachines();
  if (found === null || found.machines.length === 0) {
    return null;
  }
  return (
    <Section
      name="machines"
      title={trans.__('Machines')}
      aside={String(found.machines.length + found.left_out)}
    >
      {found.connected === false && (
        <p className="jp-gpupool-plain" role="status">
          {trans.__(
            'The cluster’s ledger does not answer, so only this machine is shown.'
          )}
        </p>
      )}
      <ul className="jp-gpupool-list">
        {found.machines.map(machine => (
          <li key={machine.name}>
            <div className="jp-gpupool-line">
              <strong className="jp-gpupool-deviceName" title={machine.name}>
                {machine.here
                  ? trans.__('%1 (this machine)', machine.name)
                  : machine.name}
              </strong>
              <span className="jp-gpupool-figure">{stateText(trans, machine)}</span>
            </div>
            <p className="jp-gpupool-plain">
              {figures(trans, machine).reduce((all, one) =>
                trans.__('%1 · %2', all, one)
              )}
            </p>
          </li>
        ))}
      </ul>
      {found.left_out > 0 && (
        <p className="jp-gpupool-plain">
          {trans._n(
            '%1 more machine is not shown.',
            '%1 more machines are not shown.',
            found.left_out
          )}
        </p>
      )}
    </Section>
  );
});

/** The state of a machine in words; if it is unreachable, also for how long. */
function stateText(trans: TranslationBundle, machine: IMachine): string {
  switch (machine.state) {
    case 'reachable':
      return trans.__('reachable');
    case 'unreachable':
      return trans.__('unreachable for %1', duration(trans, machine.age));
    case 'draining':
      return trans.__('draining: no new slices');
    case 'left':
      return trans.__('has left the cluster');
    case 'gone':
      return trans.__('fenced by an administrator');
    default:
      return machine.state; // a newer server may send other states
  }
}

/**
 * The known figures of a machine: its GPUs, its free memory, its queue, and the number
 * of the user's kernels on it.
 */
function figures(trans: TranslationBundle, machine: IMachine): string[] {
  const { devices, out, free, waiting, gpus, mine } = machine;
  if (devices === null || free === null || waiting === null) {
    return [trans.__('Its GPUs are not known.')];
  }
  const named = models(trans, gpus);
  const text = named.length > 0 ? named : [trans._n('%1 GPU', '%1 GPUs', devices)];
  if (out) {
    text.push(trans.__('%1 out of service', out));
  }
  text.push(trans.__('%1 free', bytes(free)));
  if (gpus !== null && gpus.length > 1) {
    const most = Math.max(...gpus.map(gpu => gpu.free));
    text.push(trans.__('at most %1 on one GPU', bytes(most)));
  }
  text.push(
    waiting === 0
      ? trans.__('nobody waits')
      : trans._n('%1 kernel waits', '%1 kernels wait', waiting)
  );
  if (mine === null) {
    text.push(trans.__('your kernels: not known'));
  } else if (mine > 0) {
    text.push(trans._n('%1 kernel of yours', '%1 kernels of yours', mine));
  }
  return text;
}

/** The GPUs in service, counted by model: `2 × NVIDIA A100`. */
function models(trans: TranslationBundle, gpus: IMachine['gpus']): string[] {
  const counts = new Map<string, number>();
  for (const { name } of gpus ?? []) {
    counts.set(name, (counts.get(name) ?? 0) + 1);
  }
  return [...counts].map(([name, count]) => trans.__('%1 × %2', count, name));
}
