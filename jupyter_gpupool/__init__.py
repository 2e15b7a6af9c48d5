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
- ``programs/``: commands, services and scripts in the pool; :func:`slice` is its Python face.
- ``provisioner``, ``cli``, ``config``: the interfaces for Jupyter, people and admins.
- ``emulation``: the one door to ``emucuda``, an emulated NVIDIA driver, beside this package.

Importing this package imports nothing else: kernels without our dependencies also load it.
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

    Entering waits for the slice; after the block it stays as long as nobody else wants it. In a
    program that ``jupyter gpupool run`` has started, in a Pooled GPU kernel and in their children
    the block holds the slice of that session. Any other program gets a session of its own, if it
    has not called CUDA before.

    Parameters
    ----------
    memory, limit:
        Guaranteed device memory, and how far it may grow: bytes, or text like ``"8GiB"``.
    devices, compute, priority:
        GPUs, per cent of their time, priority class. Empty or 0: as the session or the pool has it.
    group:
        The group of yours whose share a session of its own uses; another session's cannot change.
    max_wait:
        Seconds, or text like ``"10m"``, after which entering gives up; None: as the pool does.
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
    """Return the place of the built JupyterLab part; called by ``jupyter labextension develop``."""
    return [{"src": "labextension", "dest": "@jupyter-gpupool/labextension"}]
