# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""NVIDIA's GPUs: NVML, and the driver's checkpoint calls, each in child processes."""
