# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Gives GPU slices to Jupyter kernels while they need them, and takes them back without loss.

General layout (``tests/test_architecture.py`` has the table of which part may import which):

- ``errors``, ``units``, ``text``, ``states``, ``procfs``, ``cgroups``, ``deadlines``, ``threads``:
  standard library only; every part may import them.
- ``endpoint``, ``local_machine``: where the broker's socket is, and which machine this is; standard
  library and the modules above only.
- ``protocol``, ``client``: the wire protocol, through which every program talks to the broker.
- ``pool/``: decides; it takes events, returns actions, and has no side effects.
- ``devices/``: NVML and the CUDA checkpoint calls, in child processes.
- ``broker/``: performs the pool's actions (the side effects).
- ``guard/``: native code in each process of a session: CUDA calls wait in it for the slice.
- ``kernel/``: inside the kernel process: standard library and IPython only.
- ``cluster/``: several machines with one set of quotas.
- ``containers/``: the files that kernels in containers find.
- ``server/``: the Jupyter Server extension; ``labextension/`` beside this package is its interface.
- ``programs/``: commands, services and scripts in the pool; :func:`slice` is its Python interface.
- ``provisioner``, ``cli``, ``config``: the interfaces for Jupyter, people and admins.
- ``launcher``, ``ipykernel_launcher``, ``remote_provisioner``, ``kernelspecs``: other ways to start
  a kernel, and the kernelspecs for them.
- ``starting``, ``startrecord``, ``startfailures``, ``daemon``: start a broker, or start it again.
- ``demo``, ``timeline``, ``durations``: a demonstration, its picture, and histograms of waits.
- ``emulation``: the only module that imports ``emucuda``, an emulated NVIDIA driver beside this
  package.

Kernels without our dependencies also import this file, so its import loads no other module.
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

    At the start of the block, the program waits for the slice. After the block, the slice is idle.
    It goes back to the pool when another session may take it, or after ``c.GPUPool.idle_timeout``.
    A Pooled GPU kernel already has a session, and so has a program that ``jupyter gpupool run`` has
    started. Their child processes belong to the same session. In all these processes, the block
    holds the slice of the existing session. Any other program gets a new session, but only if it
    has not called CUDA before.

    Parameters
    ----------
    memory, limit:
        The guaranteed device memory, and the limit to which the memory may grow. Both are in bytes
        or text like ``"8GiB"``.
    devices, compute, priority:
        The number of GPUs, the per cent of their computing time, and the priority class. With an
        empty value or 0, the value of the session or of the pool applies.
    group:
        Which of your groups provides the share, if the program gets a new session. The group of an
        existing session cannot change.
    max_wait:
        The longest wait for the slice, in seconds or as text like ``"10m"``. None means the pool's
        limit.
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
