# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Makes the whole file of texts from its parts."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

from jupyter_gpupool.errors import Code

from . import cell, commands, pool, requests, shares, source
from .sheet import Sheet
from .source import Sentence

FILE = Path(__file__).with_name("all.txt")

HEAD = """\
The texts that jupyter_gpupool shows to users

`python -m tests.texts` writes this file: do not edit it, change the text in the code. Below each
situation is the text that a user then reads. Brackets have the error code or the rule of a wait.
"""

_AREAS = {
    "broker": "The broker: refusals, its log",
    "cli": "The command line",
    "config": "The configuration",
    "devices": "The devices and the driver",
    "emucuda": "The emulated driver",
    "guard": "The guard",
    "kernel": "The kernel",
    "pool": "The pool",
    "programs": "Programs in the pool",
    "server": "The server extension",
}

#: The values in a text split it into pieces. A piece of this many characters, or of fewer, is too
#: short to identify the text.
_SHORT = 12

#: A value in a text has at most this many characters.
_VALUE = 200


def everything() -> str:
    """Return the whole text of the file."""
    shown = Sheet()
    rules = scenes(shown)
    assert rules, "no rule was met"
    text = shown.text()
    rest = Sheet()
    remaining(rest, text)
    return f"{HEAD}\n{text}\n{rest.text()}"


def scenes(sheet: Sheet) -> set[str]:
    """Write the texts that the product's functions return in plausible situations.

    Some of these texts are reasons of a wait. Return the rules of these reasons.
    """
    sheet.heading("A cell that waits")
    cell.waiting(sheet)
    sheet.heading(
        "Why a kernel waits",
        "Shown in the waiting cell, in %gpu, in JupyterLab and in `jupyter gpupool status`.",
    )
    rules = pool.waits(sheet) | shares.waits(sheet)
    sheet.heading("What a kernel of another user waits for", "Shown in the panel, without numbers.")
    pool.waits_of_others(sheet)
    sheet.heading(
        "Why an idle kernel keeps its slice",
        "Shown in %gpu, in JupyterLab and in `jupyter gpupool status`.",
    )
    pool.stays(sheet)
    sheet.heading("Refusals", "The pool refuses these when a kernel starts or asks.")
    pool.refusals(sheet)
    shares.refusals(sheet)
    sheet.heading(
        "Why, in full", "`Pool.why`: a sentence per line, the most important first, for its owner."
    )
    shares.why(sheet)
    sheet.heading("A kernel that cannot be suspended while others wait")
    shares.warnings(sheet)
    sheet.heading("What the pool answers", "To %gpu and to JupyterLab.")
    pool.answers(sheet)
    sheet.heading("The line under an error in a cell")
    cell.errors(sheet)
    cell.visible(sheet)
    sheet.heading("%gpu")
    cell.magic(sheet)
    sheet.heading("Sizes and durations")
    commands.sizes(sheet)
    sheet.heading("jupyter gpupool")
    commands.commands(sheet)
    commands.status(sheet)
    commands.programs(sheet)
    commands.doctor(sheet)
    commands.check_config(sheet)
    sheet.heading("A wrong configuration")
    commands.configuration(sheet)
    sheet.heading("A wrong kernelspec", "Its kernels do not start.")
    requests.kernelspecs(sheet)
    sheet.heading("A wrong request over REST")
    requests.rest(sheet)
    sheet.heading("The broker's socket")
    requests.socket(sheet)
    return rules


def remaining(sheet: Sheet, shown: str) -> None:
    """Write every sentence of the source that is not in ``shown``."""
    sheet.heading("JupyterLab", "Every text of the extension for translation.")
    _by_module(sheet, source.typescript_sentences())
    sheet.heading("The guard and the emulated driver, on the standard error of a program")
    _by_module(sheet, source.c_sentences())
    flat = " ".join(shown.split())
    left = [s for s in source.python_sentences() if not _is_shown(s, shown, flat)]
    left.sort(key=lambda s: _area(s.place))
    sheet.heading("The meaning of error codes", "docs/errors.md has them for programs.")
    sheet.list([f"{code}: {code.about}" for code in Code])
    for area, group in groupby(left, key=lambda s: _area(s.place)):
        sheet.heading(f"More sentences: {area}", "A name in angle brackets stands for a value.")
        _by_module(sheet, list(group))


def _is_shown(sentence: Sentence, shown: str, flat: str) -> bool:
    if sentence.code and f"[{sentence.code}]" not in shown:
        return False
    alone = sentence.text.startswith("<") and sentence.text.endswith(">")
    return (alone and bool(sentence.code)) or is_in(sentence.text, flat)


def _area(place: str) -> str:
    folder = place.split("/", maxsplit=1)[0]
    return _AREAS.get(folder, "Start of brokers and kernels")


def _by_module(sheet: Sheet, sentences: list[Sentence]) -> None:
    for place, group in groupby(sentences, key=lambda s: s.place):
        sheet.sub(place)
        lines = [" ".join(s.text.split()) + (f"  [{s.code}]" if s.code else "") for s in group]
        sheet.list(list(dict.fromkeys(lines)))


def is_in(template: str, flat: str) -> bool:
    """Return whether ``flat`` has a text that fits the template.

    The function treats capital and small letters as the same.
    """
    flat, template = flat.casefold(), template.casefold()
    pieces = re.split(r"<[^<>]*>|%[-.0-9]*[a-z]", " ".join(template.split()).strip("."))
    while not pieces[0] and len(pieces) > 1:
        pieces = pieces[1:]
    if all(len(piece) <= _SHORT for piece in pieces) or any(p not in flat for p in pieces):
        return False
    at = flat.find(pieces[0])
    while at >= 0:
        end: int = at + len(pieces[0])
        for piece in pieces[1:]:
            found = flat.find(piece, end, end + _VALUE + len(piece))
            if found < 0:
                break
            end = found + len(piece)
        else:
            return True
        at = flat.find(pieces[0], at + 1) if pieces[0] else -1
    return False
