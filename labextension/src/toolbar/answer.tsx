// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import * as React from 'react';

import { marked } from '../tell';
import type { IAnswer } from './hooks';

/** A sentence of the server, with its commands as code. */
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
 * The place for answers. It is always present, so screen readers announce new text in
 * it.
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
