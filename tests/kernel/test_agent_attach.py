# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Tests of the visible devices, of the probe for cuInit, and of the frameworks' memory caps."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from typing import Any

import pytest

from jupyter_gpupool.kernel.advice import advice, is_out_of_memory, tried_bytes
from jupyter_gpupool.kernel.frameworks import (
    CONTEXT_BYTES,
    CudaProbe,
    FrameworkCaps,
    show_devices,
    usable_bytes,
)
from jupyter_gpupool.kernel.holds import Slice
from jupyter_gpupool.kernel.link import SessionLink
from tests.emulated import environment, parse_machine

GiB = 1 << 30

PROBE = """
import ctypes
from jupyter_gpupool.kernel.frameworks import CudaProbe
probe = CudaProbe()
assert probe() is False  # not loaded
library = ctypes.CDLL("libcuda.so.1")
assert probe() is False  # loaded, not initialised, and not by the probe either
assert probe() is False
assert library.cuInit(0) == 0
assert probe() is True
assert CudaProbe()() is True
print("good")
"""


def test_probe_detects_cuinit_without_calling_cuinit(tmp_path: Any) -> None:
    machine = parse_machine("1x1GiB")
    env = environment(machine, tmp_path / "state", base=os.environ)
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "good\n", done.stderr


def test_visible_devices_are_named_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    show_devices(())
    # Without devices, the variable keeps its value. With an empty value, the driver would see no
    # device, and it reads the variable only once.
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    show_devices(("GPU-a", "GPU-b"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"


def test_broker_names_the_variable_of_visible_devices() -> None:
    environ = {"GPUPOOL_DEVICES_VARIABLE": "OTHER_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES": "7"}
    show_devices(("GPU-a", "GPU-b"), environ)
    assert environ["OTHER_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    assert environ["CUDA_VISIBLE_DEVICES"] == "7"


def test_cap_leaves_room_for_the_context_and_is_never_zero() -> None:
    assert usable_bytes(4 * GiB) == 4 * GiB - CONTEXT_BYTES
    assert usable_bytes(256 << 20) == 128 << 20


class FakeTorch(types.ModuleType):
    """A fake module that has only the part of torch.cuda 2.x that FrameworkCaps uses."""

    def __init__(self, initialised: bool) -> None:
        super().__init__("torch")
        self.fractions: list[tuple[float, int]] = []
        self.queued: list[Any] = []
        self.initialised = initialised
        self.cuda = self

    def is_initialized(self) -> bool:
        return self.initialised

    def _lazy_call(self, function: Any) -> None:
        self.queued.append(function)

    def get_device_properties(self, index: int) -> Any:
        assert self.initialised
        return types.SimpleNamespace(total_memory=16 * GiB)

    def set_per_process_memory_fraction(self, fraction: float, index: int) -> None:
        assert self.initialised
        self.fractions.append((fraction, index))


def caps(cuda: bool = True) -> FrameworkCaps:
    probe = CudaProbe()
    probe._initialised = cuda
    return FrameworkCaps(probe)


def test_torch_gets_a_new_cap_only_if_the_size_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = FakeTorch(initialised=True)
    monkeypatch.setitem(sys.modules, "torch", torch)
    keeper = caps()
    keeper.apply((Slice("GPU-a", 4 * GiB),))
    keeper.apply((Slice("GPU-a", 4 * GiB),))
    assert torch.fractions == [(3.5 / 16, 0)]
    keeper.apply((Slice("GPU-a", 8 * GiB), Slice("GPU-b", 8 * GiB)))
    assert torch.fractions[1:] == [(7.5 / 16, 0), (7.5 / 16, 1)]
    keeper.apply(())
    assert len(torch.fractions) == 3


def test_setting_a_cap_does_not_initialise_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = FakeTorch(initialised=False)
    monkeypatch.setitem(sys.modules, "torch", torch)
    caps(cuda=False).apply((Slice("GPU-a", 4 * GiB),))
    assert torch.fractions == []
    torch.initialised = True
    for function in torch.queued:  # torch sets this at the end of its initialisation
        function()
    assert torch.fractions == [(3.5 / 16, 0)]


def test_cupy_gets_its_cap_when_cuda_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = []
    current = [0]

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            current[0] = self.index

        def __exit__(self, *_: object) -> None:
            pass

    cupy: Any = types.ModuleType("cupy")
    pool = types.SimpleNamespace(set_limit=lambda size: limits.append((current[0], size)))
    cupy.cuda = types.SimpleNamespace(Device=Device)
    cupy.get_default_memory_pool = lambda: pool
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    caps(cuda=False).apply((Slice("GPU-a", 4 * GiB),))
    assert limits == []
    caps().apply((Slice("GPU-a", 4 * GiB), Slice("GPU-b", 4 * GiB)))
    assert limits == [(0, 4 * GiB - CONTEXT_BYTES), (1, 4 * GiB - CONTEXT_BYTES)]


def test_error_of_a_cap_is_recorded_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = FakeTorch(initialised=True)
    torch.get_device_properties = lambda index: 1 / 0
    monkeypatch.setitem(sys.modules, "torch", torch)
    keeper = caps()
    keeper.apply((Slice("GPU-a", 4 * GiB),))
    assert keeper.problem == "The memory cap of torch could not be set: division by zero"


@pytest.mark.parametrize(
    ("name", "text", "is_oom", "tried"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB. GPU", True, 2 * GiB),
        ("OutOfMemoryError", "Out of memory allocating 1,024 bytes (allocated", True, 1024),
        ("CudaAPIError", "[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY", True, 0),
        (
            "XlaRuntimeError",
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4294967296 bytes.",
            True,
            4 * GiB,
        ),
        ("RuntimeError", "CUDA error: out of memory\nCUDA kernel errors might", True, 0),
        ("MemoryError", "Unable to allocate 8 GiB for an array", False, 0),
        ("OSError", "[Errno 12] Cannot allocate memory", False, 0),
    ],
)
def test_out_of_device_memory_errors_are_recognised(
    name: str, text: str, is_oom: bool, tried: int
) -> None:
    assert is_out_of_memory(name, text) is is_oom
    assert tried_bytes(text) == tried


def test_advice_for_a_kernel_without_a_slice_is_to_attach() -> None:
    link = SessionLink("/nowhere/broker.sock", "s1", "token")
    assert "Type %gpu attach" in advice(link, "")
