# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The line under an out-of-memory error: what is granted, what may be asked, what to type."""

from __future__ import annotations

import re

from ..units import format_bytes, parse_bytes
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


def advice(link: Link, text: str) -> str:
    """Return the line to add under the error."""
    if not link.attached or not link.slices:
        return (
            "GPU pool: this kernel has no GPU slice at the moment. Type %gpu attach to get one, "
            "or %gpu for its state."
        )
    granted = min(s.bytes for s in link.slices)
    most = link.limits.get("memory")
    line = f"GPU pool: this kernel is granted {format_bytes(granted)} of device memory"
    if not isinstance(most, int):
        wanted = _round_up(max(2 * granted, granted + tried_bytes(text)))
        return f"{line}. Ask for more with: %gpu {_size(wanted)}"
    if most <= granted:
        return (
            f"{line}, which is the most it may ask for. Free some in this kernel (del, then the "
            "library's empty_cache()), or ask your admin for a larger quota."
        )
    wanted = min(most, _round_up(max(2 * granted, granted + tried_bytes(text))))
    return f"{line}; up to {format_bytes(most)} may be asked for. Type: %gpu {_size(wanted)}"


def _round_up(value: int) -> int:
    return -(-value // _GIB) * _GIB


def _size(value: int) -> str:
    if value % _GIB == 0:
        return f"{value // _GIB}GiB"
    return f"{value >> 20}MiB"
