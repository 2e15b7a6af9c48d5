# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Keeps JAX from computing on the CPU after its first wait for a slice has failed.

When a cell first uses JAX, JAX opens the CPU and the GPU, and then keeps only the devices that it
could open. To open the GPU, it waits for a slice. If the user interrupts this wait, or no broker
answers, JAX opens only the CPU. Each later cell then computes on the CPU, and only JAX's log
reports this (JAX 0.11.2 on an H200).
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, Callable

#: The guard returns this error if a call's wait ended without a slice. JAX's own error quotes it.
_NOT_READY = "CUDA_ERROR_SYSTEM_NOT_READY"

#: The names that JAX uses for NVIDIA GPUs in ``jax_platforms``.
_NAMES = frozenset({"cuda", "gpu"})

AGAIN = (
    "GPU pool: JAX had opened only the CPU, because the wait for a GPU slice ended without a "
    "slice. JAX looks for the GPU again when a cell next uses JAX."
)
STAYS = (
    "GPU pool: JAX computes on the CPU, because it got no GPU slice when it opened its devices in "
    "this cell. To make JAX look for the GPU again, run: import jax.extend.backend; "
    "jax.extend.backend.clear_backends(). Existing arrays stay on the CPU."
)


class JaxBackends:
    """Checks JAX's open backends before and after a cell, without importing JAX."""

    def __init__(self) -> None:
        self._open = False

    def before(self) -> None:
        """Note whether JAX has opened its devices."""
        self._open = bool(_backends())

    def after(self, failed: bool, waits: bool) -> str:
        """Return the line to show under the cell; "" if none is needed.

        ``failed`` says whether the cell raised an error. After an error, this method lets JAX look
        for the GPU again, because the cell has left no arrays. ``waits`` says whether a CUDA call
        of the cell waited for a slice and the kernel still has no slice.
        """
        backends = _backends()
        if self._open or not backends or _NAMES.intersection(backends):
            return ""
        bridge = sys.modules["jax._src.xla_bridge"]
        error = str(getattr(bridge, "_backend_errors", {}).get("cuda", ""))
        if not (waits or _NOT_READY in error) or not _wants_gpu(bridge):
            return ""
        clear = _clear_backends() if failed else None
        if clear is None:
            return STAYS
        clear()
        return AGAIN


def _backends() -> Any:
    """Return JAX's open backends by name; None if JAX is not imported."""
    return getattr(sys.modules.get("jax._src.xla_bridge"), "_backends", None)


def _wants_gpu(bridge: Any) -> bool:
    """Return whether JAX has a plugin for NVIDIA GPUs and the user has not chosen other devices."""
    if "cuda" not in getattr(bridge, "_backend_factories", ()):
        return False
    chosen = getattr(sys.modules.get("jax"), "config", None)
    platforms = getattr(chosen, "jax_platforms", None)
    return not platforms or bool(_NAMES.intersection(str(platforms).split(",")))


def _clear_backends() -> Callable[[], Any] | None:
    """Return JAX's function ``clear_backends``; None if this version of JAX has none."""
    try:
        module: Any = importlib.import_module("jax.extend.backend")
    except ImportError:
        module = sys.modules.get("jax")
    found: Callable[[], Any] | None = getattr(module, "clear_backends", None)
    return found
