# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A driver's two libraries: where they are, and which functions they export."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable
from pathlib import Path

from .child import ask

CUDA, NVML = "libcuda.so.1", "libnvidia-ml.so.1"


def found_by_loader() -> tuple[str, str]:
    """Return the paths from which a process with this environment loads CUDA and NVML.

    Raises
    ------
    RuntimeError
        If one of the two libraries cannot be loaded.
    """
    return ask(_loaded_from, CUDA), ask(_loaded_from, NVML)


def _loaded_from(name: str) -> str:
    ctypes.CDLL(name)
    stem = name.removesuffix(".1")
    return next(path for *_, path in _mappings() if Path(path).name.startswith(stem))


def _mappings() -> list[list[str]]:
    """Return the fields of each memory mapping of this process: first the address range and the
    access, and last the path if the mapping has one.
    """
    return [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]


def names_in(path: str, *prefixes: str) -> list[str]:
    """Return all words in the file that look like function names with one of these prefixes."""
    text, found = Path(path).read_bytes(), set()
    for prefix in prefixes:
        found |= set(re.findall(rb"(?=(" + prefix.encode() + rb"[A-Z]\w{2,})\0)", text))
    return sorted(name.decode() for name in found)


def exported(path: str, names: Iterable[str]) -> list[str]:
    """Return the names in ``names`` that the library exports as functions, in executable memory."""
    library, found = ctypes.CDLL(path), {}
    for name in names:
        if hasattr(library, name):
            found[name] = ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    code = [
        [int(end, 16) for end in where.split("-")] for where, how, *_ in _mappings() if "x" in how
    ]
    return [name for name, at in found.items() if any(low <= at < high for low, high in code)]


def base(name: str) -> str:
    """Return the name for cuGetProcAddress: the exported name without its suffixes."""
    return re.sub(r"(_v\d+)?(_ptds|_ptsz)?$", "", name)


def driver_version(path: str) -> str | None:
    """Return the driver's version, from the name of the file that libcuda.so.1 links to."""
    number = re.fullmatch(re.escape(CUDA[:-1]) + r"(\d{3}\.[\d.]+)", Path(path).resolve().name)
    return number[1] if number else None


def cuda_version(path: str) -> int:
    """Return the version from cuDriverGetVersion: 1000 x major + 10 x minor."""
    version = ctypes.c_int()
    ctypes.CDLL(path).cuDriverGetVersion(ctypes.byref(version))
    return version.value
