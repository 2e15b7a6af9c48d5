# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Finds the differences between the emulated driver and records of NVIDIA's libraries.

REASONS has the reasons for the known differences. ``tests/driver_records`` makes the records, and
has the records of several NVIDIA drivers.
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
    """The reason for one or more known differences.

    ``section`` and ``question`` are regular expressions for the whole text. ``real`` and
    ``emulated`` are the two answers; None stands for any answer.
    """

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


_HANDLE = "The driver follows an invalid handle before it checks that it is initialised."
_AFTER = "A failed cuInit leaves the driver half initialised: calls check their handle."
_LINKER = "The emulated linker refuses a bad handle, and the driver crashes."

#: The reasons for the differences between the emulated driver and two records: the newest record,
#: and the newest record that was made without a device. A test checks that each reason still
#: explains a difference.
REASONS = (
    Reason(
        "The record made without a device is of CUDA 12.5.",
        "arguments",
        "cuDriverGetVersion after.*",
        [0, 12050],
        [0, 13000],
    ),
    Reason("A driver without devices needs no thread.", "arguments", "threads .*"),
    Reason(
        "Since 580 a call of nvmlShutdown too many is an error.",
        "nvml_arguments",
        r"nvmlInit.*nvmlShutdown\(\)",
    ),
    Reason(
        "cuMemAlloc of 32-bit addresses is not emulated.",
        "arguments",
        "cuGetProcAddress v.: 'cuMemAlloc' at (2000|3019)",
    ),
    Reason(
        _HANDLE,
        "calls: before init, buffer.*",
        r"(cuArray3DGetDescriptor_v2|cuEvent\w+|cuMipmappedArrayGetLevel)( \d)?",
        "201",
        "3",
    ),
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
        r"cu(Launch|Mem(Alloc|Free)|Stream)\w+",
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
        "cuArrayDestroy|cuMipmappedArrayDestroy|cuThreadExchangeStreamCaptureMode",
        None,
        "3",
    ),
    Reason(_LINKER, "calls: .*", r"(cuLinkAdd\w+|cuLinkComplete)( \d)?", "signal 11", "1"),
    Reason(_LINKER, "calls: .*", r"cuLinkDestroy( \d)?", "signal 6", "1"),
)


def differences(real: dict[str, Any], emulated: dict[str, Any]) -> Iterator[Difference]:
    """Yield each question that is in both records and has different answers there."""
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
    for section, common in _common(real, emulated):
        yield from _calls(section, real[section], emulated[section], common)


def differences_without_device(
    real: dict[str, Any], newest: dict[str, Any], emulated: dict[str, Any]
) -> Iterator[Difference]:
    """Yield the questions that need a missing device, if the emulated answer is not as expected.

    ``real`` was made without a device. ``newest`` is the record of a later driver with a device, so
    it lacks these questions. In general, the answer in ``real`` is expected. The exception is a
    call after a failed cuInit, if its answers before cuInit are different in ``real`` and
    ``newest``. For this call, the answer before cuInit in ``newest`` is expected.
    """
    for section in ("arguments", "nvml_arguments"):
        for question in real[section].keys() - newest[section].keys():
            answers = real[section][question], emulated[section][question]
            if answers[0] != answers[1]:
                yield Difference(section, question, *answers)
    for section, common in _common(real, emulated):
        older, later, here = (calls.lookup(one[section]) for one in (real, newest, emulated))
        for kind in sorted(kind for kind in real[section] if kind.startswith(calls.AFTER)):
            before = kind.replace(calls.AFTER, calls.BEFORE)
            for name in sorted(common):
                if not calls.asked(name, kind, anywhere=False):
                    continue
                one = older(kind, name)
                if calls.asked(name, before) and later(before, name) != older(before, name):
                    one = later(before, name)
                if one != here(kind, name):
                    yield Difference(f"{section}: {kind}", name, one, here(kind, name))


def _common(real: dict[str, Any], emulated: dict[str, Any]) -> Iterator[tuple[str, set[str]]]:
    """Yield the two sections of calls, each with the functions that both libraries export."""
    yield "calls", functions(real) & functions(emulated)
    yield "nvml_calls", {*real["nvml_functions"]} & {*emulated["nvml_functions"]}


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
    """Yield the names and versions with unexpected answers of the emulated cuGetProcAddress.

    The real driver's answer is expected. But if the emulated driver lacks the function in this
    answer, it must return no address.
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
    for key in ("procaddr_refused_from", "procaddr_older_form_differs"):
        if real[key] != emulated[key]:
            yield Difference("procaddr", key, real[key], emulated[key])
