# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""PyTorch's CUDA build on emulated devices: its operators compute on the host.

``hook`` runs when Python starts, and acts at ``import torch``. ``stand_ins`` replaces NVIDIA's
libraries if they are not installed. ``operators`` gives a new kernel to each operator that has a
CUDA kernel. The new kernel launches a function on the device's stream (``launches``). The function
runs PyTorch's own CPU operator on the bytes of the device (``arguments``). PyTorch itself still
handles memory, copies, streams, events and graphs.

Without ``EMUCUDA_MACHINE``, no operator changes. If the environment has stand-ins, the hook then
only loads them, and the emulated runtime if NVIDIA's runtime is not installed. With a real driver,
no operator changes either, because ``launches`` refuses every driver but the emulated one.
"""
