# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The guard: native code (in ``src/``) between a session's processes and the CUDA driver."""
