# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""PyTorch's CUDA build on emulated devices: its operators compute on the host.

``hook`` runs when Python starts and waits for ``import torch``. ``stand_ins`` replaces NVIDIA's
libraries if they are not installed. ``operators`` replaces the kernel of each operator that has a
CUDA kernel. The new kernel is a launch (``launches``) whose work is PyTorch's own CPU operator, on
the bytes of the device (``arguments``). PyTorch still handles memory, copies, streams, events and
graphs itself.

No part of this package acts on a machine with a GPU: the hook does nothing without
``EMUCUDA_MACHINE``, and ``launches`` refuses a driver that is not the emulated one.
"""
