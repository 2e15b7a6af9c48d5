# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The questions to the libraries: for each question, its text and a function that asks it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from .child import ask
from .outs import UNTOUCHED, said
from .procaddr import get

Question = Callable[[Any], Any]


def _out(function: str, kind: Any = ctypes.c_int, *rest: Any) -> Question:
    """Return a question: call a function with an out parameter as its first argument."""

    def question(library: Any) -> list[Any]:
        out = kind(UNTOUCHED)
        return [getattr(library, function)(ctypes.byref(out), *rest), said(out)]

    return question


def _error(function: str, code: int) -> Question:
    def question(library: Any) -> list[Any]:
        out = ctypes.c_void_p(UNTOUCHED)
        return [getattr(library, function)(code, ctypes.byref(out)), said(out)]

    return question


def _calls(*sequence: tuple[Any, ...]) -> Question:
    """Return a question: make these calls in this order. Its answer lists their results."""
    return lambda library: [getattr(library, name)(*rest) for name, *rest in sequence]


def _table(*, null: bool) -> Question:
    """Return a question: request a table of private functions with the UUID zero.

    No table has this UUID.
    """

    def question(library: Any) -> Any:
        if null:
            return library.cuGetExportTable(None, bytes(16))
        return _out("cuGetExportTable", ctypes.c_void_p, bytes(16))(library)

    return question


def _cuda_anywhere() -> Iterator[tuple[str, Question]]:
    """Yield questions for the time before cuInit. Their answers depend on no device."""
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
            lambda library, n=name, v=version: get(library, n, v, 0, "v2, no status"),
        )


def _procaddr(form: str) -> Iterator[tuple[str, Question]]:
    def asked(name: bytes | None, version: int, flags: int = 0) -> tuple[str, Question]:
        text = f"cuGetProcAddress {form}: {'NULL' if name is None else name.decode()!r}"
        shown = f"{text} at {version}" + (f", flags {flags:#x}" if flags else "")
        return shown, lambda library: get(library, name, version, flags, form)

    def without_out(name: bytes | None, flags: int) -> tuple[str, Question]:
        status = ctypes.c_int(UNTOUCHED)

        def question(library: Any) -> list[Any]:
            front = (name, None, 12000, ctypes.c_uint64(flags))
            if form == "v1":
                return [library.cuGetProcAddress(*front)]
            return [library.cuGetProcAddress_v2(*front, ctypes.byref(status)), said(status)]

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


def _cuda_without_device() -> Iterator[tuple[str, Question]]:
    """Yield questions to a driver that finds no device."""
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
            _after(lambda library, name=name: get(library, name, 12000)),
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


def _nvml_anywhere() -> Iterator[tuple[str, Question]]:
    """Yield questions to NVML before it is initialised."""
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


def _nvml_without_device() -> Iterator[tuple[str, Question]]:
    """Yield questions to an NVML that finds no kernel driver."""
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


def of_cuda(missing: bool) -> Iterator[tuple[str, Question]]:
    """Yield the questions to libcuda.so.1.

    If ``missing``, also yield the questions to a driver that finds no device.
    """
    yield from _cuda_anywhere()
    if missing:
        yield from _cuda_without_device()


def of_nvml(missing: bool) -> Iterator[tuple[str, Question]]:
    """Yield the questions to libnvidia-ml.so.1."""
    yield from _nvml_anywhere()
    if missing:
        yield from _nvml_without_device()


def put(path: str, text: str, question: Question) -> Any:
    """Ask the library at ``path`` one question. Only an error message needs ``text``."""
    return question(ctypes.CDLL(path))


def answers(path: str, questions: Iterable[tuple[str, Question]]) -> dict[str, Any]:
    """Ask each question in its own child; return the answers by the question's text."""
    return {text: ask(put, path, text, question) for text, question in questions}
