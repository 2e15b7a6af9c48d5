// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** One page of JupyterLab for all tests of a worker, and the notebooks in it. */
import {
  test as base,
  expect,
  type Browser,
  type Locator,
  type Page
} from '@playwright/test';
// Do not import from Galata's index: it also loads Galata's benchmark report, and the
// libraries that draw that report.
import { galata } from '@jupyterlab/galata/lib/galata';
import type { IJupyterLabPageFixture } from '@jupyterlab/galata/lib/jupyterlabpage';
import type { NotebookPanel } from '@jupyterlab/notebook';
import type { ReadonlyJSONObject } from '@lumino/coreutils';
import { chmodSync, writeFileSync } from 'fs';
import * as path from 'path';

import { ask, KERNEL, stage } from './pool';
import { type IStage, startStage } from './setup';

/** A server, and the folder that it serves. */
export interface ISite {
  readonly url: string;
  readonly folder: string;
}

/** A page of JupyterLab, with the helpers that the tests need. */
export class Lab {
  /** Error messages on the console, and uncaught errors. */
  readonly errors: string[] = [];
  /** Requests and websockets of the page to the server extension. */
  readonly traffic: string[] = [];
  /**
   * The messages that the page received over its websockets to the server extension.
   */
  readonly told: string[] = [];

  private constructor(
    readonly page: IJupyterLabPageFixture,
    private readonly _bare: Page,
    private readonly _site: ISite
  ) {
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
        socket.on('framereceived', ({ payload }) => this.told.push(payload.toString()));
      }
    });
  }

  /**
   * Open a new page that shows JupyterLab or, with `app`, another page of the server.
   */
  static async open(
    browser: Browser,
    options: {
      site?: ISite;
      url?: string;
      app?: string;
      settings?: object;
      scale?: number;
    } = {}
  ): Promise<Lab> {
    const site = options.site ?? stage();
    const url = options.url ?? site.url;
    const context = await browser.newContext({
      baseURL: url,
      viewport: { width: 1280, height: 800 },
      reducedMotion: 'reduce',
      ...(options.scale && { deviceScaleFactor: options.scale })
    });
    const bare = await context.newPage();
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
      () => Promise.resolve()
    );
    const lab = new Lab(page, bare, site);
    await (options.app === undefined ? lab.fresh() : lab.go(options.app));
    return lab;
  }

  /** Load JupyterLab again, without open documents. */
  async fresh(): Promise<void> {
    await this.go('lab?reset');
    await this._bare.locator('#jupyterlab-splash').waitFor({ state: 'detached' });
    await this._bare.locator('.jp-Launcher').first().waitFor();
  }

  /**
   * Load a page of the server, and wait until it is ready. On a busy machine, Galata's
   * own method gives up too early.
   */
  async go(where: string): Promise<void> {
    await this._bare.goto(where);
    await this._bare.waitForFunction(async () => {
      // The object exists once the page's script has run.
      const app = window.jupyterapp as typeof window.jupyterapp | undefined;
      await app?.restored;
      return app !== undefined;
    });
  }

  async close(): Promise<void> {
    await this._bare.context().close();
  }

  /** Run a command of JupyterLab; with `wait`, wait for its end. */
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

  /** Change the theme of the page, and wait until the page shows the new theme. */
  async theme(name: string): Promise<void> {
    const body = this.page.locator(`body[data-jp-theme-name="${name}"]`);
    if ((await body.count()) > 0) {
      return;
    }
    await this.execute('apputils:change-theme', { theme: name });
    await body.waitFor({ state: 'attached' });
    // While the theme changes, JupyterLab covers the page with its splash screen. The
    // splash screen disappears slowly, so wait for its end.
    await this.page.locator('#jupyterlab-splash').waitFor({ state: 'detached' });
  }

  /** Write a notebook with one empty cell; return its path on the server. */
  write(name: string, kernel: string): string {
    const file = `${name}.ipynb`;
    const cell = {
      cell_type: 'code',
      id: 'one',
      metadata: {},
      source: '',
      outputs: [],
      execution_count: null
    };
    const where = path.join(this._site.folder, file);
    writeFileSync(
      where,
      JSON.stringify({
        cells: [cell],
        metadata: { kernelspec: { name: kernel, display_name: kernel } },
        nbformat: 4,
        nbformat_minor: 5
      })
    );
    // The server may run as another user.
    chmodSync(where, 0o666);
    return file;
  }

  /** Open a new notebook with a running kernel. */
  async notebook(name: string, kernel = KERNEL): Promise<Notebook> {
    const file = this.write(name, kernel);
    await this.execute('docmanager:open', { path: file, factory: 'Notebook' });
    await this.page.waitForFunction(
      wanted =>
        (window.jupyterapp.shell.currentWidget as NotebookPanel | null)?.context
          .path === wanted,
      file
    );
    return this.current(file);
  }

  /**
   * Return the notebook in front when its kernel has answered. If a test ran a cell
   * before this answer, the cell would not run.
   */
  async current(file: string): Promise<Notebook> {
    const [id, kernelId] = await this.page.evaluate(async () => {
      const panel = window.jupyterapp.shell.currentWidget as NotebookPanel;
      const context = panel.sessionContext;
      await context.ready;
      const running = context.session?.kernel;
      if (!running) {
        throw new Error('No kernel was started: see the log of the server');
      }
      await running.info;
      return [panel.id, running.id] as const;
    });
    return new Notebook(this, file, id, kernelId);
  }

  /**
   * End all kernels and close all documents, so that each test begins like the first.
   */
  async clear(): Promise<void> {
    await this.page.keyboard.press('Escape');
    await this.execute('notification:dismiss-all').catch(() => undefined);
    await this.theme('JupyterLab Light');
    const request = this.page.request;
    const sessions = (await (
      await request.get(`${this._site.url}/api/sessions`)
    ).json()) as { id: string }[];
    await this.page.evaluate(() => {
      for (const widget of [...window.jupyterapp.shell.widgets('main')]) {
        widget.dispose();
      }
    });
    const answers = await Promise.all(
      sessions.map(({ id }) => request.delete(`${this._site.url}/api/sessions/${id}`))
    );
    // The code 404 is no error: the test itself has shut the session down, but the list
    // still contained it.
    const codes = answers.map(answer => answer.status());
    expect(codes.filter(code => ![204, 404].includes(code))).toEqual([]);
  }

  get statusItem(): Locator {
    return this.page.locator('#jp-main-statusbar .jp-gpupool-chip');
  }

  get popover(): Locator {
    return this.page.locator('.jp-gpupool-Popover');
  }

  get panel(): Locator {
    return this.page.locator('.jp-gpupool-panel');
  }
}

/** One notebook. */
export class Notebook {
  constructor(
    readonly lab: Lab,
    readonly file: string,
    id: string,
    readonly kernelId: string
  ) {
    this.panel = lab.page.locator(`[id="${id}"]`);
    this.chip = this.panel.locator('.jp-NotebookPanel-toolbar .jp-gpupool-chip');
    this.prompt = this.panel.locator('.jp-InputPrompt').first();
    this.output = this.panel.locator('.jp-OutputArea').first();
  }

  readonly panel: Locator;
  readonly chip: Locator;
  readonly prompt: Locator;
  readonly output: Locator;

  async activate(): Promise<void> {
    await this.lab.execute('docmanager:open', { path: this.file });
  }

  /** Run code in the first cell; with `end`, wait for the end of the cell. */
  async run(code: string, end = true): Promise<void> {
    await this.activate();
    await this.lab.page.evaluate(source => {
      const panel = window.jupyterapp.shell.currentWidget as NotebookPanel;
      panel.content.activeCell!.model.sharedModel.setSource(source);
    }, code);
    await this.lab.execute('notebook:run-cell', {}, end);
    if (end) {
      await expect(this.prompt).toHaveText(/\[\d+\]:/);
    }
  }

  /**
   * Start to record the chip's texts. Resolves to a function that returns all texts
   * recorded so far.
   */
  async listen(): Promise<() => Promise<string[]>> {
    const name = `said-${this.kernelId}`;
    await this.panel.evaluate((node, key) => {
      const said: string[] = [];
      (window as unknown as Record<string, string[]>)[key] = said;
      const note = (): void => {
        const text = node.querySelector('.jp-gpupool-chip')?.textContent ?? '';
        if (text !== said[said.length - 1]) {
          said.push(text);
        }
      };
      note();
      new MutationObserver(note).observe(node, {
        subtree: true,
        childList: true,
        characterData: true
      });
    }, name);
    return () =>
      this.lab.page.evaluate(
        key => (window as unknown as Record<string, string[]>)[key]!,
        name
      );
  }
}

/**
 * `pool` is the server and the broker of a worker. `lab` is one page for all tests of
 * the worker. `tidy` cleans up after each test.
 *
 * `tidy` is a fixture and not a hook, because a hook in this module would work only for
 * the first test file that loads the module.
 */
export const test = base.extend<{ tidy: undefined }, { pool: IStage; lab: Lab }>({
  // Each worker has its own server and broker. Otherwise a test would see what the
  // tests of other workers do to the pool.
  pool: [
    async ({}, use) => {
      const end = await startStage();
      await use(stage());
      await end();
    },
    { scope: 'worker', auto: true, timeout: 120_000 }
  ],
  lab: [
    async ({ browser, pool }, use) => {
      const lab = await Lab.open(browser, { site: pool });
      await use(lab);
      await lab.close();
    },
    { scope: 'worker' }
  ],
  tidy: [
    async ({ lab }, use, info) => {
      await use(undefined);
      if (info.status !== info.expectedStatus) {
        await info.attach('logs', { body: await ask<string>('log') });
        await info.attach('console', { body: lab.errors.join('\n') });
        const picture = await lab.page.screenshot();
        await info.attach('page', { body: picture, contentType: 'image/png' });
      }
      await lab.clear();
    },
    { auto: true }
  ]
});

export { expect };
