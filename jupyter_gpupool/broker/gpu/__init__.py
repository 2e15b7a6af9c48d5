# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Work on GPUs: the pool's actions, samples, failed devices, maintenance."""
