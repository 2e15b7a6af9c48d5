// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Ask for another size: a slider and a field that say the same. */
import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import type { IRequest, PoolClient } from '../api';
import { bytes } from '../words';
import { Answer } from './answer';
import { useAnswer } from './hooks';
import { editable, parseSize, positionOf, readSize, sizeAt } from './sizes';

interface IProps {
  readonly trans: TranslationBundle;
  readonly client: PoolClient;
  readonly kernelId: string;
  readonly request: IRequest;
  /** Bytes on each device that it may ask for at most; null if nobody knows. */
  readonly most: number | null;
  /** What the largest device can give: the slider's end if no limit is known. */
  readonly room: number;
}

/** The form; what is typed stays until it is granted, whatever happens to the kernel meanwhile. */
export function Ask(props: IProps): React.JSX.Element {
  const { trans, client, kernelId, request, most, room } = props;
  const id = React.useId();
  const { answer, busy, say, run } = useAnswer();
  // Null: nothing was typed, and the field follows the kernel's request.
  const [typed, setTyped] = React.useState<string | null>(null);
  const [granted, setGranted] = React.useState<number | null>(null);
  React.useEffect(() => {
    if (granted !== null && granted === request.memory) {
      setTyped(null);
      setGranted(null);
    }
  }, [granted, request.memory]);

  const text = typed ?? editable(request.memory);
  const end = Math.max(most ?? room, 1);
  const size = parseSize(text) ?? request.memory;
  const faulty = answer?.refused ?? false;

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
      say({ refused: true, text: read.fault });
      return;
    }
    if (read.size === request.memory) {
      setTyped(null);
      say({
        refused: false,
        text: trans.__('This notebook asks for %1 already.', bytes(request.memory))
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
        aria-valuetext={bytes(size)}
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
        {request.limit > request.memory
          ? trans.__(
              'Now %1 are guaranteed; it may grow to %2 while that much is free.',
              bytes(request.memory),
              bytes(request.limit)
            )
          : trans.__('Now: %1.', bytes(request.memory))}
      </p>
      <Answer id={`${id}-answer`} answer={answer} />
    </form>
  );
}
