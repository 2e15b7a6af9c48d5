# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Which of the machine's GPUs the broker's user was given, by the variables that say so.

NVML shows every GPU whose device file can be opened. On a machine without device cgroups that is
more than a batch system or an admin has given to this user, who is told by variables. A broker
never touches the others. What a variable names relative to devices that are shown only in part
(a container, a job with cgroups) is no further limit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

from ..backend import named

Row = Mapping[str, Any]

#: Read in this order; the first that is set is the batch system's or the user's word. Slurm sets
#: CUDA_VISIBLE_DEVICES for every step, so its own variables only matter without that.
_FIRST = ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "GPU_DEVICE_ORDINAL")

#: Of the container toolkit, which counts the host's GPUs.
_TOOLKIT = "NVIDIA_VISIBLE_DEVICES"

#: These number the machine's GPUs, also where not all of them are shown.
_GLOBAL = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", _TOOLKIT)

#: CUDA's numbering of devices must be NVML's, or an index means two devices.
_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

#: Defaults of frameworks that would take the whole device at their first use, or memory that cannot
#: be suspended.
_FRUGAL = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    # cudf.pandas uses managed memory by default, which the driver cannot suspend.
    "CUDF_PANDAS_RMM_MODE": "async",
}

#: Values of the toolkit's that limit nothing: "void" and "" say that it does nothing itself.
_ANY = ("", "all", "void")


@dataclass(frozen=True, slots=True)
class Given:
    """The rows of the GPUs that may be used; ``limit`` says in a sentence what left out others."""

    rows: tuple[Row, ...]
    limit: str = ""


def environment(devices: Sequence[str]) -> dict[str, str]:
    """Return the variables that show a new program these devices."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices), **_ORDER, **_FRUGAL}


def chosen(rows: Sequence[Row], environ: Mapping[str, str], wanted: Sequence[str] | None) -> Given:
    """Return the GPUs of ``rows`` that ``environ`` gives and ``c.GPUPool.devices`` wants.

    Raises
    ------
    ConfigError
        If that names one that is not there, or was not given.
    """
    found = given(rows, environ)
    if wanted is None or not found.rows:
        return found
    by_uuid = {row["uuid"]: row for row in found.rows}
    uuids = named({uuid: row["index"] for uuid, row in by_uuid.items()}, wanted, found.limit)
    return Given(tuple(by_uuid[uuid] for uuid in uuids), found.limit)


def given(rows: Sequence[Row], environ: Mapping[str, str]) -> Given:
    """Return the GPUs of ``rows`` (as NVML lists them) that ``environ`` gives.

    If a variable names none of them there is no row, and ``limit`` says why.
    """
    found, said = tuple(rows), []
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
                return Given((), f"{name}={text!r} gives the broker no GPU.")
            return Given(
                (), f"{name}={text!r} names none of the GPUs of this machine, which are {there}."
            )
        if len(kept) < len(found):
            numbers = ", ".join(str(row["index"]) for row in kept)
            said.append(f"{name}={text!r} limits the pool to GPU {numbers}.")
        found = kept
    return Given(found, " ".join(said))


def _named(rows: tuple[Row, ...], name: str, text: str) -> tuple[Row, ...]:
    """Return the rows that a list names; numbers are ranges for Slurm."""
    entries = [entry.strip() for entry in text.split(",")]
    numbers = {n for entry in entries for n in _numbers(entry)}
    if name in _GLOBAL and numbers:
        # As many as are shown, or fewer, were named: the others are hidden already, and what is
        # shown may be numbered from 0.
        if len(rows) <= len(numbers):
            return rows
        return tuple(row for row in rows if row.get("minor", row["index"]) in numbers)
    chosen: list[Row] = []
    for entry in entries:
        matches = [row for row in rows if _names(entry, row)]
        if not matches:
            break  # as for the driver, the list ends here
        chosen += [row for row in matches if row not in chosen]
    return tuple(row for row in rows if row in chosen)


def _numbers(entry: str) -> range:
    """Return what an entry such as ``3``, ``0-3`` or ``gpu:3`` numbers."""
    match = re.fullmatch(r"(?:[a-z_]+:)?([0-9]{1,4})(?:-([0-9]{1,4}))?", entry, re.IGNORECASE)
    if match is None:
        return range(0)
    return range(int(match[1]), int(match[2] or match[1]) + 1)


def _names(entry: str, row: Row) -> bool:
    if entry.isdecimal():
        return bool(int(entry) == row["index"])
    upper = entry.upper()
    return upper.startswith(("GPU-", "MIG-")) and str(row["uuid"]).upper().startswith(upper)
