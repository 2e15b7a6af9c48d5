# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Choose the GPUs that the broker, its children and new programs see; find processes that use GPUs.

- NVML shows every GPU whose device file can be opened. On a machine without device cgroups, NVML
  may show more GPUs than a batch system or an admin has given to the broker's user. Environment
  variables say which GPUs were given, and the broker never uses other GPUs. If a container or a
  job's cgroup already hides the other GPUs, the broker uses all GPUs that it sees, and ignores the
  numbers in the variable.
- A driver cannot be replaced while a process has device files open. CUDA opens the files of all
  GPUs that a process sees, and NVML opens a file for each handle that it returns. So if an admin
  has set a device aside, CUDA_VISIBLE_DEVICES hides the device from new children, and the monitor
  requests no NVML handle for the device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Iterable, Mapping, Sequence

from ... import procfs
from ...errors import Code, DriverError
from ..backend import named
from ..model import FileHolder

DeviceRow = Mapping[str, Any]

VISIBLE = "CUDA_VISIBLE_DEVICES"

#: The broker uses the first of these variables that is set. Slurm sets CUDA_VISIBLE_DEVICES for
#: every step, so the other variables matter only if a user has removed CUDA_VISIBLE_DEVICES.
_FIRST = (VISIBLE, "SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "GPU_DEVICE_ORDINAL")

#: Variable of the container toolkit. It contains the numbers that the GPUs have on the host.
_TOOLKIT = "NVIDIA_VISIBLE_DEVICES"

#: The numbers in these variables count all GPUs of the machine, even GPUs that are not visible.
_GLOBAL = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", _TOOLKIT)

#: CUDA must number devices as NVML does. Otherwise the same index could mean two different devices.
_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

#: These variables tell frameworks not to take the whole device at the first use, and not to use
#: memory that the driver cannot suspend.
_FRUGAL = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    # cudf.pandas uses managed memory by default, which the driver cannot suspend.
    "CUDF_PANDAS_RMM_MODE": "async",
}

#: With these values, the toolkit's variable hides no GPU. "void" and "" switch the toolkit off.
_ANY = ("", "all", "void")


@dataclass(frozen=True, slots=True)
class Given:
    """The rows of the GPUs that the pool may use; ``limit`` says why it may not use other GPUs."""

    rows: tuple[DeviceRow, ...]
    limit: str = ""


def environment(devices: Sequence[str]) -> dict[str, str]:
    """Return environment variables for a new program, which then sees only these devices."""
    return {VISIBLE: ",".join(devices), **_ORDER, **_FRUGAL}


def chosen(
    rows: Sequence[DeviceRow], environ: Mapping[str, str], wanted: Sequence[str] | None
) -> Given:
    """Return the GPUs in ``rows`` that both ``environ`` and ``c.GPUPool.devices`` allow.

    ``wanted`` is the value of the option; None allows all GPUs.

    Raises
    ------
    ConfigError
        If the option names a GPU that does not exist, or that ``environ`` does not allow.
    """
    found = given(rows, environ)
    if wanted is None or not found.rows:
        return found
    by_uuid = {row["uuid"]: row for row in found.rows}
    uuids = named({uuid: row["index"] for uuid, row in by_uuid.items()}, wanted, found.limit)
    return Given(tuple(by_uuid[uuid] for uuid in uuids), found.limit)


def given(rows: Sequence[DeviceRow], environ: Mapping[str, str]) -> Given:
    """Return the GPUs in ``rows`` (from NVML's list) that the variables in ``environ`` allow.

    If a variable allows none of these GPUs, the result has no row, and ``limit`` says why.
    """
    found, limits = tuple(rows), []
    first = next((name for name in _FIRST if name in environ), "")
    for name in (first, _TOOLKIT):
        text = environ.get(name, "").strip()
        if not name or name not in environ or (name == _TOOLKIT and text.lower() in _ANY):
            continue
        named = _named(tuple(rows), name, text)
        kept = tuple(row for row in found if row in named)
        if not kept:
            there = ", ".join(f"{row['index']} ({row['uuid']})" for row in rows)
            if text.lower() in ("", "-1", "none", "nodevfiles"):
                return Given(
                    (), f"The environment variable {name}={text!r} gives the broker no GPU."
                )
            return Given(
                (), f"{name}={text!r} names none of the GPUs of this machine, which are {there}."
            )
        if len(kept) < len(found):
            numbers = ", ".join(str(row["index"]) for row in kept)
            limits.append(f"{name}={text!r} limits the pool to GPU {numbers}.")
        found = kept
    return Given(found, " ".join(limits))


def _named(rows: tuple[DeviceRow, ...], name: str, text: str) -> tuple[DeviceRow, ...]:
    """Return the rows of the GPUs that ``text`` lists; ``text`` is the value of variable ``name``.

    A list of Slurm can have ranges of numbers.
    """
    entries = [entry.strip() for entry in text.split(",")]
    numbers = {n for entry in entries for n in _numbers(entry)}
    if name in _GLOBAL and numbers:
        # If no more GPUs are visible than the list has numbers, a container or a cgroup already
        # hides all other GPUs. The visible GPUs may then have new numbers that start at 0, so their
        # numbers must not be compared with the list.
        if len(rows) <= len(numbers):
            return rows
        return tuple(row for row in rows if row.get("minor", row["index"]) in numbers)
    chosen: list[DeviceRow] = []
    for entry in entries:
        matches = [row for row in rows if _names(entry, row)]
        if not matches:
            break  # the driver, too, ignores the rest of the list
        chosen += [row for row in matches if row not in chosen]
    return tuple(row for row in rows if row in chosen)


def _numbers(entry: str) -> range:
    """Return the numbers in an entry such as ``3``, ``0-3`` or ``gpu:3``."""
    match = re.fullmatch(r"(?:[a-z_]+:)?([0-9]{1,4})(?:-([0-9]{1,4}))?", entry, re.IGNORECASE)
    if match is None:
        return range(0)
    return range(int(match[1]), int(match[2] or match[1]) + 1)


def _names(entry: str, row: DeviceRow) -> bool:
    if entry.isdecimal():
        return bool(int(entry) == row["index"])
    upper = entry.upper()
    return upper.startswith(("GPU-", "MIG-")) and str(row["uuid"]).upper().startswith(upper)


class Aside:
    """The devices that are set aside, and the reasons.

    ``env`` is the environment of new children. This object changes ``env``, so that new children do
    not see the devices that are set aside.
    """

    def __init__(self, env: dict[str, str]) -> None:
        self._env = env
        self._reasons: dict[str, str] = {}
        #: The numbers of the GPUs' device files, by UUID. A MIG instance has no device file.
        self.numbers: dict[str, int] = {}

    def __contains__(self, uuid: str) -> bool:
        return uuid in self._reasons

    def __bool__(self) -> bool:
        return bool(self._reasons)

    def learn(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Note the device files of the GPUs that NVML found."""
        self.numbers = {row["uuid"]: row["minor"] for row in rows if not row["mig"]}

    def check(self, uuid: str) -> None:
        """Raise DriverError, code ``paused``, if the device is set aside."""
        if uuid in self._reasons:
            raise DriverError(self._reasons[uuid], code=Code.PAUSED)

    def put(self, uuids: Iterable[str], reason: str, machine: Iterable[str]) -> bool:
        """Set the devices ``uuids`` aside; return False if all of them were set aside before.

        ``machine`` are all GPUs of the machine.
        """
        fresh = {*uuids} - self._reasons.keys()
        self._reasons.update(dict.fromkeys(fresh, reason))
        self._see(machine)
        return bool(fresh)

    def take(self, uuids: Iterable[str], machine: Iterable[str]) -> None:
        """Use set-aside devices again."""
        for uuid in uuids:
            self._reasons.pop(uuid, None)
        self._see(machine)

    def _see(self, machine: Iterable[str]) -> None:
        if self._reasons:
            self._env[VISIBLE] = ",".join(u for u in machine if u not in self._reasons)
        else:
            self._env.pop(VISIBLE, None)


#: Prefix of the paths of NVIDIA's device files.
DEVICE_FILES = "/dev/nvidia"

#: Characters of a command line that are shown.
_COMMAND = 60


def holders(begin: str, number: int | None = None) -> tuple[list[FileHolder], int]:
    """Return the processes with device files open, and the number of unreadable processes.

    The paths of device files start with ``begin``. If ``number`` is not None, only the file of the
    GPU with this number counts. This function reads ``/proc`` of the whole machine, so do not call
    it in an event loop. Only root sees the open files of other users' processes.
    """
    found, unseen = [], 0
    for pid in procfs.all_pids():
        try:
            paths = {path for _, path in procfs.open_files(pid) if path.startswith(begin)}
        except PermissionError:
            unseen += 1
            continue
        except OSError:
            continue  # ended meanwhile
        if number is not None:
            paths &= {f"{begin}{number}"}
        process = procfs.identify(pid) if paths else None
        uid = procfs.owner(pid)
        if process is not None and uid is not None:
            found.append(FileHolder(process, uid, _command(pid), tuple(sorted(paths))))
    return sorted(found, key=lambda holder: holder.process.pid), unseen


def _command(pid: int) -> str:
    text = procfs.command(pid)
    return text if len(text) <= _COMMAND else f"{text[: _COMMAND - 3]}..."
