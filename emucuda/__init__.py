# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""An NVIDIA driver made of host memory, for machines without one.

``src/`` is the driver in C (see its headers), ``build`` compiles it into ``lib/``, ``profiles``
describes machines, injects faults and says which environment selects it, ``kernels`` holds PTX
that both this driver and a real one run.
"""
