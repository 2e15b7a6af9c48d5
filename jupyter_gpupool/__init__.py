# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""GPU slices for Jupyter kernels: attached while needed, given back without loss.

General layout (``tests/test_architecture.py`` has the table of which part may import which):

- ``errors``, ``units``, ``endpoint``: standard library only.
- ``protocol``, ``client``: the wire protocol; the only way to talk to the broker.
- ``pool/``: pure decisions, events in, actions out.
- ``devices/``: NVML and the CUDA checkpoint calls, in child processes.
- ``broker/``: performs the pool's actions (the side effects).
- ``kernel/``: inside the kernel process: standard library and IPython only.
- ``server/``: the Jupyter Server extension; ``labextension/`` beside this package is its interface.
- ``programs/``: commands, services and scripts in the pool; :func:`slice` is its Python interface.
- ``provisioner``, ``cli``, ``config``: the interfaces for Jupyter, people and admins.
- ``emulation``: the only module that imports ``emucuda``, an emulated NVIDIA driver beside this
  package.

Importing this package imports no other module, because kernels without our dependencies import it.
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
    """Return a context in which this program holds a GPU slice, for ``with``.

    Entering the block waits for the slice. After the block the slice is idle: it goes back to the
    pool when another session may take it, or after ``c.GPUPool.idle_timeout``. In a program that
    ``jupyter gpupool run`` has started, in a Pooled GPU kernel and in their children the block
    holds the slice of the session that exists already. Any other program gets a new session, if it
    has not called CUDA before.

    Parameters
    ----------
    memory, limit:
        Guaranteed device memory, and the limit to which it may grow: bytes, or text like
        ``"8GiB"``.
    devices, compute, priority:
        Number of GPUs, per cent of their time, priority class. An empty value or 0 stands for the
        value of the session or the pool.
    group:
        Which of your groups provides the share, if the program gets a new session. The group of an
        existing session cannot change.
    max_wait:
        Most seconds (or text like ``"10m"``) to wait for the slice; None: the pool's limit.
    name:
        What people read in ``jupyter gpupool status``. Default: the name of the script.

    Raises
    ------
    jupyter_gpupool.errors.RefusedError
        On entering: the pool's refusal, or ``code`` "wait-timeout".
    jupyter_gpupool.errors.BrokerUnavailable
        On entering: there is no broker, and none can be started.
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
