# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Calls every function of a library, and groups the functions by their results.

The arguments of a call are all zero, or all the address of a zeroed buffer, or this address and one
zero.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .child import ask

#: The kinds of calls, and the key for all functions that a table does not name.
BEFORE, AFTER, OTHERS = "before init", "after a failed init", "all others"
BUT_ONE = "buffer but for one"

#: With ``--anywhere``, the recorder does not call these functions: on a machine with a device they
#: may succeed.
INITIALISING = ("cuInit", "nvmlInit", "nvmlInit_v2", "nvmlInitWithFlags")

#: In turn, the recorder sets each of the first six arguments of a function to zero.
ARGUMENTS = 6

#: Address and size of the zeroed buffer to which every argument points. Some functions use the
#: lower half of the address as a count or as flags, so the address must be the same in each record.
_BUFFER, _SIZE = 0x10_1234_5670, 1 << 16

#: MAP_FIXED_NOREPLACE of mmap(2): map at exactly this address, and fail if it is in use.
_MAP_FIXED_NOREPLACE = 0x100000


def zeroed() -> int:
    """Make the zeroed buffer in this process, and return its address."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    start = _BUFFER - _BUFFER % mmap.PAGESIZE
    access = mmap.PROT_READ | mmap.PROT_WRITE
    how = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
    length = ctypes.c_size_t(_BUFFER - start + _SIZE)
    at = libc.mmap(ctypes.c_void_p(start), length, access, how, -1, ctypes.c_long(0))
    if at != start:
        raise OSError(ctypes.get_errno(), f"no memory at {start:#x}")
    return _BUFFER


def call(path: str, first: str, name: str, how: str) -> int:
    """Call one function, and return its result.

    With ``how`` "zero", all arguments are zero. Otherwise all arguments are the address of the
    zeroed buffer. If ``first`` is not empty, call the function ``first`` before this function.
    """
    library = ctypes.CDLL(path)
    if first:
        getattr(library, first)(0)
    value = 0 if how == "zero" else zeroed()
    return int(getattr(library, name)(*[ctypes.c_uint64(value)] * 16))


def but_for_one(path: str, name: str, which: Iterable[int]) -> list[int]:
    """Call a function once for each argument number in ``which``, and return the results.

    In each call, the argument with this number is zero. All other arguments are the address of the
    zeroed buffer.
    """
    function, buffer, results = getattr(ctypes.CDLL(path), name), zeroed(), []
    for zero in which:
        ctypes.memset(buffer, 0, _SIZE)
        values = [buffer] * 16
        values[zero] = 0
        results.append(int(function(*map(ctypes.c_uint64, values))))
    return results


def _each_but_one(path: str, name: str, usual: str) -> Iterator[tuple[str, str]]:
    """Yield the results that differ from ``usual`` if one argument of the function is zero.

    Each result comes with the text "NAME NUMBER": the function, and the argument that is zero.
    """
    results = ask(but_for_one, path, name, range(ARGUMENTS))
    if isinstance(results, str):  # a call ended the child, so use a child for each call
        each = [ask(but_for_one, path, name, [zero]) for zero in range(ARGUMENTS)]
        results = [said if isinstance(said, str) else said[0] for said in each]
    for number, result in enumerate(map(str, results), 1):
        if result != usual:
            yield result, f"{name} {number}"


def asked(name: str, kind: str, *, anywhere: bool = True) -> bool:
    """Return whether the recorder calls a function.

    With ``anywhere``, a call must not initialise the driver. The recorder must not pass the address
    of the buffer to a checkpoint function, because the function would use the address as a process
    id. The recorder never calls a debugger's functions, because they would wait for a debugger or
    end the process. It does not call nvmlErrorString either, because its result is not a number.
    """
    if name.startswith("cudbg") or name == "nvmlErrorString":
        return False
    return not (anywhere and name in INITIALISING) and (
        "buffer" not in kind or not name.startswith("cuCheckpointProcess")
    )


def calls(path: str, names: list[str], first: str) -> dict[str, dict[str, Any]]:
    """Return the functions by kind of call and by result.

    ``first`` is the function that initialises the library. If ``first`` is empty, all calls are
    before initialisation. The groups for calls after a failed ``first`` have only the functions
    whose answers differ from the answers before initialisation.
    """
    table: dict[str, dict[str, Any]] = {}
    for how in ("zero", "buffer"):
        before = {
            name: str(ask(call, path, "", name, how))
            for name in names
            if asked(name, how, anywhere=not first)
        }
        results = list(before.values())
        common = max(set(results), key=results.count)
        table[f"{BEFORE}, {how}"] = {common: OTHERS} | _grouped(
            {name: result for name, result in before.items() if result != common}
        )
        if how == "buffer":
            table[f"{BEFORE}, {BUT_ONE}"] = _grouped(
                {which: result for name in before
                 for result, which in _each_but_one(path, name, before[name])}
            )  # fmt: skip
        if first:
            after = {name: str(ask(call, path, first, name, how)) for name in before}
            table[f"{AFTER}, {how}"] = _grouped(
                {name: result for name, result in after.items() if result != before[name]}
            )
    return table


def _grouped(results: dict[str, str]) -> dict[str, Any]:
    return {
        result: [name for name in results if results[name] == result]
        for result in sorted(set(results.values()))
    }


def lookup(table: dict[str, dict[str, Any]]) -> Callable[[str, str], str]:
    """Return a function that finds a result in a table of :func:`calls`.

    The returned function takes a kind of call and a question, "NAME" or "NAME NUMBER".
    """
    named = {
        kind: {name: result for result, names in group.items() if names != OTHERS for name in names}
        for kind, group in table.items()
    }
    others = {
        kind: next((result for result, names in group.items() if names == OTHERS), "")
        for kind, group in table.items()
    }

    def result(kind: str, question: str) -> str:
        if question in named[kind]:
            return named[kind][question]
        if kind.startswith(AFTER):
            return result(kind.replace(AFTER, BEFORE), question)
        if kind.endswith(BUT_ONE):
            return result(kind.replace(BUT_ONE, "buffer"), question.partition(" ")[0])
        return others[kind]

    return result
