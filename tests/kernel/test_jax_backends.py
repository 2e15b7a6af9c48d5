# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""If a wait for a slice fails during a cell, JAX looks for the GPU again after the cell."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from jupyter_gpupool.kernel.jax_backends import AGAIN, STAYS, JaxBackends


class Jax:
    """The modules of JAX that matter in these tests, with the names of JAX 0.11."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bridge: Any = types.ModuleType("jax._src.xla_bridge")
        self.bridge._backends = {}
        self.bridge._backend_errors = {}
        self.bridge._backend_factories = {"cpu": object(), "cuda": object()}
        self.jax: Any = types.ModuleType("jax")
        self.jax.config = types.SimpleNamespace(jax_platforms=None)
        backend: Any = types.ModuleType("jax.extend.backend")
        backend.clear_backends = self.bridge._backends.clear
        modules = {
            "jax": self.jax,
            "jax._src.xla_bridge": self.bridge,
            "jax.extend": types.ModuleType("jax.extend"),
            "jax.extend.backend": backend,
        }
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    def opens(self, *names: str, error: str = "") -> None:
        self.bridge._backends.update({name: object() for name in names})
        if error:
            self.bridge._backend_errors["cuda"] = error


@pytest.fixture
def jax(monkeypatch: pytest.MonkeyPatch) -> Jax:
    return Jax(monkeypatch)


NOT_READY = "CUDA error: : CUDA_ERROR_SYSTEM_NOT_READY: system not yet initialized"


def test_jax_searches_again_if_its_first_use_was_interrupted(jax: Jax) -> None:
    look = JaxBackends()
    look.before()
    jax.opens("cpu")  # an interrupt comes before JAX records that the GPU has failed
    assert look.after(failed=True, waits=True) == AGAIN
    assert not jax.bridge._backends
    look.before()
    jax.opens("cpu", "cuda")
    assert look.after(failed=False, waits=False) == ""
    assert set(jax.bridge._backends) == {"cpu", "cuda"}


def test_cell_without_error_keeps_its_arrays_and_gets_a_note(jax: Jax) -> None:
    look = JaxBackends()
    look.before()
    jax.opens("cpu", error=NOT_READY)
    assert look.after(failed=False, waits=False) == STAYS
    assert set(jax.bridge._backends) == {"cpu"}
    look.before()
    assert look.after(failed=False, waits=False) == "", "told once"


def test_jax_initialised_before_the_cell_is_not_changed(jax: Jax) -> None:
    look = JaxBackends()
    jax.opens("cpu", error=NOT_READY)
    look.before()
    assert look.after(failed=True, waits=True) == ""
    assert set(jax.bridge._backends) == {"cpu"}


@pytest.mark.parametrize(
    "change",
    [
        lambda jax: jax.bridge._backend_factories.pop("cuda"),  # JAX built for the CPU only
        lambda jax: setattr(jax.jax.config, "jax_platforms", "cpu"),
    ],
)
def test_jax_that_uses_no_gpu_is_not_changed(jax: Jax, change: Any) -> None:
    change(jax)
    look = JaxBackends()
    look.before()
    jax.opens("cpu")
    assert look.after(failed=True, waits=True) == ""


def test_jax_is_not_changed_after_other_errors_of_the_gpu(jax: Jax) -> None:
    look = JaxBackends()
    look.before()
    jax.opens("cpu", error="CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected")
    assert look.after(failed=True, waits=False) == ""


def test_failed_wait_does_not_import_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "jax"]:
        monkeypatch.delitem(sys.modules, name)
    look = JaxBackends()
    look.before()
    assert look.after(failed=True, waits=True) == ""
    assert "jax" not in sys.modules
