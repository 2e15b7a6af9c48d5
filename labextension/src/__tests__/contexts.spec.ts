// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import { contextFor, contextOf } from '../contexts';

const context = (id: string) => ({ session: { kernel: { id } } });
const notebook = { sessionContext: context('a') } as never;
const console = { context: { sessionContext: context('b') } } as never;
const editor = {} as never;

test('a widget has its own context or its document’s context', () => {
  expect(contextOf(notebook)?.session?.kernel?.id).toBe('a');
  expect(contextOf(console)?.session?.kernel?.id).toBe('b');
  expect(contextOf(editor)).toBeNull();
  expect(contextOf(null)).toBeNull();
});

test('a kernel is found in the widget that shows it', () => {
  const all = [editor, notebook, console];
  expect(contextFor(all, 'b')?.session?.kernel?.id).toBe('b');
  expect(contextFor(all, 'c')).toBeNull();
});
