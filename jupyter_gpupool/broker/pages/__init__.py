# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The shared pages of kernels that run under the guard, which the broker writes and reads."""
