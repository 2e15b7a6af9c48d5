# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""PyTorch's CUDA build on emulated devices: ``make torch`` installs it and runs these tests."""
