# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Sizes and messages that all settings of this package use."""

from __future__ import annotations

import difflib
import re
from typing import Iterable

_UNITS = {
    **{f"{letter}iB": 1 << (10 * n) for n, letter in enumerate("KMGT", 1)},
    **{f"{letter}B": 1000**n for n, letter in enumerate("kMGT", 1)},
    **{letter: 1 << (10 * n) for n, letter in enumerate("KMGT", 1)},
    "B": 1,
    "": 1,
}
_SIZE = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,9}))?([A-Za-z]*)", re.ASCII)


class EmulatorError(ValueError):
    """Raised if the emulated driver cannot do what the caller asks.

    The message names what the emulated driver can do.
    """


def parse_size(text: str, *, rate: bool = False) -> int | None:
    """Return the bytes of a size such as "1.5GiB"; None if ``text`` is not a size.

    A size is a decimal number and a unit. KiB MiB GiB TiB (or K M G T) are powers of 1024, and kB
    MB GB TB are powers of 1000. With ``rate``, ``/s`` may follow. ``src/spec.c`` accepts the same
    texts.
    """
    match = _SIZE.fullmatch(text.removesuffix("/s") if rate else text)
    if match is None or match[3] not in _UNITS:
        return None
    unit, fraction = _UNITS[match[3]], match[2] or ""
    value = int(match[1]) * unit
    if fraction:
        value += int(fraction) * unit // 10 ** len(fraction)
    return value if value <= (1 << 63) - 1 else None


def format_size(value: int) -> str:
    """Return ``value`` as a size such as ``"64MiB"``; :func:`parse_size` gives back ``value``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if value and value % _UNITS[unit] == 0:
            return f"{value // _UNITS[unit]}{unit}"
    return f"{value}B"


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return a "Did you mean" question with the known name that is most like ``wrong``."""
    return f"Did you mean {difflib.get_close_matches(wrong, list(known), 1, 0)[0]!r}?"
