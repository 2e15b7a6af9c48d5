// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** "Get a GPU now": does the same as `%gpu attach`, but without a cell. */
import type { Kernel, KernelMessage } from '@jupyterlab/services';
import type { TranslationBundle } from '@jupyterlab/translation';

/**
 * Ask a kernel to get its slice. Resolves when the kernel has the slice, and rejects
 * with the reason if the kernel does not get a slice.
 */
export async function attachNow(
  trans: TranslationBundle,
  kernel: Kernel.IKernelConnection
): Promise<{ readonly note: string }> {
  const info = await kernel.info;
  if (info.language_info.name !== 'python') {
    throw new Error(
      trans.__(
        'This kernel gets its GPU at its first CUDA call. Only Python kernels can get a GPU earlier.'
      )
    );
  }
  const future = kernel.requestExecute(
    { code: '%gpu attach', store_history: false, stop_on_error: false },
    false
  );
  let note = '';
  future.onIOPub = message => {
    if (message.header.msg_type === 'stream') {
      note += (message as KernelMessage.IStreamMsg).content.text;
    }
  };
  try {
    const { content } = await future.done;
    if (content.status === 'ok') {
      return { note: note.trim() || trans.__('The kernel has its GPU.') };
    }
    const said = content as { readonly evalue?: string };
    throw new Error(
      said.evalue ||
        note.trim() ||
        trans.__('The kernel stopped waiting and has no GPU.')
    );
  } finally {
    future.dispose();
  }
}
