# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Gives GPU slices to Jupyter kernels while they need them, and takes them back without loss.

General layout (``tests/test_architecture.py`` has the table of which part may import which):

- ``errors``, ``units``, ``endpoint``: standard library only.
- ``protocol``, ``client``: the wire protocol; the only way to talk to the broker.
- ``pool/``: the decisions, without side effects: takes events, returns actions.
- ``devices/``: NVML and the CUDA checkpoint calls, in child processes.
- ``broker/``: performs the pool's actions (the side effects).
- ``kernel/``: inside the kernel process: standard library and IPython only.
- ``server/``: the Jupyter Server extension; ``labextension/`` beside this package is its interface.
- ``programs/``: commands, services and scripts in the pool; :func:`slice` is its Python interface.
- ``provisioner``, ``cli``, ``config``: the interfaces for Jupyter, people and admins.
- ``emulation``: the only module that imports ``emucuda``, an emulated NVIDIA driver beside this
  package.

This file imports no other module when it is loaded, because kernels that do not have our
dependencies load it.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .programs.inscript import HeldSlice

__version__ = "0.1.0"


def slice(  # noqa: A001 (the word of the pool)
    memory: int | str = "",
    *,
    limit: int | str = "",
    devices: int = 0,
    compute: int = 0,
    priority: str = "",
    group: str = "",
    max_wait: float | str | None = None,
    name: str = "",
) -> HeldSlice:
    """Return a context for ``with``: inside the block, this program holds a GPU slice.

    At the start of the block, the program waits for the slice. After the block, the slice is idle:
    it goes back to the pool when another session may take it, or after ``c.GPUPool.idle_timeout``.
    A program that ``jupyter gpupool run`` has started, a Pooled GPU kernel, and the child processes
    of either already have a session. In them, the block holds the slice of that session. Any other
    program gets a new session, if it has not called CUDA before.

    Parameters
    ----------
    memory, limit:
        Guaranteed device memory, and the limit to which it may grow: bytes, or text like
        ``"8GiB"``.
    devices, compute, priority:
        Number of GPUs, per cent of their time, priority class. An empty value or 0 means the value
        of the session or the pool.
    group:
        Which of your groups provides the share, if the program gets a new session. The group of an
        existing session cannot change.
    max_wait:
        Most seconds (or text like ``"10m"``) to wait for the slice; None: the pool's limit.
    name:
        The name that ``jupyter gpupool status`` shows. Default: the name of the script.

    Raises
    ------
    jupyter_gpupool.errors.RefusedError
        At the start of the block: the pool refuses the slice, or the wait times out (``code``
        "wait-timeout").
    jupyter_gpupool.errors.BrokerUnavailable
        At the start of the block: no broker is running, and the program cannot start one.
    """
    from .programs.inscript import HeldSlice

    return HeldSlice(
        memory,
        limit=limit,
        devices=devices,
        compute=compute,
        priority=priority,
        group=group,
        max_wait=max_wait,
        name=name,
    )


def _jupyter_labextension_paths() -> list[dict[str, str]]:
    """Return where the built JupyterLab part is, for ``jupyter labextension develop``."""
    return [{"src": "labextension", "dest": "@jupyter-gpupool/labextension"}]
