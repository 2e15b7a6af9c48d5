// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import * as React from 'react';

import { marked } from '../tell';
import type { IAnswer } from './hooks';

/** Shows a sentence of the server. The commands in the sentence are shown as code. */
export function Marked({ line }: { readonly line: string }): React.JSX.Element {
  return (
    <>
      {marked(line).map(({ text, code }, at) =>
        code ? <code key={at}>{text}</code> : text
      )}
    </>
  );
}

/**
 * Shows an answer. The element exists even without an answer, because screen readers
 * announce only text that appears in an existing element.
 */
export function Answer(props: {
  readonly answer: IAnswer | null;
  readonly id?: string;
}): React.JSX.Element {
  const { answer, id } = props;
  return (
    <div id={id} className="jp-gpupool-Popover-answer">
      <div role="status">
        {answer && !answer.refused ? <Marked line={answer.text} /> : null}
      </div>
      <div role="alert" className="jp-mod-refused">
        {answer?.refused ? <Marked line={answer.text} /> : null}
      </div>
    </div>
  );
}
