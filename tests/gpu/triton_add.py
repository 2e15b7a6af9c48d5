# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A GPU kernel for Triton. Triton reads the source of the kernel from this file."""

import triton
import triton.language as tl


@triton.jit
def add(pointer, number, step, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < number
    tl.store(pointer + place, tl.load(pointer + place, mask=inside) + step, mask=inside)
