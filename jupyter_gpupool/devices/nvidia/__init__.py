# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""NVIDIA's GPUs: child processes call NVML and the driver's checkpoint functions.

``service`` is the entry module: it imports the other modules, and none of them imports it. No
module here imports ``pynvml`` or ``cuda`` at its top: only child processes load a vendor library.
If the library hangs or crashes, only a replaceable child is lost.

A suspend goes through ``service``, ``workers``, ``operations`` and ``calls``, and in a worker child
through ``child_programs``, ``members`` and ``checkpoint``.

======================  ========================================================================
in the broker
``service``             ``DeviceService``, the door: all GPU calls of the broker
``inventory``           which GPUs the machine has, and what each can do
``workers``             the worker children, one for each device, and their operations
``operations``          suspend and resume of a whole session: all of its processes or none
``calls``               driver calls on the processes of one session, through a worker
``landing_move``        moves one process to the devices of its session's slice
``sampler``             samples of NVML, through the monitor child
``selftest``            tests whether a device can suspend
``guard_frame``         the same test under the guard
``examiner``            derives a device's tier from both tests
``driver``              whether the driver is here, and what each version can do at most
``visibility``          the GPUs that the broker, its children and new programs see
``interpreter``         the Python interpreter of the child processes
in child processes
``child_programs``      the programs of the monitor, the workers and the tests
``nvml``                NVML through NVIDIA's own client
``members``             the processes of a session, and whether each may have a CUDA context
``checkpoint``          suspend and resume of one process through cuda.core
======================  ========================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence

from . import interpreter

if TYPE_CHECKING:
    from ..backend import DeviceOptions, Devices
    from ..model import Finding

__all__ = ["NAME", "VARIABLES", "driver_present", "inspect", "interpreter", "open_devices"]

NAME = "NVIDIA"

#: See :attr:`.backend.Vendor.VARIABLES`.
VARIABLES: Sequence[str] = ("CUDA_*", "NVIDIA_*", "GPU_DEVICE_ORDINAL")


def open_devices(options: DeviceOptions) -> Devices:
    """Return the :class:`Devices` of this machine's NVIDIA GPUs; its ``start`` finds the GPUs.

    Raises
    ------
    ConfigError
        If ``options.python`` is not a program that can be started.
    """
    from . import driver, sampler, service, visibility

    return service.DeviceService(
        env=options.env,
        log=options.log,
        lock_timeout=options.lock_timeout,
        guard=options.guard,
        python=interpreter.choose(options.python),
        numbers=sampler.from_memo(options.memo),
        choose=lambda rows: visibility.chosen(rows, options.given, options.wanted),
        files=options.files or visibility.DEVICE_FILES,
        version_file=options.version_file or driver.MODULE,
        on_device_lost=options.on_lost,
    )


def driver_present() -> bool:
    """Return whether this machine has NVIDIA's kernel driver (or WSL's GPU device)."""
    from .driver import present

    return present()


def inspect(python: str, *, driver: bool) -> list[Finding]:
    """Return the doctor's findings on this machine, without starting the driver.

    ``python`` is ``c.GPUPool.device_python``; ``driver`` says whether to check the kernel driver.
    """
    from .driver import device_python, loaded_driver, persistence_mode

    found = device_python(python)
    if driver:
        found += [loaded_driver(), *persistence_mode()]
    return found
