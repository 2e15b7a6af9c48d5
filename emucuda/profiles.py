# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Machines to emulate, faults to inject, and the environment that selects the emulated driver.

Standard library only, and nothing here loads a driver: a process gets the emulated one when it is
started with :func:`environment`.
"""

from __future__ import annotations

import difflib
import os
import re
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Bytes of device memory that a process's first context on a device costs, unless asked otherwise.
DEFAULT_CONTEXT = 64 << 20
#: Devices of one machine at most.
MAX_DEVICES = 64
#: Bytes of one device, and of all devices of a machine, at most: twice the total must fit the
#: address space of a process.
MAX_MEMORY = 1 << 40
MAX_TOTAL = 16 << 40
#: Bytes/s of copies at least, if limited at all: who writes ``bandwidth=8`` means GB/s.
MIN_BANDWIDTH = 1_000_000
#: Device memory is handed out in pages of this many bytes, as on current NVIDIA hardware.
PAGE = 2 << 20

_UNITS = {
    **{f"{letter}iB": 1 << (10 * n) for n, letter in enumerate("KMGT", 1)},
    **{f"{letter}B": 1000**n for n, letter in enumerate("kMGT", 1)},
    **{letter: 1 << (10 * n) for n, letter in enumerate("KMGT", 1)},
    "B": 1,
    "": 1,
}
_SIZE = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,9}))?([A-Za-z]*)", re.ASCII)
_EXAMPLE = "2x16GiB or 2x16GiB,context=256MiB,bandwidth=8GB/s"
_OPTIONS = ("context", "bandwidth", "reserved")


class EmulatorError(ValueError):
    """What was asked of the emulated driver cannot be; the text says what can and what to do."""


class EmulatorNotBuilt(EmulatorError):
    """The emulated driver has not been compiled on this machine."""


@dataclass(frozen=True)
class Machine:
    """An emulated machine: ``count`` equal devices."""

    #: Devices.
    count: int
    #: Bytes of memory per device, a multiple of 2 MiB.
    memory: int
    #: Bytes that each process is charged on each device on which it has a context.
    context: int = DEFAULT_CONTEXT
    #: Bytes/s of copies between host and device, checkpoint and restore included; 0: as fast as
    #: the host's memory.
    bandwidth: int = 0
    #: Bytes per device that the driver keeps for itself (NVML's ``reserved``).
    reserved: int = 0

    def __str__(self) -> str:
        """Return the text that :func:`parse_machine` reads."""
        text = f"{self.count}x{_format(self.memory)}"
        if self.context != DEFAULT_CONTEXT:
            text += f",context={_format(self.context)}"
        if self.bandwidth:
            text += f",bandwidth={self.bandwidth}B/s"
        if self.reserved:
            text += f",reserved={_format(self.reserved)}"
        return text


def _format(value: int) -> str:
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if value and value % _UNITS[unit] == 0:
            return f"{value // _UNITS[unit]}{unit}"
    return f"{value}B"


def _size(text: str, *, rate: bool = False) -> int | None:
    match = _SIZE.fullmatch(text.removesuffix("/s") if rate else text)
    if match is None or match[3] not in _UNITS:
        return None
    unit, fraction = _UNITS[match[3]], match[2] or ""
    value = int(match[1]) * unit
    if fraction:
        value += int(fraction) * unit // 10 ** len(fraction)
    return value if value <= (1 << 63) - 1 else None


def _option(text: str, found: dict[str, int]) -> None:
    key, equals, value = text.partition("=")
    if key not in _OPTIONS:
        near = difflib.get_close_matches(key, _OPTIONS, 1, 0)[0]
        raise EmulatorError(
            f"{key!r} is no option of an emulated machine; there are {', '.join(_OPTIONS)}. "
            f"Did you mean {near!r}?"
        )
    size = _size(value, rate=key == "bandwidth") if equals else None
    if size is None:
        raise EmulatorError(
            f"{text!r} is not a size for {key!r}; write for example {key}="
            + ("8GB/s." if key == "bandwidth" else "256MiB.")
        )
    if key == "bandwidth" and 0 < size < MIN_BANDWIDTH:
        raise EmulatorError(
            f"{text!r} is less than 1 MB/s, and nothing would ever be done at that; write for "
            "example bandwidth=8GB/s."
        )
    if key in found:
        raise EmulatorError(f"{key!r} is given twice; write it once.")
    found[key] = size


def parse_machine(text: str) -> Machine:
    """Return the machine that ``text`` describes, such as ``"2x16GiB,context=256MiB"``.

    ``COUNTxSIZE``, then any of ``context=SIZE``, ``bandwidth=SIZE/s`` and ``reserved=SIZE``, after
    commas. Sizes are decimal numbers with a unit: KiB MiB GiB TiB (or K M G T) are powers of
    1024, kB MB GB TB powers of 1000. A device's memory is rounded down to whole 2 MiB pages.

    Raises
    ------
    EmulatorError
        If the text is none, or the machine is impossible.
    """
    head, *options = text.split(",")
    match = re.fullmatch(r"([0-9]+)x(.*)", head, re.ASCII | re.DOTALL)
    if match is None:
        raise EmulatorError(
            f"{text!r} is not an emulated machine: it must be COUNTxSIZE. Write {_EXAMPLE}."
        )
    size = _size(match[2])
    if size is None:
        raise EmulatorError(
            f"{match[2]!r} in {text!r} is not a size of device memory. Write {_EXAMPLE}."
        )
    if len(match[1]) > 9 or not 1 <= int(match[1]) <= MAX_DEVICES:
        raise EmulatorError(
            f"{text!r} asks for {match[1]} devices, but an emulated machine has 1 to "
            f"{MAX_DEVICES}. Ask for fewer."
        )
    found: dict[str, int] = {}
    for option in options:
        _option(option, found)
    machine = Machine(int(match[1]), size - size % PAGE, **found)
    if machine.memory > MAX_MEMORY or machine.memory * machine.count > MAX_TOTAL:
        raise EmulatorError(
            f"{text!r} is too large: a device may have 1 TiB and a machine 16 TiB. Ask for less."
        )
    if machine.context + machine.reserved >= machine.memory:
        raise EmulatorError(
            f"{text!r} leaves no memory to allocate: a context takes {_format(machine.context)} "
            f"and the driver {_format(machine.reserved)} of {_format(machine.memory)}. Ask for "
            "larger devices, or a smaller overhead like context=16MiB."
        )
    return machine


def library_dir() -> Path:
    """Return the directory that holds the compiled ``libcuda.so.1`` and ``libnvidia-ml.so.1``.

    Raises
    ------
    EmulatorNotBuilt
        If they have not been compiled.
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
    state_dir: str | os.PathLike[str],
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the variables that give a child process the emulated driver.

    Parameters
    ----------
    machine
        The machine, or its text. All processes that share a ``state_dir`` must name the same.
    state_dir
        Directory of the machine's shared state. Another directory is another machine. It is
        created by the first process that uses the driver, if its parent exists.
    base
        The environment to which the variables will be added, for its ``LD_LIBRARY_PATH``;
        ``os.environ`` if None.
    """
    if isinstance(machine, str):
        machine = parse_machine(machine)
    if base is None:
        base = os.environ
    folder = str(library_dir())
    rest = [p for p in base.get("LD_LIBRARY_PATH", "").split(":") if p and p != folder]
    return {
        "LD_LIBRARY_PATH": ":".join([folder, *rest]),
        "GPUPOOL_EMULATE": str(machine),
        "GPUPOOL_EMULATE_STATE": os.path.abspath(os.fspath(state_dir)),
    }


def device_files(state_dir: str | os.PathLike[str]) -> str:
    """Return how the paths of the machine's device files begin, as ``/dev/nvidia`` does."""
    return str(Path(state_dir).resolve() / "nvidia")


def remove_state(state_dir: str | os.PathLike[str]) -> None:
    """Remove a machine's shared state, which no process should be using any more."""
    shutil.rmtree(state_dir, ignore_errors=True)


#: Every fault with the parameters it takes.
FAULTS: dict[str, tuple[str, ...]] = {
    "slow-copies": ("pid", "device", "count", "bandwidth"),
    "lock-timeout": ("pid", "count", "code"),
    "checkpoint-refused": ("pid", "device", "count", "code"),
    "restore-failed": ("pid", "device", "count", "code"),
    "device-lost": ("device", "code"),
    "nvml-missing-pids": ("device",),
    "hang": ("pid", "count", "op"),
    "residue": ("device", "bytes"),
    "nvml-less": ("pid", "device", "bytes"),
    "nvml-waits": ("device",),
    "nvml-late": ("pid", "device", "ms"),
    "nvml-lag": ("pid", "device", "ms"),
    "suspend-keeps": ("pid", "device", "bytes"),
    "restore-keeps-state": ("pid", "code"),
    "restore-more": ("pid", "device", "count", "bytes"),
    "migration-refused": ("pid", "count", "code"),
    "init-suffices": ("pid",),
    "lock-ignores-timeout": ("pid",),
    "nvml-host-pids": ("pid", "device", "number"),
    "context-more": ("pid", "device", "bytes"),
    "loaded-code": ("pid", "device", "bytes"),
}
#: What a fault is not without.
_NEEDED = {
    "slow-copies": ("bandwidth", "in bytes/s"),
    "residue": ("bytes", "such as 200MiB"),
    "nvml-less": ("bytes", "such as 64MiB"),
    "nvml-late": ("ms", "in milliseconds"),
    "nvml-lag": ("ms", "in milliseconds"),
    "suspend-keeps": ("bytes", "such as 4MiB, or 0"),
    "restore-more": ("bytes", "such as 16MiB"),
    "context-more": ("bytes", "such as 16MiB"),
    "loaded-code": ("bytes", "such as 256MiB"),
}
_OPERATIONS = ("lock", "checkpoint", "restore", "unlock", "state")


class Faults:
    """Injects faults into the machine of ``state_dir``, while it runs.

    ======================  ====================================================================
    ``slow-copies``         copies run at ``bandwidth`` bytes/s at most
    ``lock-timeout``        a checkpoint lock fails with NOT_READY after its time-out
    ``checkpoint-refused``  the checkpoint call fails (NOT_SUPPORTED); the process stays locked
    ``restore-failed``      the restore call fails (OPERATING_SYSTEM); the process is FAILED
    ``device-lost``         NVML reports GPU_IS_LOST and an Xid event, CUDA calls fail
    ``nvml-missing-pids``   NVML lists no processes
    ``hang``                a checkpoint call never returns
    ======================  ====================================================================

    And temperaments: no failures, but the other answer to a question that nobody has put to a
    real driver yet. What runs above the driver must be right with either.

    ========================  ==================================================================
    ``residue``               ``bytes`` of the device are in use and no process's
    ``nvml-less``             NVML lists a process with ``bytes`` less than it really has
    ``nvml-waits``            NVML does not answer while a checkpoint or restore is copying
    ``nvml-late``             NVML lists a process only ``ms`` after its first memory
    ``nvml-lag``              NVML lists a suspended process as before for ``ms`` more
    ``suspend-keeps``         a suspended process keeps ``bytes``, and is listed (0: with none)
    ``restore-keeps-state``   a restore that fails leaves the process CHECKPOINTED
    ``restore-more``          a restored process has ``bytes`` more than before
    ``migration-refused``     a restore onto another device fails (NOT_SUPPORTED), and can be had
                              again
    ``init-suffices``         cuInit alone, without a context, makes a process that can be
                              suspended
    ``lock-ignores-timeout``  a lock waits for work that never ends, whatever its time-out, until
                              this is cleared
    ``nvml-host-pids``        NVML lists processes by numbers of another PID namespace, as in a
                              container: a process is listed as ``number``, or by one that no
                              process here can have
    ``context-more``          a context takes ``bytes`` more than the machine's text says
    ``loaded-code``           the driver takes ``bytes`` more with a process's first work on a
                              device, as lazily loaded modules do
    ========================  ==================================================================

    Each may be narrowed with ``pid`` (the target process), ``device`` (the machine's index) and
    ``count`` (how often it strikes); ``code`` is the CUresult to report instead of the usual one
    (for ``device-lost`` the Xid, 79 if not given), ``op`` the call that hangs.
    """

    def __init__(self, state_dir: str | os.PathLike[str]) -> None:
        self._folder = Path(state_dir)

    def set(self, name: str, **params: int | str) -> None:
        """Inject fault ``name``. One with the same name, ``pid`` and ``device`` is replaced.

        Raises
        ------
        EmulatorError
            If there is no such fault or parameter.
        """
        _check_fault(name, params)
        words = [name, *(f"{key}={value}" for key, value in params.items())]
        # The identity keeps this fault's count while others come and go.
        line = " ".join([*words, f"id={secrets.randbits(63)}"])
        self._write([*(old for old in self._read() if _scope(old) != _scope(line)), line])

    def clear(self, name: str | None = None) -> None:
        """Remove fault ``name``, or all of them."""
        if name is None:
            self._write([])
            return
        _check_fault(name, {})
        self._write([line for line in self._read() if _scope(line)[0] != name])

    def _read(self) -> list[str]:
        try:
            text = (self._folder / "faults").read_text(encoding="ascii")
        except FileNotFoundError:
            return []
        return [line for line in text.replace(";", "\n").splitlines() if line.strip()]

    def _write(self, lines: list[str]) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        temporary = self._folder / f"faults.{os.getpid()}.{secrets.token_hex(4)}"
        temporary.write_text("".join(f"{line}\n" for line in lines), encoding="ascii")
        temporary.replace(self._folder / "faults")
        # Tells running processes: see `faults_touch` in machine.h.
        try:
            fd = os.open(self._folder / "machine", os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return  # no process yet: the first will read the file
        try:
            os.pwrite(fd, time.time_ns().to_bytes(8, "little"), 16)
        finally:
            os.close(fd)


def _scope(line: str) -> tuple[str, ...]:
    """Return what tells one fault from another: its name, ``pid`` and ``device``."""
    name, *words = line.split()
    return (name, *sorted(word for word in words if word.startswith(("pid=", "device="))))


def _check_fault(name: str, params: Mapping[str, object]) -> None:
    if name not in FAULTS:
        near = difflib.get_close_matches(name, FAULTS, 1, 0)[0]
        raise EmulatorError(
            f"There is no fault {name!r}; there are {', '.join(FAULTS)}. Did you mean {near!r}?"
        )
    for key, value in params.items():
        if key not in FAULTS[name]:
            near = difflib.get_close_matches(key, FAULTS[name], 1, 0)[0]
            raise EmulatorError(
                f"Fault {name!r} takes {', '.join(FAULTS[name])}, not {key!r}. "
                f"Did you mean {near!r}?"
            )
        if key == "op" and value not in _OPERATIONS:
            raise EmulatorError(f"op={value!r} is none of {', '.join(_OPERATIONS)}; name one.")
        if key == "bandwidth":
            good = isinstance(value, (int, str)) and bool(_size(str(value), rate=True))
        elif key == "bytes":
            good = isinstance(value, (int, str)) and _size(str(value)) is not None
        else:
            good = key == "op" or (isinstance(value, int) and not isinstance(value, bool))
        if not good:
            raise EmulatorError(f"{key}={value!r} of fault {name!r} is not a number; give one.")
    key, how = _NEEDED.get(name, ("", ""))
    if key and params and key not in params:
        raise EmulatorError(f"Fault {name!r} needs {key}=, {how}.")
