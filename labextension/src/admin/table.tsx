// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** The admin's page: GPUs, and all sessions in a table. */
import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import type { IAdmin, IAdminSession, IDevice, INote } from '../api';
import { granted, inShort, utilisation } from '../panel/describe';
import { Emulated } from '../panel/header';
import { refusal } from '../tell';
import { OLD, OLD_REFUSAL } from '../toolbar/hooks';
import { bytes, dayAndTime, localTime, sentence, waited, waitTime } from '../words';
import { useKeptFocus } from './focus';
import type { Orders } from './orders';
import type { IRow, Sort } from './rows';
import { duration, rows, stateText, wasteText } from './rows';

export interface IAdminProps {
  readonly trans: TranslationBundle;
  readonly orders: Orders;
  /** Null before the first answer. */
  readonly view: IAdmin | null;
  /** Why the view could not be updated; empty if it is up to date. */
  readonly fault: string;
  readonly model: { now(): number };
  /** Request the view again now. */
  readonly refresh: () => void;
}

interface IColumn {
  readonly sort: Sort | null;
  readonly title: string;
  /** What the figure means. */
  readonly meaning?: string;
}

function columns(trans: TranslationBundle): readonly IColumn[] {
  return [
    { sort: 'name', title: trans.__('Notebook') },
    { sort: 'owner', title: trans.__('User') },
    { sort: null, title: trans.__('GPU') },
    { sort: null, title: trans.__('State') },
    { sort: 'slice', title: trans.__('Slice') },
    { sort: 'used', title: trans.__('Used') },
    {
      sort: 'busy',
      title: trans.__('CUDA'),
      meaning: trans.__(
        'While the kernel had a slice, it used CUDA for this share of the time'
      )
    },
    {
      sort: 'waste',
      title: trans.__('Wasted'),
      meaning: trans.__(
        'The size of the slice, and how long the kernel had a slice without using CUDA. This column sorts by size multiplied by time.'
      )
    },
    { sort: 'idle', title: trans.__('Idle for') },
    { sort: 'kept', title: trans.__('Kept until') },
    { sort: 'waits', title: trans.__('Waited') }
  ];
}

/**
 * Show the answer to an order. `whom` is the name of the kernel that the order
 * concerns; it is missing for an order about a GPU.
 */
type Run = (order: Promise<INote | null>, whom?: string) => void;

const NO_ANSWER = { text: '', refused: false };

export function AdminPage(props: IAdminProps): React.ReactElement {
  const { trans, view, fault, orders, refresh } = props;
  const [sort, setSort] = React.useState<Sort>('waste');
  const [inverted, setInverted] = React.useState(false);
  const [answer, setAnswer] = React.useState(NO_ANSWER);
  const run: Run = React.useCallback(
    (order, whom = '') => {
      // The answer appears far from the kernel's row, and rows move. So the text begins
      // with the kernel's name.
      const about = (text: string) => (whom ? trans.__('%1: %2', whom, text) : text);
      order
        .then(
          done => {
            if (done !== null) {
              setAnswer({ text: about(done.note), refused: false });
            }
          },
          (error: unknown) =>
            setAnswer({ text: about(refusal(trans, error)), refused: true })
        )
        .finally(refresh);
    },
    [trans, refresh]
  );
  React.useEffect(() => {
    // Remove the answer after a while, because a time in it, such as "in 5 min",
    // becomes wrong.
    const timer = setTimeout(
      () => setAnswer(now => (now === answer ? NO_ANSWER : now)),
      answer.refused ? OLD_REFUSAL : OLD
    );
    return () => clearTimeout(timer);
  }, [answer]);
  const choose = (column: Sort) => {
    setInverted(column === sort && !inverted);
    setSort(column);
  };
  const kept = useKeptFocus();
  return (
    <div {...kept} className="jp-gpupool-adminPage" tabIndex={-1}>
      <h2>
        {trans.__('GPU Pool: all sessions')}{' '}
        {view?.devices.some(device => device.emulated) && <Emulated trans={trans} />}
      </h2>
      {fault && (
        <p className="jp-gpupool-alert" role="alert">
          {fault}
        </p>
      )}
      <p
        role="status"
        className={`jp-gpupool-result${answer.refused ? ' jp-mod-bad' : ''}`}
      >
        {answer.text}
      </p>
      {view === null && !fault && <p>{trans.__('Asking the pool…')}</p>}
      {view && (
        <>
          <p>
            {inShort(
              trans,
              view.devices.length,
              view.sessions.filter(session => session.granted_bytes > 0).length,
              view.sessions.filter(session => session.state === 'queued').length
            )}
          </p>
          <Devices trans={trans} view={view} orders={orders} run={run} />
          <Sessions
            {...props}
            view={view}
            shown={rows(view, sort, inverted)}
            sort={sort}
            inverted={inverted}
            choose={choose}
            run={run}
          />
        </>
      )}
    </div>
  );
}

function Devices(props: {
  readonly trans: TranslationBundle;
  readonly view: IAdmin;
  readonly orders: Orders;
  readonly run: Run;
}): React.ReactElement {
  const { trans, view, orders, run } = props;
  const ordered = (device: IDevice) =>
    view.maintenance.find(order => order.device === device.uuid);
  return (
    <ul
      className="jp-gpupool-list jp-gpupool-adminDevices"
      aria-label={trans.__('GPUs')}
    >
      {view.devices.map(device => {
        const order = ordered(device);
        const out = order?.text ?? device.drained_reason;
        const actions: ['drain' | 'pause' | 'resume', string][] = order
          ? [['resume', trans.__('Put back…')]]
          : [
              ['drain', trans.__('Drain…')],
              ['pause', trans.__('Pause…')]
            ];
        return (
          <li key={device.uuid}>
            <b>{trans.__('GPU %1', device.index)}</b>{' '}
            {trans.__('%1, %2', granted(trans, device), utilisation(trans, device))}
            {out && <span className="jp-gpupool-note"> {out}</span>}
            <span className="jp-gpupool-actions">
              {actions.map(([action, text]) => (
                <button
                  key={action}
                  type="button"
                  className="jp-gpupool-button"
                  aria-label={trans.__('GPU %1: %2', device.index, text)}
                  onClick={() => run(orders.device(device, action))}
                >
                  {text}
                </button>
              ))}
            </span>
          </li>
        );
      })}
    </ul>
  );
}

interface ISessionsProps extends IAdminProps {
  readonly view: IAdmin;
  readonly shown: readonly IRow[];
  readonly sort: Sort;
  readonly inverted: boolean;
  readonly choose: (sort: Sort) => void;
  readonly run: Run;
}

function Sessions(props: ISessionsProps): React.ReactElement {
  const { trans, shown, sort, inverted, choose } = props;
  if (shown.length === 0) {
    return <p>{trans.__('No kernel is in the pool.')}</p>;
  }
  // Unless `inverted`, names are sorted from A to Z, and figures from the largest to
  // the smallest.
  const rising = (sort === 'owner' || sort === 'name') !== inverted;
  return (
    <div
      className="jp-gpupool-adminScroll"
      role="region"
      aria-label={trans.__('All sessions')}
    >
      <table className="jp-gpupool-adminTable">
        <thead>
          <tr>
            {columns(trans).map(column => (
              <th
                key={column.title}
                scope="col"
                title={column.meaning}
                aria-sort={
                  column.sort === sort
                    ? rising
                      ? 'ascending'
                      : 'descending'
                    : undefined
                }
              >
                {column.sort === null ? (
                  column.title
                ) : (
                  <button
                    type="button"
                    className="jp-gpupool-link"
                    onClick={() => column.sort && choose(column.sort)}
                  >
                    {column.title}
                    {column.sort === sort && (
                      <span aria-hidden="true"> {rising ? '↑' : '↓'}</span>
                    )}
                  </button>
                )}
              </th>
            ))}
            <th scope="col" className="jp-gpupool-actions">
              {trans.__('Actions')}
            </th>
          </tr>
        </thead>
        <tbody>
          {shown.map(row => (
            <SessionRow key={row.session.id} {...props} row={row} />
          ))}
        </tbody>
      </table>
    </div>
  );
}

/**
 * `20 to 60 s left`, or a note that there is no estimate. The column "Waited" shows how
 * long the session has waited, so this text leaves that out.
 */
function left(trans: TranslationBundle, session: IAdminSession, now: number): string {
  return waitTime(trans, { ...session, queued_at: null }, now);
}

function SessionRow(
  props: ISessionsProps & { readonly row: IRow }
): React.ReactElement {
  const { trans, model, orders, run, row, view } = props;
  const { session } = row;
  const numbers = session.devices.map(
    uuid => view.devices.find(device => device.uuid === uuid)?.index ?? '?'
  );
  const until = session.keep_until;
  // A waiting session has no slice. So its state, with the reason of the wait, also
  // fills the columns for the slice and its use.
  const waits = session.state === 'queued';
  const recall = session.recall_at;
  const time = (at: number) => dayAndTime(trans, localTime(model, at));
  const button = (text: string, label: string, order: () => Promise<INote | null>) => (
    <button
      type="button"
      className="jp-gpupool-button"
      aria-label={label}
      onClick={() => run(order(), row.name)}
    >
      {text}
    </button>
  );
  return (
    <tr>
      <th scope="row" title={session.id}>
        {row.name}
      </th>
      <td>{row.owner}</td>
      <td>{numbers.join(', ')}</td>
      <td colSpan={waits ? 3 : 1}>
        {stateText(trans, row)}
        {waits && <> · {left(trans, session, model.now())}</>}
        {waits && session.wait_reason && (
          <div className="jp-gpupool-note">{sentence(session.wait_reason)}</div>
        )}
        {session.pinned_reason && (
          <div className="jp-gpupool-note">{session.pinned_reason}</div>
        )}
      </td>
      {!waits && (
        <>
          <td className="jp-mod-number">{row.slice > 0 && bytes(row.slice)}</td>
          <td className="jp-mod-number">
            {row.slice > 0 &&
              (row.used === null ? trans.__('not known') : bytes(row.used))}
          </td>
        </>
      )}
      <td className="jp-mod-number">
        {row.busy !== null && trans.__('%1 %', Math.round(row.busy * 100))}
      </td>
      <td className="jp-mod-number">{wasteText(trans, row)}</td>
      <td className="jp-mod-number">
        {row.idle !== null && duration(trans, row.idle)}
      </td>
      <td>
        {recall !== null
          ? trans.__('Goes back at %1', time(recall))
          : row.kept !== null && until !== null && time(until)}
      </td>
      <td className="jp-mod-number">
        {row.waits !== null && waited(trans, row.waits)}
      </td>
      <td className="jp-gpupool-actions">
        {row.slice > 0 &&
          (recall === null
            ? button(
                trans.__('Take back…'),
                trans.__('Take the slice of %1 back', row.name),
                () => orders.recall(row)
              )
            : button(
                trans.__('Do not take back'),
                trans.__('Let %1 keep its slice', row.name),
                () => orders.keep(row)
              ))}
        {button(
          trans.__('Priority…'),
          trans.__('Change the priority of %1', row.name),
          () => orders.prioritise(row, view.priorities)
        )}
        {button(trans.__('Shut down…'), trans.__('Shut down %1', row.name), () =>
          orders.end(row)
        )}
      </td>
    </tr>
  );
}
