# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The function that cuGetProcAddress returns for each name and version."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

from .outs import UNTOUCHED, said

#: The API versions with which a record calls cuGetProcAddress: 1000 x major + 10 x minor. The
#: range ends with a version that is newer than any CUDA.
VERSIONS = range(1000, 15000, 10)

#: CUdriverProcAddress_flags.
DEFAULT, LEGACY, PER_THREAD = FLAGS = range(3)

#: The answer for a function that exists only in later versions.
MISSING = "0/2"

#: Result, address and status of a call with a refused version. The call writes no out parameter.
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
    """Return, for each name, the answers that cuGetProcAddress_v2 gives with ``flags``.

    The text for a name lists each new answer after the first version that gets this answer. For
    example, ``"2000:~ 3020:~_v2"`` means three things. Before version 2000, the driver returns
    no address, CUDA_SUCCESS and status 2 ("a later version has it"). From 2000 on, it returns the
    exported function of this name. From 3020 on, it returns the function with _v2 in its name.
    Another answer has the form RESULT/STATUS. An address that belongs to no exported function has
    the form "not-exported". The result leaves out names that are unknown at every version. The
    driver refuses all versions from ``refused`` on; the texts do not list this.
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
    """Call one form of cuGetProcAddress; return [result, address, status].

    :func:`~.outs.said` makes the address and the status readable. Only the form "v2" has a status.
    """
    out, status = ctypes.c_void_p(UNTOUCHED), ctypes.c_int(UNTOUCHED)
    front = (name, ctypes.byref(out), ctypes.c_int(version), ctypes.c_uint64(flags))
    if form == "v1":
        return [library.cuGetProcAddress(*front), said(out)]
    if form == "v2, no status":
        return [library.cuGetProcAddress_v2(*front, None), said(out)]
    return [library.cuGetProcAddress_v2(*front, ctypes.byref(status)), said(out), said(status)]


def older_form(path: str, names: list[str]) -> list[str]:
    """Return each "NAME VERSION FLAGS" for which cuGetProcAddress does not answer as expected.

    cuGetProcAddress is the older form and has four arguments. Where cuGetProcAddress_v2 writes a
    null address, the older form must return 500 and write no address. Otherwise the older form must
    return the same result and write the same address, or none if cuGetProcAddress_v2 writes none.
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
    """Merge the tables for the flags 0, 1 and 2 into one table.

    A name keeps one text if its three texts are equal. It keeps two texts if only the last text,
    for per-thread streams, differs. Otherwise it keeps all three, in the order of the flags.
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
    """Return all functions that appear as answers in these tables of :func:`forms`."""
    found = (
        form for table in tables for name, text in table.items() for _, form in steps(text, name)
    )
    return {form for form in found if "/" not in form}
