# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Explains to the user an error that the pool caused: the reason, and what to do.

A refused CUDA call returns only an error code. So the broker also sends a sentence that explains
the refusal (``refused``). If there is no such sentence, the agent chooses the line below the error
by the text of the error.
"""

from __future__ import annotations

import re

from ..endpoint import MACHINE_SOCKET
from ..errors import BrokerUnavailable, Code, GPUPoolError
from ..text import sentence
from ..units import format_bytes, parse_bytes, typed_bytes
from .guard_state import Guard, MemoryFigures
from .holds import CallRefusal
from .link import SessionLink

#: Names that libraries give to two errors of the driver: 802 (a call without a slice) and 801 (a
#: call that asks for managed memory).
_NOT_READY = re.compile(
    r"CUDA_ERROR_SYSTEM_NOT_READY|cudaErrorSystemNotReady|system not yet initialized", re.IGNORECASE
)
_NOT_SUPPORTED = re.compile(
    r"CUDA_ERROR_NOT_SUPPORTED|cudaErrorNotSupported|CUDA error: operation not supported",
    re.IGNORECASE,
)

#: Names of the exceptions that an interrupt by the user raises. The user needs no explanation of
#: them.
_INTERRUPTS = ("KeyboardInterrupt", "GPUWaitInterrupted")


_MANAGED = (
    "GPU pool: managed memory (cudaMallocManaged) is not supported here, because the driver cannot "
    "suspend it. If this call asked for it: use ordinary device memory, or ask your admin for "
    "c.GPUPool.managed_memory = 'allow'."
)


def may_be_refused(name: str, text: str) -> bool:
    """Return whether the broker may still send a reason for this error."""
    return name not in _INTERRUPTS and bool(is_out_of_memory(name, text) or _NOT_READY.search(text))


def explain(
    link: SessionLink, guard: Guard, refused: CallRefusal | None, name: str, text: str
) -> str:
    """Return the line to add under the error of a cell; empty if none is needed.

    ``refused``: the refusal that the broker sent while the cell ran, if any.
    """
    if name in _INTERRUPTS:
        return ""
    figures = guard.figures()
    if refused is not None:
        parts = [f"GPU pool: {sentence(refused.message)}"]
        if refused.what == "grow" and (refused.code == Code.LIMIT or not refused.next_step):
            # The user can raise the kernel's own limit. So the line names the command that raises
            # it.
            granted = _granted(link, figures)
            if figures is not None and figures.granted:
                named = figures._replace(limit=0) if refused.code == Code.LIMIT else figures
                parts.append(sentence(counted(named)))  # the refusal already names the limit
            if granted:
                parts.append(_what_to_type(link, granted, text))
            return " ".join(parts)
        if refused.what == "grow" and figures is not None and figures.granted:
            parts.append(sentence(counted(figures)))
        return " ".join([*parts, sentence(refused.next_step)]).rstrip()
    if is_out_of_memory(name, text):
        return advice(link, text, figures)
    if guard.on and _NOT_READY.search(text):
        return f"GPU pool: {_not_ready(link)}"
    if _NOT_SUPPORTED.search(text) and guard.refuses_managed():
        return _MANAGED
    return ""


def _not_ready(link: SessionLink) -> str:
    doctor = "`jupyter gpupool doctor` says what is wrong."
    if link.unreachable_for():
        return f"a CUDA call waited for a GPU slice. {no_broker(link, link.unavailable())} {doctor}"
    return (
        f"a CUDA call waited for a GPU slice, and the broker at {link.path} did not answer in "
        f"time. Run the cell again. {doctor}"
    )


# ---------------------------------------------------------------------- out of memory

_GIB = 1 << 30

#: Names and texts of the errors that libraries raise when device memory is full.
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
    """Return the bytes that the failed allocation requested; 0 if the text names no size."""
    found = _TRIED.search(text)
    if found is None:
        return 0
    number, unit = found.group(1).replace(",", ""), found.group(2)
    try:
        return parse_bytes(number + ("B" if unit in ("", "bytes") else unit))
    except ValueError:
        return 0


def advice(link: SessionLink, text: str, figures: MemoryFigures | None = None) -> str:
    """Return the line to add under an out-of-memory error.

    ``figures``: the bytes that the guard counts.
    """
    granted = _granted(link, figures)
    if not granted:
        return (
            "GPU pool: this kernel has no GPU slice at the moment. Type %gpu attach to get one, "
            "or %gpu for its state."
        )
    line = (
        counted(figures)
        if figures is not None and figures.granted
        else f"this kernel has a slice of {format_bytes(granted)}"
    )
    return f"GPU pool: {line}. {_what_to_type(link, granted, text)}"


def _granted(link: SessionLink, figures: MemoryFigures | None) -> int:
    """Return the bytes of the guard's grant, or of the smallest slice; 0 without a slice."""
    if figures is not None and figures.granted:
        return figures.granted
    return min((s.bytes for s in link.slices), default=0) if link.attached else 0


def counted(figures: MemoryFigures) -> str:
    """Return the beginning of a sentence, with the guard's figures."""
    line = (
        f"this kernel uses {format_bytes(figures.used)} of the {format_bytes(figures.granted)} "
        "of device memory granted to it"
    )
    if figures.limit > figures.granted:
        line += f", and its limit is {format_bytes(figures.limit)}"
    return line


def _what_to_type(link: SessionLink, granted: int, text: str) -> str:
    most = link.limits.get("memory")
    wanted = _round_up(max(2 * granted, granted + tried_bytes(text)))
    if not isinstance(most, int):
        return f"Ask for more with: %gpu {typed_bytes(wanted)}"
    if most <= granted:
        return (
            f"It may ask for at most {format_bytes(most)}. Free memory in this kernel (del, then "
            "the library's empty_cache()), or ask your admin for a larger quota."
        )
    wanted = min(most, wanted)
    return f"It may ask for up to {format_bytes(most)}. Type: %gpu {typed_bytes(wanted)}"


def _round_up(value: int) -> int:
    return -(-value // _GIB) * _GIB


# ---------------------------------------------------------------------- no broker


def no_broker(link: SessionLink, error: GPUPoolError) -> GPUPoolError:
    """Return ``error``, which is about a missing broker, as a BrokerUnavailable with advice.

    The message names the broker's socket, and the next step says what the user can do.
    """
    named = str(link.path.with_suffix(".log")) in str(error)
    hint = "" if named else log_hint(link)
    if error.code in (Code.NO_BROKER, BrokerUnavailable.code):
        start = (
            "The broker there serves the whole machine: ask your administrator to start it."
            if link.path == MACHINE_SOCKET
            else "Open another Pooled GPU kernel, which starts a broker with your server's "
            "options, or run `jupyter gpupool broker`."
        )
    else:
        start = error.next_step
    message = error.message
    if str(link.path) not in message:
        message += f" The broker's socket is {link.path}."
    return BrokerUnavailable(message, code=error.code, next_step=f"{start} {hint}".strip())


def log_hint(link: SessionLink) -> str:
    """Return a sentence that names the broker's log; "" if the broker serves the whole machine.

    The log shows why the broker does not answer.
    """
    if link.path == MACHINE_SOCKET:
        return ""
    return f"The broker's log is {link.path.with_suffix('.log')}, if it was started for you."
