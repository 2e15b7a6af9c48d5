// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** The whole panel, which passes the data to its sections. */
import * as React from 'react';

import type { IPool } from '../api';
import type { IBroker, IPoolModel } from '../tokens';
import { isMine } from '../tokens';
import type { IArranged } from './arrange';
import { Devices } from './devices';
import { Header } from './header';
import { Kernels } from './kernels';
import { LastHour } from './lasthour';
import { Machines } from './machines';
import { Notices } from './notices';
import { Queue } from './queue';
import { Section } from './section';
import type { ITools } from './tools';
import { Tools } from './tools';
import { HostMemory, Share, Usage } from './totals';

export interface IPanelProps {
  readonly tools: ITools;
  readonly view: IPool | null;
  readonly broker: IBroker;
  readonly live: boolean;
  readonly found: IPoolModel['found'];
  /** Null if the view is null. */
  readonly arranged: IArranged | null;
}

export function Panel(props: IPanelProps): React.ReactElement {
  const { view, arranged, broker, live, found } = props;
  const { trans } = props.tools;
  // All sessions of one user have the same share.
  const own = view?.sessions.filter(isMine).find(session => session.standing?.length);
  return (
    <Tools.Provider value={props.tools}>
      <Header
        view={view}
        broker={broker}
        live={live}
        found={found}
        having={arranged?.having ?? 0}
        waiting={arranged?.waiting ?? 0}
      />
      {view && <Notices view={view} />}
      {view && arranged && (
        <div
          className={
            broker.status === 'away' ? 'jp-gpupool-body jp-mod-old' : 'jp-gpupool-body'
          }
        >
          {arranged.rows.length > 0 && (
            <>
              <Section name="devices" title={trans.__('Devices')}>
                <Devices rows={arranged.rows} />
              </Section>
              <Section
                name="queue"
                title={trans.__('Queue')}
                aside={String(arranged.queue.length)}
              >
                <Queue rows={arranged.queue} />
              </Section>
            </>
          )}
          <Machines />
          <Section
            name="kernels"
            title={trans.__('My kernels on this server')}
            aside={String(arranged.kernels.length)}
          >
            <Kernels
              rows={arranged.kernels}
              elsewhere={arranged.elsewhere}
              devices={arranged.devices}
            />
          </Section>
          {own?.standing && (
            <Section name="share" title={trans.__('My share')}>
              <Share lines={own.standing} budgets={own.budgets ?? []} />
            </Section>
          )}
          {arranged.rows.length > 0 && (
            <Section name="hour" title={trans.__('Last hour')}>
              <LastHour rows={arranged.rows} />
            </Section>
          )}
          <Section name="host" title={trans.__('Host memory')}>
            <HostMemory host={view.host} suspended={arranged.suspended} />
          </Section>
          <Section name="use" title={trans.__('Use')}>
            <Usage />
          </Section>
        </div>
      )}
    </Tools.Provider>
  );
}
