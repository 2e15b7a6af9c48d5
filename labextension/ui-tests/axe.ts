// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Accessibility faults of our own elements, as axe-core finds them. */
import AxeBuilder from '@axe-core/playwright';
import type { Page } from '@playwright/test';

/** All that axe-core finds below `selector`, of any impact; fails if there is no such element. */
export async function faults(page: Page, selector: string): Promise<string[]> {
  const { violations } = await new AxeBuilder({ page }).include(selector).analyze();
  return violations.map(
    found =>
      `${found.id}: ${found.help}: ${found.nodes.map(node => node.html).join(' | ')}`
  );
}
