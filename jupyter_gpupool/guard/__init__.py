# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The guard: native code before the CUDA driver in each process of a session (``src/``)."""
