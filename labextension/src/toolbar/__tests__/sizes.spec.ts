// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

import SIZES from '../../__tests__/sizes.json';
import {
  editable,
  exact,
  MOST,
  parseSize,
  positionOf,
  readSize,
  sizeAt,
  stepFor
} from '../sizes';
import { GIB, trans } from './fakes';

const MIB = 1024 ** 2;

describe('sizes', () => {
  it.each([
    ...(SIZES.read as [string, number][]),
    ['12', 12 * GIB],
    [' 512 MiB ', 512 * MIB],
    ['1.5', 1.5 * GIB],
    ['1,5', 1.5 * GIB],
    ['0.0001', 107374],
    ['999999999999', MOST]
  ])('the text %p is a size', (text, size) => {
    expect(parseSize(text)).toBe(size);
  });

  it.each([
    ...SIZES.refused,
    'much',
    '0.0000001',
    '-1',
    '0',
    '512 B',
    '1,024',
    '1.2.3'
  ])('the text %p is no size', text => {
    expect(parseSize(text)).toBeNull();
  });

  it('a written size is rounded down, and can be read back', () => {
    for (const size of [8 * GIB, 1.5 * GIB, 512 * MIB, 23.67891 * GIB, 100.5 * MIB]) {
      const read = parseSize(editable(size)) ?? 0;
      expect(read).toBeLessThanOrEqual(size);
      expect(size - read).toBeLessThan(size / 1000);
    }
    expect(editable(8 * GIB)).toBe('8');
    expect(editable(512 * MIB)).toBe('512 MiB');
  });

  it('a size has the same form in the field and in sentences', () => {
    expect([editable(8e9), exact(8e9)]).toEqual(['7.45', '7.45 GiB']);
    expect([editable(8 * GIB), exact(8 * GIB)]).toEqual(['8', '8 GiB']);
    expect([editable(107374), exact(107374)]).toEqual(['0.102 MiB', '0.102 MiB']);
  });

  it('a size beyond all bounds is reported', () => {
    const far = '999999999999';
    expect(readSize(trans, far, 24 * GIB).fault).toBe(
      `“${far}” is too much. You may ask for at most 24 GiB.`
    );
    expect(readSize(trans, far, null).fault).toBe(`“${far}” is more than any GPU has.`);
  });

  it('the slider’s step is half a GiB, less on a small device', () => {
    expect(stepFor(24 * GIB)).toBe(GIB / 2);
    expect(stepFor(2 * GIB)).toBe(GIB / 4);
    expect(stepFor(64 * MIB)).toBe(16 * MIB);
  });

  it('the slider reaches the bound, but never zero', () => {
    for (const most of [24 * GIB, 23.3 * GIB, 100 * MIB]) {
      const last = positionOf(most, most);
      expect(sizeAt(last, most)).toBe(most);
      expect(sizeAt(last - 1, most)).toBeLessThan(most);
      expect(positionOf(1, most)).toBe(1);
      expect(sizeAt(1, most)).toBeGreaterThan(0);
    }
  });

  it('a wrong size is explained', () => {
    expect(readSize(trans, 'a lot', null).fault).toContain('“a lot” is not a size');
    expect(readSize(trans, ' ', null).fault).toContain('Type a size');
    expect(readSize(trans, '25', 24 * GIB).fault).toBe(
      '25 GiB is too much. You may ask for at most 24 GiB.'
    );
    expect(readSize(trans, '25', null)).toEqual({ size: 25 * GIB, fault: '' });
  });

  it('a user who types the shown bound gets the exact bound', () => {
    const most = 23.68 * GIB;
    expect(readSize(trans, '23.7', most)).toEqual({ size: most, fault: '' });
  });
});
