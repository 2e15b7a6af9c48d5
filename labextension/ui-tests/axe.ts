// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

/** Finds accessibility faults in the extension's own elements, with axe-core. */
import AxeBuilder from '@axe-core/playwright';
import type { Page } from '@playwright/test';

/**
 * Return all faults, of any impact, that axe-core finds in the elements that match
 * `selector`. Fails if no element matches.
 */
export async function faults(page: Page, selector: string): Promise<string[]> {
  const { violations } = await new AxeBuilder({ page }).include(selector).analyze();
  return violations.map(
    found =>
      `${found.id}: ${found.help}: ${found.nodes.map(node => node.html).join(' | ')}`
  );
}
