// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import type { JupyterFrontEnd } from '@jupyterlab/application';
import { Signal } from '@lumino/signaling';

import { Documents } from '../documents';

interface IFakeWidget {
  readonly id: string;
  readonly sessionContext?: object;
  readonly context?: object;
}

const runs = (id: string) => ({ sessionContext: { session: { kernel: { id } } } });

function made(widgets: IFakeWidget[], running: object[], commands: string[] = []) {
  const activated: string[] = [];
  const executed: unknown[] = [];
  const source = {};
  const runningChanged = new Signal<object, void>(source);
  const layoutModified = new Signal<object, void>(source);
  const app = {
    serviceManager: { sessions: { runningChanged, running: () => running } },
    shell: {
      currentWidget: widgets[0] ?? null,
      layoutModified,
      widgets: () => widgets,
      activateById: (id: string) => activated.push(id)
    },
    commands: {
      hasCommand: (name: string) => commands.includes(name),
      execute: (name: string, args: unknown) => {
        executed.push([name, args]);
        return Promise.resolve();
      }
    }
  } as unknown as JupyterFrontEnd;
  const documents = new Documents(app);
  return { documents, activated, executed, runningChanged, layoutModified };
}

describe('Documents', () => {
  const session = {
    name: 'a.ipynb',
    path: 'x/a.ipynb',
    type: 'notebook',
    kernel: { id: 'k' }
  };
  const prompt = {
    name: 'Console 1',
    path: 'x/console-1',
    type: 'console',
    kernel: { id: 'c' }
  };
  const both = ['docmanager:open', 'console:open'];

  it('a kernel has the name of the document that uses it', () => {
    const { documents } = made(
      [],
      [session, { ...session, name: '', kernel: null }],
      both
    );
    expect(documents.name('k')).toEqual({
      ...{ name: 'a.ipynb', path: 'x/a.ipynb' },
      closed: true
    });
    expect(documents.name('other')).toBeNull();
  });

  it('a document without a name has the name of its file', () => {
    const { documents } = made([], [{ ...session, name: '' }]);
    expect(documents.name('k')?.name).toBe('a.ipynb');
  });

  it('"active" is the kernel of the document in front', () => {
    expect(made([{ id: 'w', ...runs('k') }], []).documents.active).toBe('k');
    expect(made([{ id: 'w', context: runs('k') }], []).documents.active).toBe('k');
    expect(made([{ id: 'w' }], []).documents.active).toBeNull();
    expect(made([], []).documents.active).toBeNull();
  });

  it('closing a hidden document sends a signal, a resize does not', () => {
    const widgets = [{ id: 'launcher' }, { id: 'w', ...runs('k') }];
    const { documents, layoutModified } = made(widgets, [session]);
    const changed = jest.fn();
    documents.changed.connect(changed);
    layoutModified.emit();
    expect(changed).not.toHaveBeenCalled();
    widgets.pop();
    layoutModified.emit();
    expect(changed).toHaveBeenCalledTimes(1);
    expect(documents.name('k')?.closed).toBe(true);
  });

  it('an open document comes to the front', () => {
    const { documents, activated, executed } = made(
      [{ id: 'launcher' }, { id: 'w', ...runs('k') }],
      [session],
      ['docmanager:open']
    );
    documents.open('k');
    expect([activated, executed]).toEqual([['w'], []]);
  });

  it('a closed document is opened', () => {
    const { documents, executed } = made([], [session], ['docmanager:open']);
    documents.open('k');
    documents.open('unknown');
    expect(executed).toEqual([['docmanager:open', { path: 'x/a.ipynb' }]]);
  });

  it('a console is opened by the command of its type', () => {
    const { documents, executed } = made([], [prompt], both);
    expect(documents.name('c')).toEqual({
      ...{ name: 'Console 1', path: 'x/console-1' },
      closed: true
    });
    documents.open('c');
    expect(executed).toEqual([['console:open', { path: 'x/console-1' }]]);
  });

  it('only a document that is open or can be opened has a path', () => {
    const odd = { ...session, type: 'odd' };
    const { documents, executed } = made(
      [],
      [prompt, odd, { ...odd, type: 'toString', kernel: { id: 's' } }],
      ['docmanager:open']
    );
    for (const kernel of ['c', 'k', 's']) {
      expect(documents.name(kernel)?.path).toBe('');
      documents.open(kernel);
    }
    expect(executed).toEqual([]);
    const shown = made([{ id: 'w', ...runs('k') }], [odd]);
    expect(shown.documents.name('k')?.path).toBe('x/a.ipynb');
    shown.documents.open('k');
    expect(shown.activated).toEqual(['w']);
  });

  it('a signal reports a change of the running sessions', () => {
    const { documents, runningChanged } = made([], []);
    const told = jest.fn();
    documents.changed.connect(told);
    runningChanged.emit();
    expect(told).toHaveBeenCalledTimes(1);
  });
});
