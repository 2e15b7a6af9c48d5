# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The one line under a cell's error, where the pool is the cause and can say more.

A CUDA call that is refused ends with a bare error code. The broker's sentence about it comes by
itself (``refused``); without one, the error's own text tells what the line is about.
"""

from __future__ import annotations

import re

from ..errors import Code
from .guarded import Guard
from .link import Link
from .one_cell import no_broker
from .oom import advice, counted, is_out_of_memory
from .progress import sentence
from .values import Refused

#: How libraries name the error of a call that waited in vain (802), and of managed memory (801).
_NOT_READY = re.compile(
    r"CUDA_ERROR_SYSTEM_NOT_READY|cudaErrorSystemNotReady|system not yet initialized", re.IGNORECASE
)
_NOT_SUPPORTED = re.compile(
    r"CUDA_ERROR_NOT_SUPPORTED|cudaErrorNotSupported|CUDA error: operation not supported",
    re.IGNORECASE,
)

#: The user's own doing: nothing to explain.
_INTERRUPTS = ("KeyboardInterrupt", "GPUWaitInterrupted")


_MANAGED = (
    "GPU pool: managed memory (cudaMallocManaged) is not supported here, because the driver cannot "
    "suspend it. If this call asked for it: use ordinary device memory, or ask your admin for "
    "c.GPUPool.managed_memory = 'allow'."
)


def may_be_refused(name: str, text: str) -> bool:
    """Return whether the broker may still say why this error came."""
    return name not in _INTERRUPTS and bool(is_out_of_memory(name, text) or _NOT_READY.search(text))


def explain(link: Link, guard: Guard, refused: Refused | None, name: str, text: str) -> str:
    """Return the line to add under the error of a cell; empty if there is nothing to say.

    ``refused``: what the broker refused while the cell ran.
    """
    if name in _INTERRUPTS:
        return ""
    figures = guard.figures()
    if refused is not None:
        parts = [f"GPU pool: {sentence(refused.message)}"]
        if refused.what == "grow" and (refused.code == Code.LIMIT or not refused.next_step):
            # The kernel's own limit is what it may change itself: say with which command.
            parts.append(sentence(advice(link, text, figures).removeprefix("GPU pool: ")))
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


def _not_ready(link: Link) -> str:
    doctor = "`jupyter gpupool doctor` says what is wrong."
    if link.unreachable_for():
        return f"a CUDA call waited for a GPU slice. {no_broker(link, link.unavailable())} {doctor}"
    return (
        f"a CUDA call waited for a GPU slice, and the broker at {link.path} did not answer in "
        f"time. Run the cell again. {doctor}"
    )
