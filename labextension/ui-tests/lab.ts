// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** One page of JupyterLab for all tests of a file, and the notebooks in it. */
import {
  test as base,
  expect,
  type Browser,
  type Locator,
  type Page
} from '@playwright/test';
// Not from the package's index, which loads its report of benchmarks and what that draws with.
import { galata } from '@jupyterlab/galata/lib/galata';
import type { IJupyterLabPageFixture } from '@jupyterlab/galata/lib/jupyterlabpage';
import type { NotebookPanel } from '@jupyterlab/notebook';
import type { ReadonlyJSONObject } from '@lumino/coreutils';
import { writeFileSync } from 'fs';
import * as path from 'path';

import { ask, KERNEL, stage } from './pool';

/** A page with everything that the tests ask of it. */
export class Lab {
  /** What was said on the console as an error, and not caught. */
  readonly errors: string[] = [];
  /** Requests and websockets of the page to the server extension. */
  readonly traffic: string[] = [];

  private constructor(readonly page: IJupyterLabPageFixture) {
    page.on('console', message => {
      if (message.type() === 'error') {
        this.errors.push(message.text());
      }
    });
    page.on('pageerror', error => this.errors.push(error.message));
    page.on('request', request => {
      if (request.url().includes('/gpupool/')) {
        this.traffic.push(`${request.method()} ${request.url()}`);
      }
    });
    page.on('websocket', socket => {
      if (socket.url().includes('/gpupool/')) {
        this.traffic.push(`WS ${socket.url()}`);
      }
    });
  }

  /** A new page that shows `app` (`/lab`), ready. */
  static async open(
    browser: Browser,
    options: { url?: string; theme?: string; settings?: object; scale?: number } = {}
  ): Promise<Lab> {
    const url = options.url ?? stage().url;
    const context = await browser.newContext({
      baseURL: url,
      viewport: { width: 1280, height: 800 },
      ...(options.scale && { deviceScaleFactor: options.scale })
    });
    const bare = await context.newPage();
    const ready = async (page: Page): Promise<void> => {
      await page.locator('#jupyterlab-splash').waitFor({ state: 'detached' });
      await page.locator('.jp-Launcher').first().waitFor();
    };
    const page = await galata.initTestPage(
      '/lab',
      false,
      url,
      true,
      { ...galata.DEFAULT_SETTINGS, ...options.settings },
      true,
      true,
      bare,
      null,
      null,
      '',
      ready
    );
    const lab = new Lab(page);
    await page.goto('tree/?reset');
    return lab;
  }

  /** Run a command of JupyterLab; wait for its end unless told otherwise. */
  async execute(id: string, args: ReadonlyJSONObject = {}, wait = true): Promise<void> {
    await this.page.evaluate(
      async ([command, fields, waits]) => {
        const done = window.jupyterapp.commands.execute(command, fields);
        if (waits) {
          await done;
        } else {
          done.catch(() => undefined);
        }
      },
      [id, args, wait] as const
    );
  }

  /** Open a new notebook with a running kernel. */
  async notebook(name: string, kernel = KERNEL): Promise<Notebook> {
    const file = `${name}.ipynb`;
    writeFileSync(
      path.join(stage().folder, file),
      JSON.stringify({
        cells: [
          {
            cell_type: 'code',
            id: 'one',
            metadata: {},
            source: '',
            outputs: [],
            execution_count: null
          }
        ],
        metadata: { kernelspec: { name: kernel, display_name: kernel } },
        nbformat: 4,
        nbformat_minor: 5
      })
    );
    await this.execute('docmanager:open', { path: file, factory: 'Notebook' });
    const kernelId = await this.page.evaluate(async () => {
      const panel = window.jupyterapp.shell.currentWidget as NotebookPanel;
      const context = panel.sessionContext;
      await context.ready;
      const running = context.session!.kernel!;
      await running.info;
      return running.id;
    });
    return new Notebook(this, file, kernelId);
  }

  /** End all kernels and close what is open, so that the next test begins as the first. */
  async clear(): Promise<void> {
    await this.page.keyboard.press('Escape');
    await this.execute('notification:dismiss-all').catch(() => undefined);
    const request = this.page.request;
    const kernels = (await (
      await request.get(`${stage().url}/api/sessions`)
    ).json()) as { id: string }[];
    await this.page.evaluate(() => {
      for (const widget of [...window.jupyterapp.shell.widgets('main')]) {
        widget.dispose();
      }
    });
    await Promise.all(
      kernels.map(found => request.delete(`${stage().url}/api/sessions/${found.id}`))
    );
  }

  readonly statusItem: () => Locator = () =>
    this.page.locator('#jp-main-statusbar .jp-gpupool-status');

  readonly panel: () => Locator = () => this.page.locator('.jp-gpupool-panel');
}

/** One notebook. */
export class Notebook {
  constructor(
    readonly lab: Lab,
    readonly file: string,
    readonly kernelId: string
  ) {}

  /** The chip in the toolbar of the notebook in front. */
  get chip(): Locator {
    return this.lab.page.locator(
      '.jp-NotebookPanel:not(.lm-mod-hidden) .jp-NotebookPanel-toolbar .jp-gpupool-chip'
    );
  }

  async activate(): Promise<void> {
    await this.lab.execute('docmanager:open', { path: this.file });
  }

  /** Run code in the first cell; returns when it has begun, or with `end` when it has ended. */
  async run(code: string, end = true): Promise<void> {
    await this.activate();
    await this.lab.page.evaluate(source => {
      const panel = window.jupyterapp.shell.currentWidget as NotebookPanel;
      panel.content.activeCell!.model.sharedModel.setSource(source);
    }, code);
    await this.lab.execute('notebook:run-cell', {}, end);
    if (end) {
      await expect(this.prompt).not.toHaveText('[*]:');
    }
  }

  get prompt(): Locator {
    return this.lab.page
      .locator('.jp-NotebookPanel:not(.lm-mod-hidden) .jp-InputPrompt')
      .first();
  }
}

/** `lab`: one page for all tests of a worker; `pool`: a fresh broker for the test's file. */
export const test = base.extend<object, { lab: Lab }>({
  lab: [
    async ({ browser }, use) => {
      const lab = await Lab.open(browser);
      await use(lab);
      await lab.page.context().close();
    },
    { scope: 'worker' }
  ]
});

test.afterEach(async ({ lab }, info) => {
  if (info.status !== info.expectedStatus) {
    await info.attach('logs', { body: await ask<string>('log') });
  }
  await lab.clear();
});

export { expect };
