# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Differences between the emulated driver and records of NVIDIA's libraries, and their reasons.

``tests/driver_records`` makes the records, and has those of some of NVIDIA's drivers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.driver_records import calls, errors, procaddr
from tests.driver_records.record import functions


@dataclass(frozen=True)
class Difference:
    """A question with two different answers."""

    #: The part of the record, and the question.
    section: str
    question: str
    real: Any
    emulated: Any

    def __str__(self) -> str:
        """Return one line of text."""
        return f"{self.section}: {self.question}: {self.real}, emulated {self.emulated}"


@dataclass(frozen=True)
class Reason:
    """Why some differences remain. A pattern must match the whole text; None matches any text."""

    why: str
    section: str
    question: str
    real: Any = None
    emulated: Any = None

    def covers(self, found: Difference) -> bool:
        """Return whether this reason explains the difference."""
        return bool(
            re.fullmatch(self.section, found.section)
            and re.fullmatch(self.question, found.question)
            and self.real in (None, found.real)
            and self.emulated in (None, found.emulated)
        )


_HANDLE = "The driver reads an invalid handle before it checks that it is initialised."
_AFTER = "A failed cuInit leaves the driver half initialised: calls check their handle."

#: Known differences from the newest record. A test checks that each exists.
REASONS = (
    Reason("The emulated driver is one of CUDA 13.", "arguments", "cuDriverGetVersion after.*"),
    Reason("Codes of later drivers.", "cuda_errors", "36|226|721|916", [1, 1]),
    Reason("A driver without devices needs no thread.", "arguments", "threads .*"),
    Reason(
        "cuMemAlloc of 32-bit addresses is not emulated.",
        "arguments",
        "cuGetProcAddress v.: 'cuMemAlloc' at (2000|3019)",
    ),
    Reason(
        "Forms of later drivers.",
        "procaddr",
        r"(cuCtxGetDevice|cuCtxSynchronize|cuEventElapsedTime), flags \d, from (12080|13000)",
    ),
    Reason(
        "The manual of CUDA 13 allows null parameters.",
        "calls: .*",
        "cuCtxCreate_v4( 2)?",
        "signal 11",
        "3",
    ),
    Reason(
        _HANDLE,
        "calls: before init, buffer.*",
        r"(cuArray3DGetDescriptor_v2|cuEvent\w+|cuMipmappedArrayGetLevel)( \d)?",
        "201",
        "3",
    ),
    Reason(
        _HANDLE,
        "calls: before init, buffer.*",
        r"cuStreamGetCtx(_v2)?(_ptsz)?( \d)?",
        "400",
    ),
    Reason(
        _HANDLE,
        "calls: .*buffer.*",
        r"(cuFuncGetName|cuKernelGetName)( \d)?",
        "0",
        "3",
    ),
    Reason(_HANDLE, "calls: .*buffer.*", r"cuFuncGetParamInfo( \d)?", "1", "3"),
    Reason(
        "The driver reads an IPC handle before it checks that it is initialised.",
        "calls: before init, buffer but for one",
        "cuIpcOpenMemHandle(_v2)? 2",
        "1",
        "3",
    ),
    Reason(
        _AFTER,
        "calls: after a failed init, buffer",
        r"cu(Event|Graph|Launch|Mem(Alloc|Free|set)|Stream)\w+",
        "400",
        "3",
    ),
    Reason(
        _AFTER,
        "calls: after a failed init, buffer",
        r"cu(Array|Event|MipmappedArray)\w+",
        "201",
        "3",
    ),
    Reason(
        _AFTER,
        "calls: after a failed init, (zero|buffer)",
        "(cuLaunchHostFunc|cuStreamAddCallback)(_ptsz)?|cuArrayDestroy|cuMipmappedArrayDestroy"
        "|cuThreadExchangeStreamCaptureMode",
        None,
        "3",
    ),
    Reason(
        "The emulated linker checks its handle before anything else, and never follows a bad one.",
        "calls: .*",
        r"cuLink\w+( \d)?",
    ),
)


def differences(real: dict[str, Any], emulated: dict[str, Any]) -> Iterator[Difference]:
    """Yield the questions of both records that have different answers."""
    for section in ("arguments", "nvml_arguments"):
        for question in real[section].keys() & emulated[section].keys():
            answers = real[section][question], emulated[section][question]
            if answers[0] != answers[1]:
                yield Difference(section, question, *answers)
    for section in ("cuda_errors", "nvml_errors"):
        tables = real[section], emulated[section]
        for code in map(str, errors.CODES):
            answers = tuple(table.get(code, table["others"]) for table in tables)
            if answers[0] != answers[1]:
                yield Difference(section, code, *answers)
    yield from _procaddr(real, emulated)
    for section, common in {
        "calls": functions(real) & functions(emulated),
        "nvml_calls": {*real["nvml_functions"]} & {*emulated["nvml_functions"]},
    }.items():
        yield from _calls(section, real[section], emulated[section], common)


def _calls(
    section: str, real: dict[str, Any], emulated: dict[str, Any], common: Iterable[str]
) -> Iterator[Difference]:
    here, there = calls.lookup(real), calls.lookup(emulated)
    kinds = sorted(real.keys() & emulated.keys())
    anywhere = not any(kind.startswith(calls.AFTER) for kind in kinds)
    for kind in kinds:
        for name in sorted(common):
            if not calls.asked(name, kind, anywhere=anywhere):
                continue
            numbers = range(1, calls.ARGUMENTS + 1) if kind.endswith(calls.BUT_ONE) else ()
            for question in [f"{name} {number}" for number in numbers] or [name]:
                one, other = here(kind, question), there(kind, question)
                if one != other:
                    yield Difference(f"{section}: {kind}", question, one, other)


def _procaddr(real: dict[str, Any], emulated: dict[str, Any]) -> Iterator[Difference]:
    """Yield each version from which a name has another form.

    A form that the emulated driver lacks must have no address there.
    """
    here, tables = functions(emulated), (real["procaddr"], emulated["procaddr"])
    for name in sorted(tables[0].keys() & tables[1].keys()):
        for flags in procaddr.FLAGS:
            texts = [procaddr.entry(table, name, flags) for table in tables]
            changes = re.findall(r"(\d+):", " ".join(texts))
            for version in sorted({procaddr.VERSIONS[0], *map(int, changes)}):
                one, other = (procaddr.forms_at(text, name, version) for text in texts)
                lacking = "/" not in one and one not in here
                if other != (procaddr.MISSING if lacking else one):
                    question = f"{name}, flags {flags}, from {version}"
                    yield Difference("procaddr", question, one, other)
    if real["procaddr_older_form_differs"] != emulated["procaddr_older_form_differs"]:
        texts = [record["procaddr_older_form_differs"] for record in (real, emulated)]
        yield Difference("procaddr", "older form", *texts)
