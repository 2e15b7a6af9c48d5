# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Parses what people type after ``%gpu`` and ``%%gpu``. Does no I/O and does not use IPython."""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Mapping

from ..errors import Code, GPUPoolError
from ..text import did_you_mean
from ..units import parse_bytes, parse_seconds

#: Maps each subcommand to an example and an explanation. ``%gpu help`` shows both.
SUBCOMMANDS: Mapping[str, tuple[str, str]] = {
    "status": ("%gpu", "what this kernel has, asks for and waits for"),
    "details": (
        "%gpu details",
        "the same, plus its priority class, when it gets its slice, and whether the guard is on",
    ),
    "memory": (
        "%gpu 12GiB, or %gpu memory 12GiB --limit 20GiB",
        "ask for this much device memory, now and from now on",
    ),
    "devices": ("%gpu devices 2", "ask for this many devices, each with the memory above"),
    "compute": (
        "%gpu compute 50",
        "ask for this share of a device's compute time, in per cent, while others compute there",
    ),
    "priority": ("%gpu priority batch", "queue in this priority class"),
    "attach": (
        "%gpu attach",
        "wait for the slice now, and keep it until the kernel is idle too long",
    ),
    "release": ("%gpu release", "give the slice back; tensors stay, in host memory"),
    "keep": ("%gpu keep 10m", "keep the slice for this long, even when idle"),
    "why": ("%gpu why", "why this kernel waits, or who may take its slice and when"),
    "pool": ("%gpu pool", "the devices and sessions of the whole pool"),
    "help": ("%gpu help", "this list"),
}

#: Names of the options of ``memory``.
OPTIONS = ("limit", "devices", "priority", "compute")

_WITHOUT_ARGUMENTS = ("status", "details", "attach", "release", "why", "pool", "help")
_GPU_LINE = re.compile(r"^(\?{0,2}%{1,2}gpu\?{0,2}(\s|$)|%gpu\?)")
_HEADER = re.compile(r"^%%gpu(\s+[^?]*)?$")


#: The ``%%gpu`` line of the running cell. The gate has already executed this line.
current_header: ContextVar[str] = ContextVar("gpupool_current_header", default="")


class CommandError(GPUPoolError):
    """The text after ``%gpu`` is wrong; the message quotes that text and shows valid text."""

    code = Code.USAGE


@dataclass(frozen=True)
class GPUCommand:
    """A subcommand, and the fields of the message that the agent sends for it."""

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CellRequest:
    """What a ``%%gpu`` line asks for: its memory in bytes, and the ``request`` message's fields."""

    memory: int
    fields: Mapping[str, Any]


def is_gpu_only(code: str) -> bool:
    """Return whether a cell has only ``%gpu`` lines and comments; such a cell never waits."""
    seen = False
    for line in code.splitlines():
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if text.startswith("%%gpu") or not _GPU_LINE.match(text):
            return False
        seen = True
    return seen


def cell_header(code: str) -> str:
    """Return the ``%%gpu ...`` line at the beginning of a cell; "" if there is none."""
    first = code.lstrip().split("\n", 1)[0].strip()
    return first if _HEADER.match(first) else ""


def hide_header(lines: list[str]) -> list[str]:
    """Return the lines of a cell without the ``%%gpu`` line that the gate has executed.

    IPython calls this function as an input transformer. The function turns the ``%%gpu`` line into
    a comment, so that the line numbers in tracebacks stay right. If another cell magic follows, the
    function removes the line instead, because a cell magic must be the first line of its cell.
    """
    header = current_header.get()
    if not header or not lines:
        return lines
    first = next((n for n, line in enumerate(lines) if line.strip()), 0)
    if lines[first].strip() != header:
        return lines
    rest = lines[first + 1 :]
    following = next((line for line in rest if line.strip()), "")
    if following.startswith("%%"):
        return rest
    return [*lines[:first], f"# {header}\n", *rest]


def parse_cell_header(header: str, request: Mapping[str, Any]) -> CellRequest:
    """Read a ``%%gpu`` line; ``request`` is the session's present request.

    Raises
    ------
    CommandError
    """
    words = header.split()[1:]
    if words[:1] == ["memory"]:
        words = words[1:]
    if not words:
        raise CommandError(
            "%%gpu needs a size: the device memory for its cell.",
            next_step="Write for example %%gpu 16GiB.",
        )
    if words[0] in SUBCOMMANDS:
        raise CommandError(
            f"%%gpu asks for memory for one cell, and {words[0]!r} is not a size.",
            next_step=f"For the subcommand write %gpu {words[0]}, with one per cent sign.",
        )
    fields = _memory(words, request)
    return CellRequest(int(fields["memory"]), fields)


def parse_command(line: str, request: Mapping[str, Any]) -> GPUCommand:
    """Read the text after ``%gpu``; ``request`` is the session's present request.

    Raises
    ------
    CommandError
        With one sentence that quotes the text, and one with the nearest valid text.
    """
    words = line.split()
    if not words:
        return GPUCommand("status")
    name, rest = words[0], words[1:]
    if name[0] in "0123456789.-+" and not name.startswith("--"):
        return GPUCommand("memory", _memory(words, request))
    if name not in SUBCOMMANDS:
        hint = did_you_mean(name, SUBCOMMANDS, shown="%gpu {}")
        hint = hint or "Sizes are written like %gpu 12GiB."
        raise CommandError(
            f"There is no subcommand {name!r} of %gpu.", next_step=f"{hint} %gpu help lists all."
        )
    if name in _WITHOUT_ARGUMENTS:
        if rest:
            raise CommandError(
                f"%gpu {name} takes no argument, and {' '.join(rest)!r} was given.",
                next_step=f"Write %gpu {name}.",
            )
        return GPUCommand(name)
    if not rest:
        raise CommandError(
            f"%gpu {name} needs a value.", next_step=f"Write {SUBCOMMANDS[name][0]}."
        )
    if name == "memory":
        return GPUCommand(name, _memory(rest, request))
    if name == "keep":
        try:
            return GPUCommand(name, {"seconds": parse_seconds(" ".join(rest))})
        except ValueError as error:
            raise CommandError(str(error), next_step="Write for example %gpu keep 10m.") from None
    if len(rest) > 1:
        raise CommandError(
            f"%gpu {name} takes one value, and {' '.join(rest)!r} was given.",
            next_step=f"Write {SUBCOMMANDS[name][0]}.",
        )
    return GPUCommand(name, {name: _option(name, rest[0], f"Write {SUBCOMMANDS[name][0]}.")})


def _memory(words: list[str], request: Mapping[str, Any]) -> dict[str, Any]:
    sizes: list[str] = []
    options: dict[str, str] = {}
    words = [part for word in words for part in _split_option(word)]
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            sizes.append(word)
            continue
        name = word[2:]
        if name not in OPTIONS:
            known = " ".join(f"--{option}" for option in OPTIONS)
            hint = did_you_mean(name, OPTIONS, shown="--{}") or f"There are {known}."
            raise CommandError(f"There is no option {word!r} of %gpu.", next_step=hint)
        if not words or words[0].startswith("--"):
            raise CommandError(f"The option {word} needs a value.", next_step=_example(name))
        value = words.pop(0)
        if name == "limit" and words and words[0].isalpha():
            value += words.pop(0)  # the value may have two words, as in "20 GiB"
        options[name] = value
    fields: dict[str, Any] = {"memory": _bytes(" ".join(sizes))}
    for name, text in options.items():
        fields[name] = _option(name, text)
    if "limit" not in fields:
        old_memory, old_limit = request.get("memory"), request.get("limit")
        if isinstance(old_limit, int) and old_limit != old_memory:
            # Keep the limit that the user has set.
            fields["limit"] = max(old_limit, fields["memory"])
        else:
            fields["limit"] = fields["memory"]
    elif fields["limit"] < fields["memory"]:
        raise CommandError(
            f"The limit {options['limit']} is below the guaranteed memory {' '.join(sizes)}.",
            next_step=f"Write a limit of at least {' '.join(sizes)}, or leave --limit out.",
        )
    return fields


def _split_option(word: str) -> list[str]:
    if word.startswith("--") and "=" in word:
        name, value = word.split("=", 1)
        return [name, value]
    return [word]


def _option(name: str, text: str, example: str = "") -> Any:
    if name == "limit":
        return _bytes(text)
    if name == "priority":
        return text
    try:
        value = int(text.removesuffix("%") if name == "compute" else text)
    except ValueError:
        value = 0
    top = 100 if name == "compute" else 1024
    if not 1 <= value <= top:
        what = "a share from 1 to 100" if name == "compute" else "a whole number above zero"
        raise CommandError(
            f"{name} must be {what}, not {text!r}.", next_step=example or _example(name)
        )
    return value


#: Matches a number without a unit. Such a number means GiB. A number with three digits after its
#: comma does not match, because the comma may separate thousands.
_GIB = re.compile(r"^\s*([0-9]+(?:\.[0-9]*|,[0-9]{0,2})?|\.[0-9]+)\s*$")
_COMMA = re.compile(r"^\s*[0-9]+,[0-9]{0,2}(?![0-9])")


def _bytes(text: str) -> int:
    """Read a size as JupyterLab's popover does (``parseSize``).

    ``12`` means 12 GiB, and ``1,5`` means 1.5 GiB.
    """
    read = text.replace(",", ".", 1) if _COMMA.match(text) else text
    if _GIB.match(text):
        read = read.strip().rstrip(".") + "GiB"
    try:
        return parse_bytes(read)
    except ValueError as error:
        raise CommandError(str(error).replace(repr(read), repr(text))) from None


def _example(name: str) -> str:
    values = {"limit": "20GiB", "devices": "2", "priority": "batch", "compute": "50"}
    return f"Write for example --{name} {values[name]}."
