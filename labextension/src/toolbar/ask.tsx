// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** A form to ask for another size: a slider and a field with the same value. */
import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import type { IRequest, PoolClient } from '../api';
import { bytes } from '../words';
import { Answer } from './answer';
import { useAnswer } from './hooks';
import { editable, exact, parseSize, positionOf, readSize, sizeAt } from './sizes';

interface IProps {
  readonly trans: TranslationBundle;
  readonly client: PoolClient;
  readonly kernelId: string;
  /** The word for the document that uses the kernel, such as `notebook`. */
  readonly what: string;
  readonly request: IRequest;
  /** The most bytes that the kernel may ask for on each device; null if not known. */
  readonly most: number | null;
  /**
   * The bytes of the largest device. If `most` is null, the slider ends at this size.
   */
  readonly room: number;
  /**
   * The kernel's state as a text. When this text changes, the answer to an earlier
   * request is removed as soon as the user has had time to read it.
   */
  readonly state: string;
  /** Whether the pool can be reached. */
  readonly up: boolean;
  /** Whether the kernel waits for a slice. */
  readonly waits: boolean;
}

/**
 * The form. It keeps a typed text until the kernel's request has that size, even if the
 * kernel's state changes before.
 */
export function Ask(props: IProps): React.JSX.Element {
  const { trans, client, kernelId, what, request, most, room, state, up } = props;
  const id = React.useId();
  const { answer, busy, say, run } = useAnswer(trans, state, up);
  // Null if the user has typed nothing. The field then shows the kernel's present
  // request.
  const [typed, setTyped] = React.useState<string | null>(null);
  const [granted, setGranted] = React.useState<number | null>(null);
  const { waits } = props;
  React.useEffect(() => {
    if (!waits) {
      // The kernel no longer waits. So remove an answer about its wait, but keep a
      // refusal.
      say(now => (now && !now.refused ? null : now));
    }
  }, [waits, say]);
  React.useEffect(() => {
    if (granted !== null && granted === request.memory) {
      setTyped(null);
      setGranted(null);
    }
  }, [granted, request.memory]);

  const text = typed ?? editable(request.memory);
  const end = Math.max(most ?? room, 1);
  const typedSize = typed === null ? null : parseSize(typed);
  const size = typedSize ?? request.memory;
  const wanted =
    typedSize !== null && typedSize <= (most ?? Infinity) ? typedSize : null;
  const faulty = answer?.fault ?? false;

  const change = (value: string) => {
    setTyped(value);
    say(null);
  };
  const submit = async (event: React.FormEvent) => {
    event.preventDefault();
    const read =
      typed === null
        ? { size: request.memory, fault: '' }
        : readSize(trans, typed, most);
    if (!('size' in read)) {
      say({ refused: true, fault: true, text: read.fault });
      return;
    }
    if (read.size === request.memory) {
      setTyped(null);
      say({
        refused: false,
        text: trans.__('This %1 already asks for %2.', what, exact(request.memory))
      });
      return;
    }
    await run(async () => {
      const said = await client.change(kernelId, { memory: read.size });
      setGranted(said.request.memory);
      return said;
    });
  };

  return (
    <form
      className="jp-gpupool-Popover-ask"
      noValidate
      onSubmit={event => void submit(event)}
    >
      <label className="jp-gpupool-Popover-title" htmlFor={`${id}-field`}>
        {request.devices > 1
          ? trans.__('GPU memory on each of %1 GPUs', request.devices)
          : trans.__('GPU memory')}
      </label>
      <input
        type="range"
        aria-label={trans.__('GPU memory')}
        aria-valuetext={exact(size)}
        aria-describedby={`${id}-bound`}
        min={1}
        max={positionOf(end, end)}
        step={1}
        value={positionOf(size, end)}
        onChange={event => change(editable(sizeAt(Number(event.target.value), end)))}
      />
      <div className="jp-gpupool-Popover-row">
        <input
          id={`${id}-field`}
          className="jp-gpupool-Popover-field"
          type="text"
          inputMode="decimal"
          autoComplete="off"
          spellCheck={false}
          value={text}
          aria-invalid={faulty}
          aria-describedby={`${id}-bound ${id}-answer`}
          onChange={event => change(event.target.value)}
        />
        {/[a-z]/i.test(text) ? null : <span>GiB</span>}
        <button
          type="submit"
          className="jp-gpupool-Popover-button jp-mod-main"
          aria-disabled={busy}
        >
          {busy ? trans.__('Asking…') : trans.__('Ask for it')}
        </button>
      </div>
      <p id={`${id}-bound`} className="jp-gpupool-Popover-note">
        {most === null
          ? null
          : trans.__('You may ask for up to %1 per GPU.', bytes(most)) + ' '}
        {wanted !== null && wanted !== request.memory
          ? trans.__('New request: %1.', exact(wanted)) + ' '
          : null}
        {request.limit > request.memory
          ? trans.__(
              'Current request: %1. The slice may grow to %2 while that much memory is free.',
              exact(request.memory),
              bytes(request.limit)
            )
          : trans.__('Current request: %1.', exact(request.memory))}
      </p>
      <Answer id={`${id}-answer`} answer={answer} />
    </form>
  );
}
