# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Parts of the devices that need no process: device maps, versions, error texts, figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_gpupool.devices.model import DeviceSample, ProcessMemory
from jupyter_gpupool.devices.nvidia import checkpoint, driver, interpreter
from jupyter_gpupool.devices.nvidia.operations import freed_bytes


def test_resume_on_the_same_devices_has_no_map():
    assert checkpoint.complete_mapping(("a", "b"), ("a", "b"), ("a", "b", "c")) is None
    assert checkpoint.complete_mapping((), (), ("a",)) is None


def test_displaced_device_takes_the_freed_place():
    assert checkpoint.complete_mapping(("a",), ("b",), ("a", "b", "c")) == {
        "a": "b",
        "b": "a",
        "c": "c",
    }


def test_chain_of_moved_devices_is_closed_to_a_cycle():
    found = checkpoint.complete_mapping(("a", "b"), ("b", "c"), ("a", "b", "c", "d"))
    assert found == {"a": "b", "b": "c", "c": "a", "d": "d"}


@given(st.data())
def test_every_map_is_a_permutation_of_all_devices(data):
    everything = tuple(f"GPU-{n}" for n in range(data.draw(st.integers(1, 8))))
    count = data.draw(st.integers(0, len(everything)))
    origin = tuple(data.draw(st.permutations(everything))[:count])
    target = tuple(data.draw(st.permutations(everything))[:count])
    found = checkpoint.complete_mapping(origin, target, everything)
    if found is None:
        assert origin == target
        return
    assert sorted(found) == sorted(found.values()) == sorted(everything)
    assert all(found[old] == new for old, new in zip(origin, target, strict=True))


@pytest.mark.parametrize(("origin", "target"), [("a", ""), ("aa", "bc"), ("ab", "cc")])
def test_map_that_is_not_one_to_one_is_refused(origin, target):
    with pytest.raises(ValueError, match="one to one"):
        checkpoint.complete_mapping((*origin,), (*target,), ("a", "b", "c"))


@pytest.mark.parametrize(
    ("version", "suspend", "migrate"),
    [
        ("550.54.15", False, False),
        ("570.86.10", True, False),
        ("580.95.05", True, True),
        ("615.01", True, True),
        ("", True, True),
    ],
)
def test_driver_version_decides_suspend_and_migration(version, suspend, migrate):
    found = driver.capabilities(version)
    assert (found.suspend, found.migrate) == (suspend, migrate)
    assert bool(found.reason) == (not migrate)
    assert version in found.reason or migrate


def test_error_text_of_cuda_core_becomes_a_code():
    error = RuntimeError("CUDA_ERROR_NOT_READY: the work has not finished")
    assert checkpoint.classify(error)[0] == "CUDA_ERROR_NOT_READY"


def test_not_supported_error_does_not_ask_for_a_newer_driver():
    text = (
        "CUDA checkpointing is not supported by the installed NVIDIA driver. "
        "Upgrade to a driver version with CUDA checkpoint API support."
    )
    code, said = checkpoint.classify(RuntimeError(text))
    assert code == "CUDA_ERROR_NOT_SUPPORTED"
    assert "pgrade" not in said


def sample(free, *rows):
    shown = tuple(ProcessMemory(pid, size) for pid, size in rows)
    return DeviceSample("a", total=100, used=100 - free, reserved=0, free=free, processes=shown)


def test_process_list_tells_how_many_bytes_were_freed():
    assert freed_bytes([sample(10, (1, 40), (2, 50))], [sample(90)], {1}) == {"a": 40}


def test_without_listed_sizes_free_memory_tells_what_was_freed():
    assert freed_bytes([sample(10)], [sample(50)], {1}) == {"a": 40}
    assert freed_bytes([sample(10, (1, None))], [sample(50)], {1}) == {"a": 40}
    assert freed_bytes([sample(10)], [sample(5)], {1}) == {"a": 0}


def test_freed_bytes_include_memory_that_the_list_omits():
    # NVML's list may omit a context. This device has 100 bytes, and a context has at most 6 bytes.
    # So up to 6 bytes more than listed count as freed.
    before = [sample(10, (1, 40), (2, 30))]
    assert freed_bytes(before, [sample(55, (2, 30))], {1}) == {"a": 45}
    assert freed_bytes(before, [sample(70, (2, 30))], {1}) == {"a": 46}
    assert freed_bytes(before, [sample(30, (2, 30))], {1}) == {"a": 40}
    assert freed_bytes(before, [sample(55, (2, 29))], {1}) == {"a": 40}
    assert freed_bytes(before, [sample(85)], {1}) == {"a": 40}


def test_freed_bytes_are_unknown_without_a_sample():
    assert freed_bytes([sample(10, (1, 40))], None, {1}) == {"a": 40}
    assert freed_bytes([sample(10)], None, {1}) == {}


def test_children_inherit_no_misleading_variable():
    env = interpreter.child_environment(
        {"CUDA_VISIBLE_DEVICES": "", "GPUPOOL_SESSION": "s", "GPUPOOL_TOKEN": "t", "HOME": "/h"}
    )
    assert env == {"HOME": "/h"}


def test_children_of_a_broker_in_a_session_have_no_guard():
    session = {
        "LD_PRELOAD": "/run/x/gpupool-guard/libcuda.so.1:/jemalloc.so",
        "LD_LIBRARY_PATH": "/run/x/gpupool-guard:/emulator/lib",
        "GPUPOOL_PAGE": "/run/x/page",
        "GPUPOOL_SESSION": "s1",
        "EMUCUDA_MACHINE": "1x1GiB",
    }
    env = interpreter.child_environment(session)
    assert env == {
        "LD_PRELOAD": "/jemalloc.so",
        "LD_LIBRARY_PATH": "/emulator/lib",
        "EMUCUDA_MACHINE": "1x1GiB",
    }
