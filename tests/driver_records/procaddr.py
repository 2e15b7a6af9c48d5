# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The function that cuGetProcAddress returns for each name and version."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

from .outs import UNTOUCHED, said

#: API versions (1000 x major + 10 x minor) for cuGetProcAddress, beyond the newest CUDA.
VERSIONS = range(1000, 15000, 10)

#: CUdriverProcAddress_flags.
DEFAULT, LEGACY, PER_THREAD = FLAGS = range(3)

#: The answer for a function that exists only in later versions.
MISSING = "0/2"

#: The result, address and status of a driver that refuses the version and writes nothing.
_REFUSED = (1, UNTOUCHED, UNTOUCHED)


def refused_from(path: str) -> int | None:
    """Return the first of VERSIONS that cuGetProcAddress_v2 refuses; None if it accepts all."""
    call = ctypes.CDLL(path).cuGetProcAddress_v2
    out, status = ctypes.c_void_p(), ctypes.c_int()
    for version in VERSIONS:
        out.value, status.value = UNTOUCHED, UNTOUCHED
        result = call(
            b"cuInit", ctypes.byref(out), version, ctypes.c_uint64(), ctypes.byref(status)
        )
        if (result, out.value, status.value) == _REFUSED:
            return version
    return None


def forms(
    path: str, functions: list[str], names: list[str], flags: int, refused: int | None
) -> dict[str, str]:
    """Return, by name, what cuGetProcAddress_v2 returns with ``flags``, and from which version on.

    For example, ``"2000:~ 3020:~_v2"`` means three things. Before version 2000, the driver returns
    no address, CUDA_SUCCESS and status 2 ("a later version has it"). From 2000 on, it returns the
    exported function of this name. From 3020 on, it returns the function with _v2 in its name.
    Another answer has the form RESULT/STATUS. An address that belongs to no exported function has
    the form "not-exported". The result leaves out names that are unknown at every version. The
    result does not show that the driver refuses all versions from ``refused`` on.
    """
    library = ctypes.CDLL(path)
    call = library.cuGetProcAddress_v2
    at = {ctypes.cast(getattr(library, name), ctypes.c_void_p).value: name for name in functions}
    out, status, flags_ = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_uint64(flags)
    out_, status_ = ctypes.byref(out), ctypes.byref(status)
    table = {}
    for name in names:
        text, last, changes = name.encode(), (0, None, 2), []
        for version in VERSIONS:
            if version == refused:
                last = _REFUSED
            out.value, status.value = UNTOUCHED, UNTOUCHED
            answer = (call(text, out_, version, flags_, status_), out.value, status.value)
            if answer != last:
                changes.append(f"{version}:{_form(answer, name, at)}")
                last = answer
        if changes != [f"{VERSIONS[0]}:0/1"]:
            table[name] = " ".join(changes)
    return table


def _form(answer: tuple[int, int | None, int], name: str, at: dict[Any, str]) -> str:
    result, address, status = answer
    if not address:
        return f"{result}/{status}"
    function = at.get(address, "not-exported")
    shown = "~" + function.removeprefix(name) if function.startswith(name) else function
    return shown if (result, status) == (0, 0) else f"{shown}({result}/{status})"


def steps(text: str, name: str) -> list[tuple[int, str]]:
    """Return an entry of :func:`forms` as pairs of a version and its function or RESULT/STATUS."""
    changes = [change.partition(":") for change in text.split()]
    return [(int(since), what.replace("~", name)) for since, _, what in changes]


def forms_at(text: str, name: str, version: int) -> str:
    """Return the function or RESULT/STATUS that an entry of :func:`forms` has for one version."""
    return next((form for since, form in reversed(steps(text, name)) if since <= version), MISSING)


def get(library: Any, name: Any, version: int, flags: int = 0, form: str = "v2") -> list[Any]:
    """Return [result, name of the address, status] of one call; see ``outs.said``."""
    out, status = ctypes.c_void_p(UNTOUCHED), ctypes.c_int(UNTOUCHED)
    front = (name, ctypes.byref(out), ctypes.c_int(version), ctypes.c_uint64(flags))
    if form == "v1":
        return [library.cuGetProcAddress(*front), said(out)]
    if form == "v2, no status":
        return [library.cuGetProcAddress_v2(*front, None), said(out)]
    return [library.cuGetProcAddress_v2(*front, ctypes.byref(status)), said(out), said(status)]


def older_form(path: str, names: list[str]) -> list[str]:
    """Return the questions to which the older form of cuGetProcAddress gives another address.

    The older form has four arguments. If the newer form returns no address, the older form must
    return 500 and write no address.
    """
    library = ctypes.CDLL(path)
    out, found = ctypes.c_void_p(), []
    for name in (name.encode() for name in names):
        for flags in map(ctypes.c_uint64, (DEFAULT, PER_THREAD)):
            for version in range(VERSIONS.start, VERSIONS.stop, 50):
                out.value = UNTOUCHED
                newer = library.cuGetProcAddress_v2(name, ctypes.byref(out), version, flags, None)
                expected = (newer, out.value) if out.value else (500, UNTOUCHED)
                out.value = UNTOUCHED
                older = library.cuGetProcAddress(name, ctypes.byref(out), version, flags)
                if (older, out.value) != expected:
                    found.append(f"{name.decode()} {version} {flags.value}")
    return found


def together(tables: list[dict[str, str]]) -> dict[str, str | list[str]]:
    """Merge the tables for the flags 0, 1 and 2. If a name has equal texts, keep only one text.

    A name with two texts has one text for calls without per-thread streams, and one for calls with
    them. A name with three texts has one text for each flag.
    """
    found: dict[str, str | list[str]] = {}
    for name in sorted(set().union(*tables)):
        default, legacy, per_thread = (table.get(name, "") for table in tables)
        if default != legacy:
            found[name] = [default, legacy, per_thread]
        else:
            found[name] = default if default == per_thread else [default, per_thread]
    return found


def entry(table: dict[str, Any], name: str, flags: int) -> str:
    """Return the text for a name and flags, from a table that :func:`together` made."""
    texts = table[name]
    if isinstance(texts, str):
        return texts
    return str(texts[flags] if len(texts) == 3 else texts[flags == PER_THREAD])


def given(tables: Iterable[dict[str, str]]) -> set[str]:
    """Return all functions that tables of :func:`forms` name."""
    found = (
        form for table in tables for name, text in table.items() for _, form in steps(text, name)
    )
    return {form for form in found if "/" not in form}
