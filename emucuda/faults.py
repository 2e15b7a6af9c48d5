# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Faults and quirks, injected into a running machine or into one process."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import Mapping

from .sizes import EmulatorError, did_you_mean, parse_size

#: Every fault and quirk, with the parameters that it may have.
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
    "restore-hides-loss": ("pid",),
    "restore-more": ("pid", "device", "count", "bytes"),
    "migration-refused": ("pid", "count", "code"),
    "init-not-enough": ("pid",),
    "lock-ignores-timeout": ("pid",),
    "nvml-host-pids": ("pid", "device", "number"),
    "context-more": ("pid", "device", "bytes"),
    "loaded-code": ("pid", "device", "bytes"),
}
#: For each fault that needs a parameter: the parameter's name, and an example or the unit.
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
    """Injects faults into the machine of ``state_dir`` while it runs.

    ======================  ====================================================================
    ``slow-copies``         copies run at ``bandwidth`` bytes/s at most
    ``lock-timeout``        a checkpoint lock fails with NOT_READY after its time-out
    ``checkpoint-refused``  the checkpoint call fails (NOT_SUPPORTED); the process stays locked
    ``restore-failed``      the restore call fails (OPERATING_SYSTEM); the process is FAILED
    ``device-lost``         NVML reports GPU_IS_LOST and an Xid event, CUDA calls fail
    ``nvml-missing-pids``   NVML lists no processes
    ``hang``                a checkpoint call never returns
    ======================  ====================================================================

    Quirks are not failures. Each quirk changes one behaviour in which real drivers may differ. A
    program is ready for real drivers if it works with the quirk and without it.

    ========================  ==================================================================
    ``residue``               ``bytes`` of the device are in use and belong to no process
    ``nvml-less``             NVML lists a process with ``bytes`` less than it has
    ``nvml-waits``            NVML answers only after a running checkpoint or restore
    ``nvml-late``             NVML lists a process only ``ms`` after its first allocation
    ``nvml-lag``              NVML lists a process with its old bytes for ``ms`` after a suspend
    ``suspend-keeps``         a suspended process keeps ``bytes``; NVML lists it, even with 0
    ``restore-keeps-state``   a restore that fails leaves the process CHECKPOINTED
    ``restore-hides-loss``    a restore that fails leaves the process CHECKPOINTED; then every
                              later restore fails with 304 and leaves it CHECKPOINTED, too (as
                              driver 580.159.04 does)
    ``restore-more``          a restored process has ``bytes`` more than before
    ``migration-refused``     a restore onto another device fails (NOT_SUPPORTED) and can be
                              repeated
    ``init-not-enough``       a process that has only called cuInit cannot be suspended
    ``lock-ignores-timeout``  a lock waits for running work until this quirk is cleared, and
                              ignores its time-out
    ``nvml-host-pids``        NVML lists processes with pids of another PID namespace, as in a
                              container: with the pid ``number``, or with a pid that no process here
                              can have
    ``context-more``          a context takes ``bytes`` more than the machine's text says
    ``loaded-code``           the driver takes ``bytes`` more when a process first works on a
                              device, as lazily loaded modules do
    ========================  ==================================================================

    Three parameters restrict a fault: ``pid`` to one process, ``device`` to one device (by its
    index on the machine), and ``count`` to a number of calls. ``code`` is the CUresult to report
    instead of the usual one; for ``device-lost``, it is the Xid (79 by default). ``op`` is the call
    that hangs.
    """

    def __init__(self, state_dir: str | os.PathLike[str]) -> None:
        self._folder = Path(state_dir)

    def set(self, name: str, **params: int | str) -> None:
        """Inject fault ``name``. It replaces a fault with the same name, ``pid`` and ``device``.

        Raises
        ------
        EmulatorError
            If the name or a parameter is unknown.
        """
        _check_fault(name, params)
        words = [name, *(f"{key}={value}" for key, value in params.items())]
        # By this id, the driver recognises the fault when it reads a changed file. So the driver
        # continues to count the calls of the fault.
        line = " ".join([*words, f"id={secrets.randbits(63)}"])
        self._write([*(old for old in self._read() if _scope(old) != _scope(line)), line])

    def clear(self, name: str | None = None) -> None:
        """Remove the faults of this name, or all faults."""
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
        # Change `faults_touch` (machine.h). Running processes then read the file again.
        try:
            fd = os.open(self._folder / "machine", os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return  # no process uses the machine yet; the first process will read the file
        try:
            os.pwrite(fd, time.time_ns().to_bytes(8, "little"), 16)
        finally:
            os.close(fd)


def _scope(line: str) -> tuple[str, ...]:
    """Return the identity of a fault: its name, ``pid`` and ``device``."""
    name, *words = line.split()
    return (name, *sorted(word for word in words if word.startswith(("pid=", "device="))))


def check_faults(text: str) -> str:
    """Check each fault in ``text``, a value for ``EMUCUDA_FAULTS``; return ``text`` itself.

    Raises
    ------
    EmulatorError
        If the name or a parameter of a fault is unknown.
    """
    for line in text.replace(";", "\n").splitlines():
        if words := line.split():
            pairs = (word.partition("=") for word in words[1:])
            _check_fault(words[0], {key: int(v) if v.isdecimal() else v for key, _, v in pairs})
    return text


def _check_fault(name: str, params: Mapping[str, object]) -> None:
    if name not in FAULTS:
        raise EmulatorError(
            f"{name!r} is not a fault; the faults are {', '.join(FAULTS)}. "
            f"{did_you_mean(name, FAULTS)}"
        )
    for key, value in params.items():
        if key not in FAULTS[name]:
            raise EmulatorError(
                f"Fault {name!r} takes {', '.join(FAULTS[name])}, not {key!r}. "
                f"{did_you_mean(key, FAULTS[name])}"
            )
        if key == "op" and value not in _OPERATIONS:
            raise EmulatorError(
                f"op={value!r} is not an operation; give one of {', '.join(_OPERATIONS)}."
            )
        if key == "bandwidth":
            good = isinstance(value, (int, str)) and bool(parse_size(str(value), rate=True))
        elif key == "bytes":
            good = isinstance(value, (int, str)) and parse_size(str(value)) is not None
        else:
            good = key == "op" or (isinstance(value, int) and not isinstance(value, bool))
        if not good:
            raise EmulatorError(f"{key}={value!r} of fault {name!r} is not a number; give one.")
    key, how = _NEEDED.get(name, ("", ""))
    if key and params and key not in params:
        raise EmulatorError(f"Fault {name!r} needs {key}=, {how}.")
