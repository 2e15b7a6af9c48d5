# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The line under an out-of-memory error: what is granted, what may be asked, what to type."""

from __future__ import annotations

import re

from ..units import format_bytes, parse_bytes
from .guarded import Figures
from .link import Link

_GIB = 1 << 30

#: What the libraries say, over names and texts of their errors.
_PATTERN = re.compile(
    r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|CUDA out of memory"
    r"|CUDA error: out of memory|RESOURCE_EXHAUSTED: Out of memory"
    r"|Out of memory allocating [0-9,]+ bytes",
    re.IGNORECASE,
)
_NAMES = ("OutOfMemoryError", "CUDAOutOfMemoryError")
_TRIED = re.compile(r"(?:Tried to allocate|trying to allocate|allocating) ([0-9.,]+) ?([A-Za-z]*)")


def is_out_of_memory(name: str, text: str) -> bool:
    """Return whether an error of this name and text says that *device* memory ran out."""
    return name in _NAMES or bool(_PATTERN.search(text))


def tried_bytes(text: str) -> int:
    """Return the bytes that the failed allocation asked for; 0 if the text does not say."""
    found = _TRIED.search(text)
    if found is None:
        return 0
    number, unit = found.group(1).replace(",", ""), found.group(2)
    try:
        return parse_bytes(number + ("B" if unit in ("", "bytes") else unit))
    except ValueError:
        return 0


def advice(link: Link, text: str, figures: Figures | None = None) -> str:
    """Return the line to add under the error; ``figures`` are those that the guard counts."""
    if figures is not None and figures.granted:
        granted = figures.granted
        line = f"GPU pool: {counted(figures)}"
    elif link.attached and link.slices:
        granted = min(s.bytes for s in link.slices)
        line = f"GPU pool: this kernel is granted {format_bytes(granted)} of device memory"
    else:
        return (
            "GPU pool: this kernel has no GPU slice at the moment. Type %gpu attach to get one, "
            "or %gpu for its state."
        )
    return f"{line}{_what_to_type(link, granted, text)}"


def counted(figures: Figures) -> str:
    """Return the figures of the guard as the beginning of a sentence."""
    line = (
        f"this kernel uses {format_bytes(figures.used)} of the {format_bytes(figures.granted)} "
        "of device memory that it is granted"
    )
    if figures.limit > figures.granted:
        line += f", and its limit is {format_bytes(figures.limit)}"
    return line


def _what_to_type(link: Link, granted: int, text: str) -> str:
    most = link.limits.get("memory")
    wanted = _round_up(max(2 * granted, granted + tried_bytes(text)))
    if not isinstance(most, int):
        return f". Ask for more with: %gpu {_size(wanted)}"
    if most <= granted:
        return (
            ", which is the most it may ask for. Free some in this kernel (del, then the "
            "library's empty_cache()), or ask your admin for a larger quota."
        )
    wanted = min(most, wanted)
    return f"; up to {format_bytes(most)} may be asked for. Type: %gpu {_size(wanted)}"


def _round_up(value: int) -> int:
    return -(-value // _GIB) * _GIB


def _size(value: int) -> str:
    if value % _GIB == 0:
        return f"{value // _GIB}GiB"
    return f"{value >> 20}MiB"
