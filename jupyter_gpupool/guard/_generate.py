# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Generate the guard's entry points from ``entries.txt``, as assembly and as tables in C.

The build of the package imports this module by its path. So the module uses only the standard
library, and no other module of this package.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Collection, Mapping, Sequence

#: Number of spare entry points. They serve functions that ``cuGetProcAddress`` returns and that
#: ``entries.txt`` does not list.
SPARES = 256

_NAME = re.compile(r"(cu(?:[A-Z]|dbg)\w*?)(_v\d+)?(_ptds|_ptsz)?")
_KINDS = ("never", "free", "gate", "wait", "note", "back", "wrap", "peek", "launch", "same",
          "refuse")  # fmt: skip

#: The guard can note a call with at most this many arguments (``LATER_ARGUMENTS`` in
#: ``src/guard.h``).
_NOTED = 3


class EntriesError(ValueError):
    """``entries.txt`` has an invalid line."""


@dataclass(frozen=True)
class Entry:
    """One line of ``entries.txt``."""

    symbol: str
    #: The name that a program passes to cuGetProcAddress for this function: the symbol without its
    #: ending (such as ``_v2`` or ``_ptsz``).
    base: str
    #: Whether the function is the variant for per-thread default streams.
    per_thread: bool
    #: The first CUDA version for which cuGetProcAddress returns this form of the function; 0: the
    #: version is unknown.
    since: int
    kind: str
    #: The number of arguments, if the kind is ``wait``, ``note`` or ``back``. Otherwise 0.
    arguments: int = 0
    #: If the kind is ``same``: the symbol of another entry, whose C function also serves this
    #: entry.
    target: str = ""


def read(path: Path) -> list[Entry]:
    """Return the entries in the order of their indices.

    Raises
    ------
    EntriesError
        If a line cannot be understood.
    """
    found: dict[str, Entry] = {}
    for number, line in enumerate(path.read_text(encoding="ascii").splitlines(), 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        entry = _entry(words)
        if entry is None or entry.symbol in found:
            raise EntriesError(
                f"{path.name}:{number}: {line.strip()!r} is not an entry, or is a duplicate."
            )
        found[entry.symbol] = entry
    for entry in found.values():
        if entry.target and found.get(entry.target, entry).kind != "wrap":
            raise EntriesError(
                f"{entry.symbol} is the same as {entry.target}, which is not of kind wrap."
            )
    return sorted(found.values(), key=lambda e: (e.base, e.per_thread, e.since, e.symbol))


def _entry(words: Sequence[str]) -> Entry | None:
    symbol, since, kind, *rest = [*words, "", ""][: max(3, len(words))]
    match = _NAME.fullmatch(symbol)
    if match is None or kind not in _KINDS or not (since == "-" or since.isdigit()):
        return None
    counts = kind in ("wait", "note", "back")
    if len(rest) != (counts or kind == "same") or (counts and not rest[0].isdigit()):
        return None
    if kind in ("note", "back") and int(rest[0]) > _NOTED:
        return None
    return Entry(
        symbol, match[1], match[3] is not None, 0 if since == "-" else int(since), kind,
        int(rest[0]) if counts else 0, rest[0] if kind == "same" else "",
    )  # fmt: skip


def generate(entries: Sequence[Entry], wraps: Collection[str]) -> Mapping[str, str]:
    """Return the text of each generated file, by name.

    ``wraps`` lists the symbols for which a C function exists.

    Raises
    ------
    EntriesError
        If an entry has no function, or a function has no entry.
    """
    wanted = {entry.symbol for entry in entries if entry.kind in ("wrap", "peek", "launch")}
    if set(wraps) != wanted:
        raise EntriesError(
            f"without a C function: {sorted(wanted - set(wraps)) or 'none'}; "
            f"without an entry: {sorted(set(wraps) - wanted) or 'none'}"
        )
    return {"entries_gen.h": header(entries), "entries_gen.S": _assembly(entries)}


def header(entries: Sequence[Entry]) -> str:
    """Return the C header with the indices and the names of the entries."""
    # All names are in one string, and the table has offsets into this string. The table has no
    # pointers, because the loader would have to relocate each pointer. It would do so in every
    # process that inherits LD_PRELOAD.
    lines = ["/* Generated from entries.txt by _generate.py. */", "enum guard_entry {"]
    lines += [f"    E_{entry.symbol} = {i}," for i, entry in enumerate(entries)]
    lines += [f"    E_COUNT = {len(entries)},", f"    E_SPARES = {SPARES},", "};"]
    at, rows, names = 0, [], []
    for entry in entries:
        rows.append(
            f"    {{{at}, {entry.since}, {len(entry.base)}, {int(entry.per_thread)}}}, "
            f"/* {entry.symbol} */"
        )
        names.append(f'    "{entry.symbol}\\0"')
        at += len(entry.symbol) + 1
    lines += ["#ifdef ENTRIES_TABLE"]
    lines += ["static const char entry_names[] =", *names, "    ;"]
    lines += ["static const struct {"]
    lines += ["    uint32_t name;", "    uint32_t since;"]
    lines += ["    uint8_t base; /* length of the name that cuGetProcAddress knows */"]
    lines += ["    uint8_t per_thread;", "} entry_table[E_COUNT] = {", *rows, "};", "#endif"]
    return "\n".join(lines) + "\n"


def _assembly(entries: Sequence[Entry]) -> str:
    lines = ["/* Generated from entries.txt by _generate.py. */", '#include "entries.S"']
    index = {entry.symbol: i for i, entry in enumerate(entries)}
    stack = set()
    for i, entry in enumerate(entries):
        if entry.kind == "wait":
            words = max(0, entry.arguments - 6)
            stack.add(words)
            lines.append(f"ENTRY_WAIT {entry.symbol}, {i}, {words}")
        elif entry.kind in ("wrap", "same"):
            lines.append(f"ENTRY_WRAP {entry.symbol}, {i}, {entry.target or entry.symbol}")
        else:
            lines.append(f"ENTRY_{entry.kind.upper()} {entry.symbol}, {i}")
    lines += [f"ENTRY_SPARE {i}" for i in range(len(index), len(index) + SPARES)]
    lines += [f"WAIT_CORE {words}" for words in sorted(stack)]
    lines += ["    .section .rodata", "    .balign 4", "    .hidden guard_entry_at"]
    lines += ["    .globl guard_entry_at", "guard_entry_at:"]
    lines += [f"    .long .Lentry{i} - guard_entry_at" for i in range(len(index) + SPARES)]
    return "\n".join(lines) + "\n"


def nvml(path: Path) -> Mapping[str, str]:
    """Return the text of each generated file of the NVML library, by name.

    Raises
    ------
    EntriesError
        If a line of the list cannot be understood.
    """
    names: dict[str, bool] = {}
    for number, line in enumerate(path.read_text(encoding="ascii").splitlines(), 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        if not words[0].startswith("nvml") or words[1:] not in ([], ["wrap"]) or words[0] in names:
            raise EntriesError(
                f"{path.name}:{number}: {line.strip()!r} is not an entry, or is a duplicate."
            )
        names[words[0]] = len(words) > 1
    head = f"/* Generated from {path.name} by _generate.py. */"
    listed = [head, "enum {", *(f"    N_{name}," for name in names), "    N_COUNT", "};"]
    listed += ["#ifdef NVML_NAMES", "static const char *const nvml_names[N_COUNT] = {"]
    listed += [*(f'    "{name}",' for name in names), "};", "#endif"]
    code = [head, '#include "nvml/entries.S"']
    for i, (name, wrapped) in enumerate(names.items()):
        code.append(f"{'NVML_WRAP' if wrapped else 'NVML_ENTRY'} {name}, {i}")
    code += ["    .bss", "    .balign 8", "    .globl nvml_real", "nvml_real:"]
    code += [f"    .zero {8 * len(names)}"]
    return {"nvml_gen.h": "\n".join(listed) + "\n", "nvml_gen.S": "\n".join(code) + "\n"}
