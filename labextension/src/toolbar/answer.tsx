// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import * as React from 'react';

import type { IAnswer } from './hooks';

/** The place for answers: always present, so that screen readers announce new text in it. */
export function Answer(props: {
  readonly answer: IAnswer | null;
  readonly id?: string;
}): React.JSX.Element {
  const { answer, id } = props;
  return (
    <div id={id} className="jp-gpupool-Popover-answer">
      <div role="status">{answer && !answer.refused ? answer.text : null}</div>
      <div role="alert" className="jp-mod-refused">
        {answer?.refused ? answer.text : null}
      </div>
    </div>
  );
}
