// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/**
 * Shows why a kernel waits, or who may take its slice, in the broker's words. Also
 * shows what users can do.
 */
import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import type { ISession } from '../api';
import type { IPoolModel } from '../tokens';
import { Marked } from './answer';
import { WaitActions } from '../waits/actions';
import { ticker, useTick } from '../ticker';
import { usePlan } from '../waits/hooks';
import { waitSentence } from '../words';

interface IProps {
  readonly trans: TranslationBundle;
  readonly model: IPoolModel;
  readonly session: ISession;
}

export function Why(props: IProps): React.JSX.Element {
  const { trans, model, session } = props;
  const length = model.view?.queue_length ?? 0;
  const plan = usePlan(trans, model.client, session.kernel_id, session, length);
  const id = React.useId();
  const waits = session.state === 'queued';
  useTick(ticker, waits);
  const { lines = [], time_line: time, machines = [] } = plan.found ?? {};
  return (
    <section className="jp-gpupool-Popover-why" aria-labelledby={id}>
      <h3 id={id} className="jp-gpupool-Popover-title">
        {waits ? trans.__('Why am I waiting?') : trans.__('Who may take this slice?')}
      </h3>
      {lines.map((line, i) => (
        <p key={i}>
          <Marked
            line={
              waits && time && line === time
                ? waitSentence(trans, session, model.now())
                : line
            }
          />
        </p>
      ))}
      {waits && machines.length > 0 ? (
        <Machines trans={trans} lines={machines} />
      ) : null}
      {plan.fault ? (
        <p className="jp-mod-refused">
          <Marked line={plan.fault} />
        </p>
      ) : null}
      {waits ? (
        <WaitActions trans={trans} model={model} session={session} plan={plan.found} />
      ) : null}
    </section>
  );
}

/** What other machines of the cluster have and lack, in the broker's words. */
function Machines(props: {
  readonly trans: TranslationBundle;
  readonly lines: readonly string[];
}): React.JSX.Element {
  return (
    <details>
      <summary>{props.trans.__('Other machines')}</summary>
      {props.lines.map((line, i) => (
        <p key={i}>{line}</p>
      ))}
    </details>
  );
}

/**
 * Guarantees, shares and daily budgets of the user and their groups, in the broker's
 * words.
 */
export function Standing(props: {
  readonly trans: TranslationBundle;
  readonly lines: readonly string[];
}): React.JSX.Element {
  const id = React.useId();
  return (
    <section className="jp-gpupool-Popover-why" aria-labelledby={id}>
      <h3 id={id} className="jp-gpupool-Popover-title">
        {props.trans.__('My share')}
      </h3>
      {props.lines.map((line, i) => (
        <p key={i}>{line}</p>
      ))}
    </section>
  );
}
