# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The self-test under the guard: what it accepts, and each check that can fail."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from jupyter_gpupool.devices.nvidia import guard_frame, selftest
from jupyter_gpupool.guard import install, page
from jupyter_gpupool.guard.page import Page
from tests.emulated import library_dir

MiB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def guard_library():
    """Build the guard if it is not built."""
    from jupyter_gpupool.guard import build

    build.compile()


@pytest.fixture(autouse=True)
def place(monkeypatch):
    """Make the self-test use a folder of this test. Fail if it leaves anything there."""
    with tempfile.TemporaryDirectory(prefix="gpupool-") as folder:  # a socket needs a short path
        monkeypatch.setattr(guard_frame, "_SHM", Path(folder))
        yield Path(folder)
        assert [*Path(folder).iterdir()] == []


def why(device) -> str:
    """Return the reason why the device is not guarded, although it can suspend."""
    assert (device.tier, device.can_suspend, device.can_migrate) == ("unguarded", True, True)
    return device.tier_reason


async def test_device_is_guarded_if_the_guard_passes_its_test(emulated):
    machine = emulated("2x1GiB,context=48MiB")
    async with machine.started(guard=True) as (service, devices):
        for device in devices:
            assert (device.tier, device.tier_reason) == ("guarded", "")
            assert device.can_suspend
            assert device.can_migrate
            assert service.context_bytes(device.uuid) == 48 * MiB
        assert service.guard_problem == ""
        samples = await service.sample()
    assert [(sample.used, sample.processes) for sample in samples] == [(0, ()), (0, ())]


async def test_devices_are_unguarded_if_the_guard_is_off(emulated):
    async with emulated().started() as (service, devices):
        assert {device.tier for device in devices} == {"unguarded"}
        assert service.guard_problem == "c.GPUPool.guard is False."


async def test_device_is_unguarded_without_a_compiled_guard(emulated, monkeypatch, tmp_path):
    monkeypatch.setattr(install, "_LIB", tmp_path)
    async with emulated("1x1GiB,context=16MiB").started(guard=True) as (service, (device,)):
        missing = f"The guard is not compiled: {tmp_path}/libcuda.so.1 is missing."
        assert (device.tier, device.can_suspend) == ("unguarded", True)
        assert device.tier_reason == f"The guard cannot be used. {missing}"
        assert service.guard_problem == device.tier_reason


async def test_guard_is_not_blamed_if_a_device_cannot_suspend(emulated):
    machine = emulated()
    machine.faults.set("checkpoint-refused", device=1)
    async with machine.started(guard=True) as (service, (good, bad)):
        assert good.tier == "guarded"
        assert (bad.tier, bad.can_suspend) == ("none", False)
        assert "guard" not in bad.tier_reason
        assert "CUDA_ERROR_NOT_SUPPORTED" in bad.tier_reason
        assert service.guard_problem == ""


async def test_full_device_is_guarded_only_after_a_test(emulated):
    machine = emulated("1x1GiB,context=16MiB")
    async with machine.target() as target:
        await target.do("context")
        await target.do("take", 1000 * MiB)
        async with machine.started(guard=True) as (service, (full,)):
            assert service.untested == {full.uuid}
            assert (full.tier, full.can_suspend) == ("unguarded", True)
            assert "too little free memory for the self-test" in service.guard_problem
            await target.end()
            assert (await service.self_test(full.uuid)).tier == "guarded"
            assert service.untested == set()
            assert service.guard_problem == ""


# ------------------------------------------------------------------ each check can fail


async def test_guard_fails_its_test_if_calls_go_around_it(emulated, monkeypatch, tmp_path):
    shutil.copytree(library_dir(), tmp_path / "lib")
    monkeypatch.setattr(install, "_LIB", tmp_path / "lib")
    async with emulated().started(guard=True) as (service, devices):
        assert [why(device) for device in devices] == [
            f"The guard did not pass its self-test on GPU {n}: "
            "the test program's calls did not go through the guard."
            for n in (0, 1)
        ]
        assert service.guard_problem == " ".join(why(device) for device in devices)


async def test_guard_that_allows_too_much_memory_fails_the_test(emulated, monkeypatch):
    monkeypatch.setattr(guard_frame, "TOO_MUCH", MiB)
    async with emulated().started(guard=True) as (_, (device, _)):
        assert "an allocation beyond the grant returned CUDA_SUCCESS" in why(device)


async def test_guard_that_counts_too_little_memory_fails_the_test(emulated, monkeypatch):
    monkeypatch.setattr(guard_frame, "SIZE", guard_frame.SIZE * 4)  # this still fits in the grant
    async with emulated().started(guard=True) as (_, (device, _)):
        assert "the guard counted only 4194304 of 16777216 bytes" in why(device)


async def test_guard_whose_gate_stays_open_fails_the_test(emulated, monkeypatch):
    set_gate = Page.set_gate
    monkeypatch.setattr(
        Page,
        "set_gate",
        lambda self, gate, **more: None if gate == page.CLOSED else set_gate(self, gate, **more),
    )
    async with emulated().started(guard=True) as (_, (device, _)):
        assert "a call went through the closed gate" in why(device)


async def test_gate_that_stays_closed_ends_the_test_in_bounded_time(emulated, monkeypatch):
    monkeypatch.setattr(selftest, "STEP_TIMEOUT", 3.0)
    set_gate, closed = Page.set_gate, set()

    def never_again(self, gate, **more):
        if self.path not in closed:
            set_gate(self, gate, **more)
        if gate == page.CLOSED:
            closed.add(self.path)

    monkeypatch.setattr(Page, "set_gate", never_again)
    async with emulated("1x1GiB,context=16MiB").started(guard=True) as (_, (device,)):
        assert (device.tier, device.can_suspend) == ("unguarded", True)
        assert "on GPU 0: the test did not finish: No answer to 'check' in" in device.tier_reason


async def test_hanging_worker_ends_the_test_in_bounded_time(emulated):
    machine = emulated("1x1GiB,context=16MiB")
    machine.faults.set("hang", op="lock", count=1)
    async with machine.started(guard=True, lock_timeout=0.5, call_timeout=3) as (_, (device,)):
        assert (device.tier, device.can_suspend) == ("unguarded", True)
        assert "on GPU 0: suspending a test process failed" in device.tier_reason


async def test_failed_restore_leaves_the_device_unguarded(emulated):
    machine = emulated("1x1GiB,context=16MiB")
    machine.faults.set("restore-failed", count=1)
    async with machine.started(guard=True) as (_, (device,)):
        assert (device.tier, device.can_suspend) == ("unguarded", True)
        assert "on GPU 0: resuming a test process failed" in device.tier_reason


async def test_device_is_unguarded_without_room_for_the_page(emulated, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(guard_frame, "_SHM", tmp_path / "none")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    async with emulated("1x1GiB,context=16MiB").started(guard=True) as (_, (device,)):
        assert (device.tier, device.can_suspend) == ("unguarded", True)
        assert device.tier_reason.startswith("The guard cannot be used. [Errno 20]")


def test_self_test_needs_only_one_writable_temporary_folder(monkeypatch, place):
    def none():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    # Replace gettempdir(): the real function tries the folders only once and keeps its answer.
    monkeypatch.setattr(tempfile, "gettempdir", none)
    folder = guard_frame._folder()
    assert folder.parent == place
    folder.rmdir()
    monkeypatch.setattr(guard_frame, "_SHM", place / "none")
    with pytest.raises(OSError, match="No usable temporary"):
        guard_frame._folder()


async def test_leftovers_of_a_killed_broker_are_removed(emulated, place):
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = place / f"gpupool-selftest-{ended.pid}-abc"
    alive = place / f"gpupool-selftest-{os.getpid()}-abc"
    for folder in (left, alive):
        folder.mkdir()
        (folder / "page").touch()
    async with emulated("1x1GiB,context=16MiB").started(guard=True) as (_, (device,)):
        assert device.tier == "guarded"
    assert not left.exists()
    assert (alive / "page").exists()
    shutil.rmtree(alive)


# ------------------------------------------------------------------ an earlier broker's result


async def test_known_device_keeps_its_tier_while_the_guard_exists(emulated, monkeypatch, tmp_path):
    machine = emulated("1x1GiB,context=16MiB")
    async with machine.started(guard=True) as (_, (device,)):
        pass
    known = {device.uuid: device}
    machine.faults.set("checkpoint-refused")  # after this, a self-test would fail
    async with machine.service(guard=True) as service:
        assert await service.start(known) == [device]
    async with machine.service() as service:
        assert await service.start(known) == [replace(device, tier="unguarded")]
        assert service.guard_problem == "c.GPUPool.guard is False."
    monkeypatch.setattr(install, "_LIB", tmp_path)
    async with machine.service(guard=True) as service:
        (found,) = await service.start(known)
        assert found.tier == "unguarded"
        assert "The guard is not compiled" in service.guard_problem


async def test_known_device_needs_a_new_test_with_the_guard(emulated):
    machine = emulated("1x1GiB,context=16MiB")
    async with machine.started() as (_, (device,)):
        pass
    async with machine.service(guard=True) as service:
        (found,) = await service.start({device.uuid: device})
        assert found.tier == "unguarded"
        assert "tested without the guard" in service.guard_problem
        assert (await service.self_test(device.uuid)).tier == "guarded"


# ------------------------------------------------------------------ a broker inside a session


async def test_broker_inside_a_session_can_test_its_guard(emulated, tmp_path):
    machine = emulated("1x1GiB,context=16MiB")
    # The broker runs inside an outer session. A new page has a closed gate, so this session waits.
    outer = Page.create(tmp_path / "outer", "outer", os.geteuid())
    try:
        folder = install.guard_directory(tmp_path)
        machine.env |= install.session_environment(folder, outer.path, machine.env)
        async with machine.started(guard=True) as (_, (device,)):
            assert device.tier == "guarded", device.tier_reason
        assert outer.read().slots == ()
    finally:
        outer.remove()
