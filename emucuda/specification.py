# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Machines to emulate, and the environment that selects the emulated driver.

This module loads no driver. A process gets the emulated driver if it starts with the variables of
:func:`environment`.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .sizes import EmulatorError, did_you_mean, format_size, parse_size

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The default of ``Machine.context``, in bytes.
DEFAULT_CONTEXT = 64 << 20
#: The largest number of devices of one machine.
MAX_DEVICES = 64
#: The most bytes of one device, and the most bytes of all devices of a machine together. Twice
#: MAX_TOTAL must fit into the address space of a process.
MAX_MEMORY = 1 << 40
MAX_TOTAL = 16 << 40
#: The lowest accepted rate of copies, in bytes/s. A lower rate is probably a mistake: a user who
#: writes ``bandwidth=8`` means 8 GB/s.
MIN_BANDWIDTH = 1_000_000
#: Device memory comes in pages of this many bytes, as on current NVIDIA hardware.
PAGE = 2 << 20


@dataclass(frozen=True)
class Profile:
    """The rates of a board, from its data sheet. 0 means as fast as the host computes.

    The board's rates of copies and of suspends are in ``src/spec.c``.
    """

    #: Bytes/s of device memory.
    memory: float = 0
    #: Operations/s: ``flops`` with 32-bit numbers, ``half_flops`` with 16-bit numbers on tensor
    #: cores.
    flops: float = 0
    half_flops: float = 0


#: The profiles, in the order of ``src/spec.c``.
PROFILES = {
    "cpu": Profile(),
    "h100": Profile(3.35e12, 67e12, 989e12),
    "h200": Profile(4.8e12, 67e12, 989e12),
    "rtx4090": Profile(1.008e12, 82.6e12, 165e12),
}

_EXAMPLE = "2x16GiB or 2x16GiB,context=256MiB,bandwidth=8GB/s"
_OPTIONS = ("context", "bandwidth", "reserved", "profile")


class EmulatorNotBuilt(EmulatorError):
    """The emulated driver has not been compiled on this machine."""


@dataclass(frozen=True)
class Machine:
    """An emulated machine: ``count`` equal devices."""

    #: The number of devices.
    count: int
    #: Bytes of memory per device, a multiple of 2 MiB.
    memory: int
    #: Bytes of device memory that a context takes. A process pays them once on each device on which
    #: it has a context.
    context: int = DEFAULT_CONTEXT
    #: The rate of copies between host and device, in bytes/s. It also limits a checkpoint and a
    #: restore. 0 means the rate of ``profile``; with the profile ``cpu``, copies are as fast as the
    #: host's memory.
    bandwidth: int = 0
    #: Bytes per device that the driver keeps for itself (NVML's ``reserved``).
    reserved: int = 0
    #: The board that the driver imitates in its times: a key of :data:`PROFILES`. If ``bandwidth``
    #: is not 0, it replaces the board's rate of copies.
    profile: str = "cpu"

    def __str__(self) -> str:
        """Return the text that :func:`parse_machine` reads."""
        text = f"{self.count}x{format_size(self.memory)}"
        if self.context != DEFAULT_CONTEXT:
            text += f",context={format_size(self.context)}"
        if self.bandwidth:
            text += f",bandwidth={self.bandwidth}B/s"
        if self.reserved:
            text += f",reserved={format_size(self.reserved)}"
        if self.profile != "cpu":
            text += f",profile={self.profile}"
        return text


def _option(text: str, found: dict[str, Any]) -> None:
    key, equals, value = text.partition("=")
    if key not in _OPTIONS:
        raise EmulatorError(
            f"{key!r} is not an option of an emulated machine; the options are "
            f"{', '.join(_OPTIONS)}. {did_you_mean(key, _OPTIONS)}"
        )
    if key in found:
        raise EmulatorError(f"{key!r} is given twice; write it once.")
    if key == "profile":
        if value not in PROFILES:
            raise EmulatorError(
                f"{value!r} is not a profile; the profiles are {', '.join(PROFILES)}. "
                f"{did_you_mean(value, PROFILES)}"
            )
        found[key] = value
        return
    size = parse_size(value, rate=key == "bandwidth") if equals else None
    if size is None:
        raise EmulatorError(
            f"{text!r} is not a size for {key!r}; write for example {key}="
            + ("8GB/s." if key == "bandwidth" else "256MiB.")
        )
    if key == "bandwidth" and 0 < size < MIN_BANDWIDTH:
        raise EmulatorError(
            f"{text!r} is less than 1 MB/s, so copies would take too long; write for example "
            "bandwidth=8GB/s."
        )
    found[key] = size


def parse_machine(text: str) -> Machine:
    """Return the machine that ``text`` describes, such as ``"2x16GiB,context=256MiB"``.

    The text begins with ``COUNTxSIZE``. The options ``context=SIZE``, ``bandwidth=SIZE/s``,
    ``reserved=SIZE`` and ``profile=NAME`` may follow, each after a comma. A size is a decimal
    number with a unit. The units KiB, MiB, GiB and TiB (or K, M, G and T) are powers of 1024. The
    units kB, MB, GB and TB are powers of 1000. A device's memory is rounded down to whole pages of
    2 MiB.

    Raises
    ------
    EmulatorError
        If the text is not a machine, or the machine is impossible.
    """
    head, *options = text.split(",")
    match = re.fullmatch(r"([0-9]+)x(.*)", head, re.ASCII | re.DOTALL)
    if match is None:
        raise EmulatorError(
            f"{text!r} is not an emulated machine: it must be COUNTxSIZE. Write {_EXAMPLE}."
        )
    size = parse_size(match[2])
    if size is None:
        raise EmulatorError(
            f"{match[2]!r} in {text!r} is not a size of device memory. Write {_EXAMPLE}."
        )
    if len(match[1]) > 9 or not 1 <= int(match[1]) <= MAX_DEVICES:
        raise EmulatorError(
            f"{text!r} asks for {match[1]} devices, but an emulated machine has 1 to "
            f"{MAX_DEVICES}. Ask for fewer."
        )
    found: dict[str, Any] = {}
    for option in options:
        _option(option, found)
    machine = Machine(int(match[1]), size - size % PAGE, **found)
    if not machine.memory:
        raise EmulatorError(
            f"{match[2]!r} in {text!r} is less than one page of {format_size(PAGE)}. Write a unit: "
            f"{_EXAMPLE}."
        )
    if machine.memory > MAX_MEMORY or machine.memory * machine.count > MAX_TOTAL:
        raise EmulatorError(
            f"{text!r} is too large: a device may have 1 TiB and a machine 16 TiB. Ask for less."
        )
    if machine.context + machine.reserved >= machine.memory:
        raise EmulatorError(
            f"{text!r} leaves no memory to allocate: a device has {format_size(machine.memory)}, a "
            f"context takes {format_size(machine.context)}, and the driver takes "
            f"{format_size(machine.reserved)}. "
            "Ask for larger devices, or a smaller overhead like context=16MiB."
        )
    return machine


def library_dir() -> Path:
    """Return the directory that holds the compiled ``libcuda.so.1`` and ``libnvidia-ml.so.1``.

    Raises
    ------
    EmulatorNotBuilt
        If the libraries have not been compiled.
    """
    folder = Path(__file__).resolve().parent / "lib"
    if not all((folder / name).exists() for name in ("libcuda.so.1", "libnvidia-ml.so.1")):
        raise EmulatorNotBuilt(
            "The emulated NVIDIA driver has not been compiled. Install a C compiler (gcc or "
            "clang, callable as cc) and run: python -m emucuda.build"
        )
    return folder


def environment(
    machine: Machine | str,
    state_dir: str | os.PathLike[str] | None = None,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the variables that give a child process the emulated driver.

    Parameters
    ----------
    machine
        The machine, or its text. All processes that share a ``state_dir`` must name the same
        machine.
    state_dir
        The directory of the machine's shared state. Each directory is a separate machine. The
        first process that uses the driver creates the directory, if its parent exists. If
        ``state_dir`` is None, the driver uses the directory that ``base`` names, or
        ``/dev/shm/emucuda-<uid>``.
    base
        The environment to which the caller will add the variables. The new ``LD_LIBRARY_PATH``
        also contains the folders of this environment's ``LD_LIBRARY_PATH``. None means
        ``os.environ``.
    """
    if isinstance(machine, str):
        machine = parse_machine(machine)
    if base is None:
        base = os.environ
    folder = str(library_dir())
    rest = [p for p in base.get("LD_LIBRARY_PATH", "").split(":") if p and p != folder]
    found = {"LD_LIBRARY_PATH": ":".join([folder, *rest]), "EMUCUDA_MACHINE": str(machine)}
    if state_dir is not None:
        found["EMUCUDA_STATE"] = os.path.abspath(os.fspath(state_dir))
    return found


def device_files(state_dir: str | os.PathLike[str]) -> str:
    """Return the common beginning of the machine's device paths, like ``/dev/nvidia``."""
    return str(Path(state_dir).resolve() / "nvidia")


def remove_state(state_dir: str | os.PathLike[str]) -> None:
    """Remove the shared state of a machine that no process uses."""
    shutil.rmtree(state_dir, ignore_errors=True)
