# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A program that uses the GPU; started by some of the notebooks beside this file."""

from __future__ import annotations

import sys

import numpy as np
from gpu_array import GPUArray, total


def square_sum(count: int) -> int:
    """Return 0 + 1 + 4 + ... + (count - 1) squared, summed up on the GPU; ``count`` < 65,536."""
    return total(GPUArray(np.arange(count, dtype=np.uint32) ** 2))


if __name__ == "__main__":
    number = int(sys.argv[1])
    print(f"the sum of the first {number} squares is {square_sum(number)}")
