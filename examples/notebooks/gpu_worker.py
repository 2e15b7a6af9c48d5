# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A program that uses the GPU; some of the notebooks beside this file start it."""

from __future__ import annotations

import sys

import numpy as np
from gpu_array import GPUArray, total


def square_sum(count: int) -> int:
    """Return the sum of n * n for n from 0 to ``count`` - 1, computed on the GPU.

    ``count`` must be less than 65,536.
    """
    return total(GPUArray(np.arange(count, dtype=np.uint32) ** 2))


if __name__ == "__main__":
    number = int(sys.argv[1])
    print(f"the sum of the first {number} squares is {square_sum(number)}")
