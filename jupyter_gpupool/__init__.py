# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""GPU slices for Jupyter kernels: attached while needed, given back without loss.

General layout (left may import right, never back; ``tests/test_architecture.py`` holds it):

- ``errors``, ``units``, ``endpoint``: standard library only.
- ``protocol``, ``client``: the wire; the only way to the broker.
- ``pool/``: pure decisions, events in, actions out.
- ``devices/``: NVML and the CUDA checkpoint calls, in child processes.
- ``broker/``: effects: performs the pool's actions.
- ``kernel/``: inside the kernel process: standard library and IPython only.
- ``server/``: the Jupyter Server extension; ``labextension/`` beside this package is its interface.
- ``provisioner``, ``cli``, ``config``: the interfaces for Jupyter, people and admins.
- ``emulation``: the one door to ``emucuda``, an emulated NVIDIA driver, beside this package.

Importing this package imports nothing else: kernels without our dependencies also load it.
"""

from __future__ import annotations

__version__ = "0.1.0"


def _jupyter_labextension_paths() -> list[dict[str, str]]:
    """Return the place of the built JupyterLab part; called by ``jupyter labextension develop``."""
    return [{"src": "labextension", "dest": "@jupyter-gpupool/labextension"}]
