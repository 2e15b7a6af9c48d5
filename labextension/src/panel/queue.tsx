// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** The waiting kernels in order, and what users can do for their own kernels. */
import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import type { IAnySession, ISession } from '../api';
import { isMine } from '../tokens';
import { useTick } from '../ticker';
import { Offered } from '../waits/offered';
import { bytes, ordinal, sentence, waited, waitTime } from '../words';
import type { IWaitRow } from './arrange';
import { somebody } from './describe';
import { Badge } from './section';
import { useTools } from './tools';

/**
 * The list shows other users' kernels up to this place, and my kernels at every place.
 */
export const LISTED = 20;

/**
 * The number of my kernels whose actions are shown without a click. The page requests
 * the broker's plan for each of these kernels.
 */
export const OPEN = 2;

export const Queue = React.memo(function Queue(props: {
  readonly rows: readonly IWaitRow[];
}): React.ReactElement {
  const { trans } = useTools();
  if (props.rows.length === 0) {
    return <p className="jp-gpupool-plain">{trans.__('Nobody waits for a GPU.')}</p>;
  }
  const listed = props.rows.filter((row, i) => i < LISTED || row.session.mine);
  const more = props.rows.length - listed.length;
  const open = new Set(
    listed
      .map(({ session }) => session)
      .filter(session => isMine(session) && session.here)
      .slice(0, OPEN)
      .map(({ id }) => id)
  );
  return (
    <>
      <ol className="jp-gpupool-list jp-gpupool-queue">
        {listed.map(row => (
          <Waiting key={row.session.id} row={row} open={open.has(row.session.id)} />
        ))}
      </ol>
      {more > 0 && (
        <p className="jp-gpupool-plain">
          {trans._n('%1 more kernel waits.', '%1 more kernels wait.', more)}
        </p>
      )}
    </>
  );
});

const Waiting = React.memo(function Waiting(props: {
  readonly row: IWaitRow;
  readonly open: boolean;
}): React.ReactElement {
  const { trans, model, ticker } = useTools();
  const { session, name, number } = props.row;
  useTick(ticker, true);
  const place =
    session.queue_position === null ? '?' : ordinal(trans, session.queue_position);
  if (!isMine(session)) {
    const why = othersWait(trans, session, model.now());
    return (
      <li>
        <div className="jp-gpupool-line">
          <span className="jp-gpupool-place">{place}</span>
          <span className="jp-gpupool-grow">{somebody(trans, session)}</span>
          <span className="jp-gpupool-figure">{size(trans, session.asks)}</span>
        </div>
        {why && <div className="jp-gpupool-why">{why}</div>}
      </li>
    );
  }
  const time = waitTime(trans, session, model.now());
  const figures = [size(trans, session.asks ?? session.request), time].filter(Boolean);
  return (
    <li>
      <div className="jp-gpupool-line">
        <span className="jp-gpupool-place">{place}</span>
        <Badge number={number} />
        <span className="jp-gpupool-grow jp-gpupool-strong">{name}</span>
        <span className="jp-gpupool-figure">{figures.join(' · ')}</span>
      </div>
      {session.wait_reason && (
        <div className="jp-gpupool-why">{sentence(session.wait_reason)}</div>
      )}
      {session.here && <Help session={session} name={name} open={props.open} />}
    </li>
  );
});

/** `Has waited 40 s for GPU memory that is in use.`: the wait of another user's kernel. */
function othersWait(
  trans: TranslationBundle,
  session: IAnySession,
  now: number
): string {
  const { waits_for: what, queued_at: since } = session;
  const soFar = waited(trans, now - (since ?? now));
  if (!soFar) {
    return what ? trans.__('Waits for %1.', what) : '';
  }
  return what
    ? trans.__('Has waited %1 for %2.', soFar, what)
    : trans.__('Has waited %1.', soFar);
}

/**
 * What the user can do for a waiting kernel: shown at once if `open`, else after a
 * click.
 */
function Help(props: {
  readonly session: ISession;
  readonly name: string;
  readonly open: boolean;
}): React.ReactElement {
  const { trans, model } = useTools();
  const { session, name, open } = props;
  const [asked, setAsked] = React.useState(false);
  return (
    <>
      {!open && (
        <button
          type="button"
          className="jp-gpupool-button"
          aria-expanded={asked}
          aria-label={trans.__('What can I do? %1', name)}
          onClick={() => setAsked(before => !before)}
        >
          {trans.__('What can I do?')}
        </button>
      )}
      {(open || asked) && (
        <Offered trans={trans} model={model} session={session} name={name} />
      )}
    </>
  );
}

/** `6 GiB`, `6 GiB on each of 2 GPUs`: what a session asks for; empty if not known. */
function size(trans: TranslationBundle, asks: IAnySession['asks']): string {
  if (!asks || asks.memory <= 0) {
    return '';
  }
  return asks.devices > 1
    ? trans.__('%1 on each of %2 GPUs', bytes(asks.memory), asks.devices)
    : bytes(asks.memory);
}
