# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Ask a driver's libraries all that they answer without a device, and write it down.

``python -m tests.emulator.nodevice FOLDER > record.json`` asks the ``libcuda.so.1`` and
``libnvidia-ml.so.1`` of a folder on a machine without an NVIDIA GPU; NVIDIA's own load and answer
there, too. With ``--anywhere`` only what does not depend on whether there is a device is asked:
then the machine may have one, and no question initialises the driver. Without a folder it is the
libraries that the dynamic loader finds.

Nothing is loaded in this process. Every question is put in a child of its own, which loads the
library, asks and ends: a crash is an answer ("signal 11"), a hang is an error.

The record is a dict that JSON can hold:

``driver``, ``cuda``
    Version of the libraries, from the file's name (None: the name has none), and what
    cuDriverGetVersion says before cuInit.
``device``
    False: recorded where cuInit finds none. None: with ``--anywhere``.
``cuda_errors``
    Code: [name, text], each None where there is none; every code of ``CODES`` that is not listed
    has the answer ``"others"``.
``procaddr``
    Name: what cuGetProcAddress_v2 gives for it, from which version on. See :func:`forms`.
``procaddr_older_form_differs``
    Questions to cuGetProcAddress, of four arguments, with another answer than that of the newer.
``never_given``
    Exported functions that cuGetProcAddress never gives.
``arguments``
    Single questions (their text names them) and answers.
``calls``, ``nvml_calls``
    Kind ("before init" or "after a failed init"; all arguments "zero", or all the address of a
    zeroed "buffer"): result: the functions with that result, or "all others". After a failed init
    those are named that then answer otherwise than before. "Buffer but for one" names functions
    and the number (from 1) of the argument that makes a difference if it is zero.
``nvml_functions``, ``nvml_errors``, ``nvml_arguments``
    The same for NVML.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import os
import re
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

CUDA, NVML = "libcuda.so.1", "libnvidia-ml.so.1"

#: NVIDIA's cuInit and nvmlInit make it if they are root's, also where the kernel has no driver.
CONTROL = Path("/dev/nvidiactl")

#: Seconds for an answer. cuInit looks for devices, which takes a tenth of one.
BOUND = 60.0

#: Error codes that are asked for.
CODES = range(1001)

#: API versions (1000 x major + 10 x minor) that cuGetProcAddress is asked for.
VERSIONS = range(1000, 13051, 10)

#: CUdriverProcAddress_flags.
DEFAULT, LEGACY, PER_THREAD = 0, 1, 2

#: Kinds of calls, and the functions that a table does not name.
BEFORE, AFTER, OTHERS = "before init", "after a failed init", "all others"
BUT_ONE = "buffer but for one"

#: What is not called with ``--anywhere``: there it may succeed.
INITIALISING = ("cuInit", "nvmlInit", "nvmlInit_v2", "nvmlInitWithFlags")

#: So many arguments of a function are made zero, one at a time.
ARGUMENTS = 6

#: What an out parameter holds before a question, to see whether it is written.
UNTOUCHED = 77

#: Bytes of the zeroed buffer that stands for every pointer.
_BUFFER = 1 << 16


class Hung(Exception):
    """A question had no answer within the bound; the text is the question."""


def ask(question: Callable[..., Any], *arguments: Any, bound: float = BOUND) -> Any:
    """Return what ``question(*arguments)`` returns in a child; "signal N" or "exit N" if it dies.

    Raises
    ------
    Hung
        If the child has not answered and ended within ``bound`` seconds.
    RuntimeError
        If the question raises there.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        _answer(writing, question, arguments)
    os.close(writing)
    deadline, text = time.monotonic() + bound, b""
    try:
        while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
            piece = os.read(reading, 1 << 16)
            if not piece:
                break
            text += piece
        else:
            os.kill(pid, signal.SIGKILL)
            raise Hung(f"{question.__name__}{arguments}"[:200])
    finally:
        os.close(reading)
        status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    if os.WEXITSTATUS(status) or not text:
        return f"exit {os.WEXITSTATUS(status)}"
    said = json.loads(text)
    if "raised" in said:
        raise RuntimeError(said["raised"])
    return said["answer"]


def _answer(out: int, question: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Be the child: answer and end. What the library or a dying glibc prints is no answer."""
    try:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        try:
            said = {"answer": question(*arguments)}
        except Exception as error:
            said = {"raised": f"{question.__name__}{arguments}: {error!r}"}
        text = json.dumps(said).encode()
        while text:
            text = text[os.write(out, text) :]
        os._exit(0)
    finally:
        os._exit(99)


# ---------------------------------------------------------------------- what a library exports


def names_in(path: str, prefix: str) -> list[str]:
    """Return whatever in the file looks like a function's name."""
    found = re.findall(rb"(?=(" + prefix.encode() + rb"[A-Z]\w{2,})\0)", Path(path).read_bytes())
    return sorted({name.decode() for name in found})


def exported(path: str, names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that the library exports."""
    library = ctypes.CDLL(path)
    return [name for name in names if hasattr(library, name)]


def base(name: str) -> str:
    """Return the name under which cuGetProcAddress knows an exported function."""
    return re.sub(r"(_v\d+)?(_ptds|_ptsz)?$", "", name)


# ---------------------------------------------------------------------- cuGetProcAddress


def forms(path: str, functions: list[str], names: list[str], flags: int) -> dict[str, str]:
    """Return, by name, what cuGetProcAddress_v2 gives with ``flags`` from which version on.

    ``"2000:~ 3020:~_v2"`` is: the exported function of that very name from version 2000 on, that
    with _v2 from 3020 on, and before 2000 no address, CUDA_SUCCESS and status 2 ("a later version
    has it"). Another answer is written as RESULT/STATUS, and an address that is none of the
    exported ones as "not exported". Names that are unknown at every version are left out.
    """
    library = ctypes.CDLL(path)
    get = library.cuGetProcAddress_v2
    at = {ctypes.cast(getattr(library, name), ctypes.c_void_p).value: name for name in functions}
    out, status, flags_ = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_uint64(flags)
    out_, status_ = ctypes.byref(out), ctypes.byref(status)
    table = {}
    for name in names:
        text, last, changes = name.encode(), (0, None, 2), []
        for version in VERSIONS:
            out.value, status.value = UNTOUCHED, UNTOUCHED
            answer = (get(text, out_, version, flags_, status_), out.value, status.value)
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


def forms_at(text: str, name: str, version: int) -> str:
    """Return what an entry of :func:`forms` says of a version: a function, or RESULT/STATUS."""
    answer = "0/2"
    for change in text.split():
        since, _, what = change.partition(":")
        if int(since) > version:
            break
        answer = what
    return answer.replace("~", name)


def _get(library: Any, name: Any, version: int, flags: int = 0, form: str = "v2") -> list[Any]:
    """Return [result, what the address is, status] of one question; see :func:`_said`."""
    out, status = ctypes.c_void_p(UNTOUCHED), ctypes.c_int(UNTOUCHED)
    front = (name, ctypes.byref(out), ctypes.c_int(version), ctypes.c_uint64(flags))
    if form == "v1":
        return [library.cuGetProcAddress(*front), _said(out)]
    if form == "v2, no status":
        return [library.cuGetProcAddress_v2(*front, None), _said(out)]
    return [library.cuGetProcAddress_v2(*front, ctypes.byref(status)), _said(out), _said(status)]


def _said(out: Any) -> Any:
    """Return what an out parameter holds, an address as just that."""
    if out.value == UNTOUCHED:
        return "untouched"
    if isinstance(out, ctypes.c_void_p):
        return "address" if out.value else "NULL"
    if isinstance(out, ctypes.c_char_p):
        return None if out.value is None else out.value.decode()
    return out.value


def older_form(path: str, names: list[str]) -> list[str]:
    """Return the questions to which the form of four arguments gives another address.

    Where the newer form gives none, the older one has to answer 500 and leave the address alone.
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


# ---------------------------------------------------------------------- errors


def cuda_errors(path: str, codes: Iterable[int]) -> dict[str, list[Any]]:
    """Return code: [name, text]."""
    library = ctypes.CDLL(path)
    table = {}
    for code in codes:
        said = []
        for call in (library.cuGetErrorName, library.cuGetErrorString):
            text = ctypes.c_char_p()
            result = call(code, ctypes.byref(text))
            said.append(_said(text) if result == 0 or text.value else result)
        table[str(code)] = said
    return table


def nvml_errors(path: str, codes: Iterable[int]) -> dict[str, str]:
    """Return code: text."""
    library = ctypes.CDLL(path)
    library.nvmlErrorString.restype = ctypes.c_char_p
    return {str(code): library.nvmlErrorString(code).decode() for code in codes}


def _grouped_errors(table: dict[str, Any]) -> dict[str, Any]:
    """Leave out all codes whose answer is the commonest one, which is kept as "others"."""
    answers = [json.dumps(answer) for answer in table.values()]
    common = json.loads(max(set(answers), key=answers.count))
    return {"others": common} | {c: answer for c, answer in table.items() if answer != common}


# ---------------------------------------------------------------------- every function, once


def call(path: str, first: str, name: str, how: str) -> int:
    """Return the result of one function, with all arguments zero or all a zeroed buffer.

    ``first`` is called before, unless it is empty.
    """
    library = ctypes.CDLL(path)
    if first:
        getattr(library, first)(0)
    buffer = ctypes.create_string_buffer(_BUFFER)
    value = 0 if how == "zero" else ctypes.addressof(buffer)
    return int(getattr(library, name)(*[ctypes.c_uint64(value)] * 16))


def but_for_one(path: str, name: str, which: Iterable[int]) -> list[int]:
    """Return the results of a function with all arguments a zeroed buffer, but one of them zero."""
    function, results = getattr(ctypes.CDLL(path), name), []
    for zero in which:
        buffer = ctypes.create_string_buffer(_BUFFER)
        values = [ctypes.c_uint64(ctypes.addressof(buffer)) for _ in range(16)]
        values[zero] = ctypes.c_uint64(0)
        results.append(int(function(*values)))
    return results


def _each_but_one(path: str, name: str, usual: str) -> Iterator[tuple[str, str]]:
    """Yield a result and "NAME NUMBER OF THE ARGUMENT" where that makes a difference."""
    results = ask(but_for_one, path, name, range(ARGUMENTS))
    if isinstance(results, str):  # one of them is its end: each on its own
        each = [ask(but_for_one, path, name, [zero]) for zero in range(ARGUMENTS)]
        results = [said if isinstance(said, str) else said[0] for said in each]
    for number, result in enumerate(map(str, results), 1):
        if result != usual:
            yield result, f"{name} {number}"


def asked(name: str, kind: str, *, anywhere: bool = True) -> bool:
    """Return whether a function is called: nothing is initialised, no number is a process."""
    return not (anywhere and name in INITIALISING) and (
        "buffer" not in kind or not name.startswith("cuCheckpointProcess")
    )


def calls(path: str, names: list[str], first: str) -> dict[str, dict[str, Any]]:
    """Return, by kind of call and by result, the functions that answer so.

    ``first`` is what initialises; empty, there is only what is asked before it. What the others
    answer after it has failed is what they answer before.
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
    """Return what answers, from a table of :func:`calls`, a kind and "NAME" or "NAME NUMBER"."""
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


# ---------------------------------------------------------------------- single questions

Question = Callable[[Any], Any]


def _int() -> ctypes.c_int:
    return ctypes.c_int(UNTOUCHED)


def _out(function: str, kind: Any = ctypes.c_int, *rest: Any) -> Question:
    """Ask with an out parameter before other arguments."""

    def question(library: Any) -> list[Any]:
        out = kind(UNTOUCHED)
        return [getattr(library, function)(ctypes.byref(out), *rest), _said(out)]

    return question


def _error(function: str, code: int) -> Question:
    def question(library: Any) -> list[Any]:
        out = ctypes.c_void_p(UNTOUCHED)
        return [getattr(library, function)(code, ctypes.byref(out)), _said(out)]

    return question


def _calls(*sequence: tuple[Any, ...]) -> Question:
    """Ask for the results of several calls, one after the other."""
    return lambda library: [getattr(library, name)(*rest) for name, *rest in sequence]


def _table(*, null: bool) -> Question:
    """Ask for the table of private functions that nobody has: the UUID is all zero."""

    def question(library: Any) -> Any:
        if null:
            return library.cuGetExportTable(None, bytes(16))
        return _out("cuGetExportTable", ctypes.c_void_p, bytes(16))(library)

    return question


def anywhere() -> Iterator[tuple[str, Question]]:
    """Yield single questions that neither need nor miss a device, before cuInit."""
    yield "cuDriverGetVersion(NULL)", _calls(("cuDriverGetVersion", None))
    yield "cuInit(1)", _calls(("cuInit", 1))
    yield "cuInit(0xffffffff)", _calls(("cuInit", ctypes.c_uint(0xFFFFFFFF)))
    yield "cuDeviceGetCount(&n) before cuInit", _out("cuDeviceGetCount")
    yield "cuCtxGetCurrent(&c) before cuInit", _out("cuCtxGetCurrent", ctypes.c_void_p)
    yield "cuCtxGetDevice(&d) before cuInit", _out("cuCtxGetDevice")
    yield "cuModuleGetLoadingMode(&m) before cuInit", _out("cuModuleGetLoadingMode")
    yield "cuMemAlloc(&p, 1) before cuInit", _out("cuMemAlloc_v2", ctypes.c_void_p, 1)
    yield "cuGraphCreate(&g, 0) before cuInit", _out("cuGraphCreate", ctypes.c_void_p, 0)
    for function in ("cuGetErrorName", "cuGetErrorString"):
        yield f"{function}(0, NULL)", _calls((function, 0, None))
        yield f"{function}(12345, NULL)", _calls((function, 12345, None))
        for code in (-1, 12345):
            yield f"{function}({code}, &text)", _error(function, code)
    yield "cuGetExportTable(&t, unknown)", _table(null=False)
    yield "cuGetExportTable(NULL, unknown)", _table(null=True)
    yield "cuGetExportTable(&t, NULL)", _out("cuGetExportTable", ctypes.c_void_p, None)
    for form in ("v1", "v2"):
        yield from _procaddr(form)
    for name, version in ((b"cuInit", 12000), (b"cuNoSuchCall", 12000), (b"cuInit", 1000)):
        yield (
            f"cuGetProcAddress v2, no status: {name.decode()!r} at {version}",
            lambda library, n=name, v=version: _get(library, n, v, 0, "v2, no status"),
        )


def _procaddr(form: str) -> Iterator[tuple[str, Question]]:
    def asked(name: bytes | None, version: int, flags: int = 0) -> tuple[str, Question]:
        text = f"cuGetProcAddress {form}: {'NULL' if name is None else name.decode()!r}"
        shown = f"{text} at {version}" + (f", flags {flags:#x}" if flags else "")
        return shown, lambda library: _get(library, name, version, flags, form)

    def without_out(name: bytes | None, flags: int) -> tuple[str, Question]:
        status = ctypes.c_int(UNTOUCHED)

        def question(library: Any) -> list[Any]:
            front = (name, None, 12000, ctypes.c_uint64(flags))
            if form == "v1":
                return [library.cuGetProcAddress(*front)]
            return [library.cuGetProcAddress_v2(*front, ctypes.byref(status)), _said(status)]

        text = f"cuGetProcAddress {form}: {'NULL' if name is None else name.decode()!r}"
        return f"{text} to NULL, flags {flags:#x}", question

    yield asked(None, 12000)
    yield asked(None, 12000, 64)
    yield without_out(b"cuInit", 0)
    yield without_out(None, 0)
    yield without_out(b"cuNoSuchCall", 0)
    for name in (b"", b"cu", b"cuNoSuchCall", b"main", b"cumemalloc", b" cuMemAlloc",
                 b"cuMemAlloc ", b"cuMemAlloc_v2", b"cuMemAlloc_v3", b"cuMemcpyHtoD_v2_ptds",
                 b"cuMemcpyHtoD_ptds",
                 b"cuGetProcAddress_v2", b"cuMemAllocAsync_ptsz", b"cudbgGetAPI",
                 b"cu" + b"M" * 5000):  # fmt: skip
        yield (f"cuGetProcAddress {form}: a name of 5002 characters" if len(name) > 99 else
               asked(name, 12000)[0]), asked(name, 12000)[1]  # fmt: skip
    for version in (-(1 << 31), -1, 0, 1, 1999, 2000, 3019, 3020, 3021, 12, 120, 12050, 99000,
                    (1 << 31) - 1):  # fmt: skip
        yield asked(b"cuMemAlloc", version)
    for version in (-1, 0, 11010, 11019, 11020, 99000):
        yield asked(b"cuMemAllocAsync", version)
        yield asked(b"cuNoSuchCall", version)
    for flags in (*range(9), 16, 1 << 31, 1 << 32, (1 << 64) - 1):
        yield asked(b"cuMemAllocAsync", 12000, flags)
    for flags in (3, 4):
        yield asked(b"cuNoSuchCall", 12000, flags)
        yield asked(b"cuMemAllocAsync", 11000, flags)


def without_device() -> Iterator[tuple[str, Question]]:
    """Yield single questions about a driver that finds no device."""
    for first, text in ((), "at first"), ((("cuInit", 1),), "after cuInit(1)"):
        yield f"cuInit(0) {text}", _calls(*first, ("cuInit", 0))
    yield (
        "cuInit(0), cuInit(0), cuInit(1), cuInit(0)",
        _calls(("cuInit", 0), ("cuInit", 0), ("cuInit", 1), ("cuInit", 0)),
    )
    for visible in ("", "-1", "0", "0,0", "0,-1", "none", "GPU-00000000", "MIG-0"):
        yield f"cuInit(0), CUDA_VISIBLE_DEVICES={visible!r}", _visible(visible)
    for name, kind in {
        "cuDeviceGetCount": ctypes.c_int,
        "cuCtxGetCurrent": ctypes.c_void_p,
        "cuModuleGetLoadingMode": ctypes.c_int,
        "cuDriverGetVersion": ctypes.c_int,
    }.items():
        yield f"{name} after a failed cuInit", _after(_out(name, kind))
    yield "cuGetExportTable(&t, unknown) after a failed cuInit", _after(_table(null=False))
    for name in (b"cuMemAlloc", b"cuNoSuchCall"):
        yield (
            f"cuGetProcAddress v2: {name.decode()!r} after a failed cuInit",
            _after(lambda library, name=name: _get(library, name, 12000)),
        )
    yield "after a failed cuInit, in a forked child: cuInit(0), then a count", _forked
    yield "threads before and after a failed cuInit", _threads


def _after(question: Question) -> Question:
    def asked(library: Any) -> Any:
        library.cuInit(0)
        return question(library)

    return asked


def _visible(text: str) -> Question:
    def question(library: Any) -> int:
        os.environ["CUDA_VISIBLE_DEVICES"] = text
        return int(library.cuInit(0))

    return question


def _forked(library: Any) -> Any:
    first = library.cuInit(0)
    return [first, ask(lambda: [library.cuInit(0), _out("cuDeviceGetCount")(library)])]


def _threads(library: Any) -> list[int]:
    before = len(list(Path("/proc/self/task").iterdir()))
    library.cuInit(0)
    return [before, len(list(Path("/proc/self/task").iterdir()))]


def nvml_anywhere() -> Iterator[tuple[str, Question]]:
    """Yield single questions to NVML before it is initialised."""
    yield "nvmlShutdown before nvmlInit", _calls(("nvmlShutdown",))
    yield "nvmlDeviceGetCount_v2(&n) before nvmlInit", _out("nvmlDeviceGetCount_v2")
    for name in ("nvmlSystemGetCudaDriverVersion", "nvmlSystemGetCudaDriverVersion_v2"):
        yield f"{name}(NULL) before nvmlInit", _calls((name, None))
    for name in ("nvmlSystemGetDriverVersion", "nvmlSystemGetNVMLVersion"):
        yield f"{name}(text, 80) before nvmlInit", _text(name, 80)
        yield f"{name}(text, 2) before nvmlInit", _text(name, 2)


def _text(name: str, length: int) -> Question:
    def question(library: Any) -> list[Any]:
        text = ctypes.create_string_buffer(b"M", 100)
        result = getattr(library, name)(text, length)
        return [result, "untouched" if text.value == b"M" else "written"]

    return question


def nvml_without_device() -> Iterator[tuple[str, Question]]:
    """Yield single questions to an NVML that finds no kernel driver."""
    for name in ("nvmlInit", "nvmlInit_v2"):
        yield f"{name}(), {name}(), nvmlShutdown()", _calls((name,), (name,), ("nvmlShutdown",))
    for flags in (0, 1, 2, 3, 4, 0xFFFFFFFF):
        yield (
            f"nvmlInitWithFlags({flags:#x}), nvmlShutdown()",
            _calls(("nvmlInitWithFlags", ctypes.c_uint(flags)), ("nvmlShutdown",)),
        )
    yield (
        "nvmlDeviceGetCount_v2(&n) after a failed nvmlInit",
        lambda library: [library.nvmlInit_v2(0), *_out("nvmlDeviceGetCount_v2")(library)],
    )


def put(path: str, questions: str, text: str) -> Any:
    """Put one of the single questions of the function named ``questions``."""
    return dict(globals()[questions]())[text](ctypes.CDLL(path))


def answers(path: str, *questions: str) -> dict[str, Any]:
    """Return question: answer."""
    return {
        text: ask(put, path, which, text) for which in questions for text, _ in globals()[which]()
    }


# ---------------------------------------------------------------------- the record


def found_by_loader() -> tuple[str, str]:
    """Return the paths of the libraries that a process of this environment gets.

    Raises
    ------
    RuntimeError
        If there is none.
    """
    return ask(_loaded_from, CUDA), ask(_loaded_from, NVML)


def _loaded_from(name: str) -> str:
    ctypes.CDLL(name)
    maps = Path("/proc/self/maps").read_text().splitlines()
    stem = name.removesuffix(".1")
    return next(path for *_, path in map(str.split, maps) if Path(path).name.startswith(stem))


def record(
    cuda: str, nvml: str, *, device: bool | None = False, every: bool = True
) -> dict[str, Any]:
    """Return the record of two libraries; see the head of this file.

    ``device`` None is ``--anywhere``; without ``every`` the functions are not called one by one.

    Raises
    ------
    Hung
        If a question has no answer.
    LookupError
        If ``device`` is False and cuInit does not say that there is none.
    RuntimeError
        If a library cannot be asked.
    """
    if device is False and ask(call, cuda, "", "cuInit", "zero") != 100:
        raise LookupError("cuInit does not answer 100 (CUDA_ERROR_NO_DEVICE)")
    missing = device is False
    strings = ask(names_in, cuda, "cu")
    functions = ask(exported, cuda, strings)
    names = sorted({*strings, *map(base, functions)})
    given = [ask(forms, cuda, functions, names, flags) for flags in (DEFAULT, LEGACY, PER_THREAD)]
    nvml_functions = ask(exported, nvml, ask(names_in, nvml, "nvml"))
    number = re.fullmatch(re.escape(CUDA[:-1]) + r"(\d{3}\.[\d.]+)", Path(cuda).resolve().name)
    called = [name for name in nvml_functions if name != "nvmlErrorString"]
    return {
        "driver": number[1] if number else None,
        "cuda": ask(_version, cuda),
        "device": device,
        "cuda_errors": _grouped_errors(ask(cuda_errors, cuda, CODES)),
        "arguments": answers(cuda, "anywhere", *(["without_device"] if missing else [])),
        "calls": calls(cuda, functions, "cuInit" if missing else "") if every else {},
        "procaddr": {name: _thrice([table.get(name, "") for table in given])
                     for name in sorted({*given[0], *given[1], *given[2]})},
        "procaddr_older_form_differs": ask(older_form, cuda, list(given[0])),
        "never_given": sorted(set(functions) - _given(given)),
        "nvml_errors": _grouped_errors(ask(nvml_errors, nvml, CODES)),
        "nvml_arguments": answers(
            nvml, "nvml_anywhere", *(["nvml_without_device"] if missing else [])
        ),
        "nvml_calls": calls(nvml, called, "nvmlInit_v2" if missing else "") if every else {},
        "nvml_functions": nvml_functions,
    }  # fmt: skip


def _version(path: str) -> int:
    version = ctypes.c_int()
    ctypes.CDLL(path).cuDriverGetVersion(ctypes.byref(version))
    return version.value


def _thrice(texts: list[str]) -> str | list[str]:
    """Shorten the answers with the flags 0, 1 and 2 to one if they are equal, or to two."""
    default, legacy, per_thread = texts
    if default != legacy:
        return texts
    return default if default == per_thread else [default, per_thread]


def entry(table: dict[str, Any], name: str, flags: int) -> str:
    """Return the text of :func:`forms` for a name and flags, from the record's ``procaddr``."""
    texts = table[name]
    if isinstance(texts, str):
        return texts
    return str(texts[flags] if len(texts) == 3 else texts[flags == PER_THREAD])


def _given(tables: list[dict[str, str]]) -> set[str]:
    """Return the functions that the tables give."""
    return {
        change.partition(":")[2].replace("~", name)
        for table in tables
        for name, text in table.items()
        for change in text.split()
    }


def functions(found: dict[str, Any]) -> set[str]:
    """Return the functions of CUDA that the libraries of a record export."""
    table = found["procaddr"]
    texts = [{name: entry(table, name, flags) for name in table} for flags in range(3)]
    return {name for name in _given(texts) if "/" not in name} | set(found["never_given"])


def written(found: dict[str, Any]) -> str:
    """Return a record as JSON that people can read: an entry a line, names in paragraphs."""
    text = json.dumps(found, indent=1, ensure_ascii=False)

    def joined(match: re.Match[str]) -> str:
        return json.dumps(json.loads(match[0]), ensure_ascii=False)

    def filled(match: re.Match[str]) -> str:
        names, lines = json.loads(match[0]), [""]
        for name in names:
            if len(lines[-1]) + len(name) > 92:
                lines.append("")
            lines[-1] += f'"{name}", '
        return "[\n    " + "\n    ".join(map(str.rstrip, lines)).rstrip(",") + "]"

    # Lists without a list in them: of many names, or short ones.
    text = re.sub(r'\[(\s*"[\w ]+",){4,}\s*"[\w ]+"\s*\]', filled, text)
    for _ in range(2):
        text = re.sub(r"\[\n[^\[\]{}]{,300}?\]", joined, text)
    return text + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.emulator.nodevice", description=__doc__)
    parser.add_argument("folder", nargs="?", help="has libcuda.so.1 and libnvidia-ml.so.1")
    parser.add_argument("--anywhere", action="store_true", help="only what needs no absence")
    parser.add_argument("--quick", action="store_true", help="do not call every function")
    options = parser.parse_args()
    folder = options.folder
    made_here = not CONTROL.exists()
    try:
        paths = (f"{folder}/{CUDA}", f"{folder}/{NVML}") if folder else found_by_loader()
        found = record(*paths, device=None if options.anywhere else False, every=not options.quick)
    except (OSError, LookupError, RuntimeError, Hung) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        if made_here and not options.anywhere:
            CONTROL.unlink(missing_ok=True)
    sys.stdout.write(written(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
