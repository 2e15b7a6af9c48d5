# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Keeps JAX from computing on the CPU after its first wait for a slice has failed.

JAX opens the CPU and the GPU at its first use, and keeps what it got. If the wait for a slice ends
without one, because the user interrupts the cell or no broker answers, JAX has the CPU alone: each
later cell computes there, and only JAX's log says so (JAX 0.11.2 on an H200).
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, Callable

#: What JAX quotes of the guard's answer to a call whose wait has ended without a slice.
_NOT_READY = "CUDA_ERROR_SYSTEM_NOT_READY"

#: JAX's names of NVIDIA GPUs in ``jax_platforms``.
_NAMES = frozenset({"cuda", "gpu"})

AGAIN = (
    "GPU pool: JAX had opened only the CPU, because the wait for a GPU slice ended. It looks for "
    "the GPU again at its next use."
)
STAYS = (
    "GPU pool: JAX computes on the CPU, because it got no GPU slice when it opened its devices in "
    "this cell. To let it look for the GPU again: import jax.extend.backend; "
    "jax.extend.backend.clear_backends(). Arrays made before that stay on the CPU."
)


class JaxBackends:
    """Looks at JAX's open backends before and after a cell; does not import JAX."""

    def __init__(self) -> None:
        self._open = False

    def before(self) -> None:
        """Note whether JAX has opened its devices."""
        self._open = bool(_backends())

    def after(self, failed: bool, waits: bool) -> str:
        """Return what to tell under the cell, "" for nothing.

        ``failed``: the cell raised, so that it has left no arrays of its own: JAX may look again.
        ``waits``: a call of the cell waited for a slice, and the kernel has none.
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
    """Return JAX's open backends by name; nothing if JAX is not imported."""
    return getattr(sys.modules.get("jax._src.xla_bridge"), "_backends", None)


def _wants_gpu(bridge: Any) -> bool:
    """Return whether JAX has a plugin for NVIDIA GPUs, and its user chose no other devices."""
    if "cuda" not in getattr(bridge, "_backend_factories", ()):
        return False
    chosen = getattr(sys.modules.get("jax"), "config", None)
    platforms = getattr(chosen, "jax_platforms", None)
    return not platforms or bool(_NAMES.intersection(str(platforms).split(",")))


def _clear_backends() -> Callable[[], Any] | None:
    """Return JAX's own function for that, None if this version has none."""
    try:
        module: Any = importlib.import_module("jax.extend.backend")
    except ImportError:
        module = sys.modules.get("jax")
    found: Callable[[], Any] | None = getattr(module, "clear_backends", None)
    return found
