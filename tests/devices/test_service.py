# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The service on the emulated driver: real child processes, NVIDIA's own clients, real bytes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jupyter_gpupool.devices.children import Child
from jupyter_gpupool.devices.nvidia.visibility import holders
from jupyter_gpupool.errors import DriverError
from jupyter_gpupool.procfs import ProcessId
from tests.emulated import device_files

MiB = 1 << 20
SESSION = "s1"

#: A machine with one device. It saves time, because the service tests each device at its start.
ONE = "1x1GiB,context=16MiB"


def held(samples, uuid, pid):
    """Return the bytes that NVML lists for a process; 0 if NVML does not list it."""
    sample = next(sample for sample in samples if sample.uuid == uuid)
    return sum(process.bytes or 0 for process in sample.processes if process.pid == pid)


# ------------------------------------------------------------------ discovery and self-test


async def test_discovery_finds_and_tests_every_device(emulated):
    machine = emulated("2x1GiB,context=16MiB")
    async with machine.started() as (service, devices):
        assert [device.index for device in devices] == [0, 1]
        for device in devices:
            assert device.uuid.startswith("GPU-")
            assert device.emulated
            assert "EMULATED" in device.name
            assert device.memory_total == 1 << 30
            assert device.tier == "unguarded", device.tier_reason
            assert device.can_suspend
            assert device.can_migrate
            assert device.tier_reason == ""
        assert service.problem == ""
        assert service.driver_version
        assert service.cuda_version
        samples = await service.sample()
    assert [sample.uuid for sample in samples] == [device.uuid for device in devices]
    for sample in samples:
        # No device memory is in use: the test programs have ended, and the workers have no context.
        assert (sample.used, sample.processes, sample.lost) == (0, (), "")
        assert sample.free + sample.reserved == sample.total


async def test_single_device_cannot_migrate(emulated):
    async with emulated("1x1GiB,context=16MiB").started() as (_, (device,)):
        assert device.can_suspend
        assert not device.can_migrate
        assert device.tier_reason == ""


async def test_refused_self_test_gives_the_lowest_tier_and_a_reason(emulated):
    machine = emulated()
    machine.faults.set("checkpoint-refused", device=1)
    async with machine.started() as (service, (good, bad)):
        assert good.can_suspend
        assert bad.tier == "none"
        assert not bad.can_suspend
        assert "self-test" in bad.tier_reason
        assert "CUDA_ERROR_NOT_SUPPORTED" in bad.tier_reason
        async with machine.target("1") as target:
            await target.do("context")
            outcome = await service.suspend(target.root, [bad.uuid], session=SESSION)
            assert outcome.status == "pinned"
            assert bad.tier_reason in outcome.message
        machine.faults.clear()
        assert (await service.self_test(bad.uuid)).can_suspend


async def test_full_device_is_untested_and_trusted_to_suspend(emulated):
    machine = emulated("2x1GiB,context=16MiB")
    async with machine.target() as target:
        await target.do("context")
        digest = await target.do("fill", 4 * MiB, 1)
        await target.do("take", 1000 * MiB)
        async with machine.started() as (service, (full, free)):
            assert service.untested == {full.uuid}
            assert (full.tier, full.can_suspend, full.can_migrate) == ("unguarded", True, False)
            assert "too little free memory for the self-test" in full.tier_reason
            assert (free.can_suspend, free.can_migrate) == (True, False)
            # The test of ``free`` finds no room on the full device, so it does not try to move its
            # program there.
            other = f"Another GPU had too little free memory for the self-test: Device {full.uuid}"
            assert other in free.tier_reason
            outcome = await service.suspend(target.root, [full.uuid], session=SESSION)
            assert outcome.status == "suspended", outcome.message
            tested = await service.self_test(full.uuid)
            assert (tested.can_migrate, tested.tier_reason) == (True, "")
            assert service.untested == set()
            resumed = await service.resume(
                target.root, [full.uuid], [full.uuid], session=SESSION, need=outcome.freed
            )
            assert resumed.status == "resumed", resumed.message
            assert await target.do("digest", 1) == digest


async def test_known_devices_are_not_tested_again(emulated):
    machine = emulated("2x1GiB,context=16MiB")
    async with machine.started() as (_, devices):
        pass
    machine.faults.set("checkpoint-refused")  # after this, a self-test would fail
    async with machine.service() as service:
        first = devices[0]
        found = await service.start(known={first.uuid: first, "GPU-gone": first})
        assert found[0] == first
        assert not found[1].can_suspend


async def test_missing_driver_is_explained(tmp_path):
    from jupyter_gpupool.devices.nvidia.service import DeviceService

    env = {k: v for k, v in os.environ.items() if not k.startswith(("LD_", "GPUPOOL"))}
    service = DeviceService(env=env)
    try:
        assert await service.start() == []
        assert "No NVIDIA driver was found" in service.problem
        assert "c.GPUPool.emulate" in service.problem
        with pytest.raises(DriverError, match="No NVIDIA driver"):
            await service.unlock(ProcessId(os.getpid(), 0), session=SESSION)
    finally:
        await service.close()


def test_broker_process_loads_no_vendor_library(emulated):
    code = (
        "import asyncio, sys; from jupyter_gpupool.devices.nvidia.service import DeviceService\n"
        "async def main():\n"
        "    service = DeviceService(); devices = await service.start()\n"
        "    await service.sample(); await service.close(); print(len(devices))\n"
        "asyncio.run(main())\n"
        "assert not {'pynvml', 'cuda', 'numpy'} & {*sys.modules}, 'loaded'\n"
        "assert 'libcuda' not in open('/proc/self/maps').read()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**emulated("1x1GiB").env, "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


# ------------------------------------------------------------------ suspend and resume


async def test_suspend_and_resume_keep_every_byte(emulated):
    machine = emulated()
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        await target.do("context")
        digest = await target.do("fill", 40 * MiB, 1)
        address = await target.do("address", 1)
        before = held(await service.sample(), uuid, target.pid)
        assert before >= 56 * MiB

        outcome = await service.suspend(target.root, [uuid], session=SESSION)
        assert (outcome.status, outcome.message) == ("suspended", "")
        assert outcome.freed == {uuid: before}
        assert outcome.cuda is True
        assert outcome.processes == (target.root,)
        assert 0 < outcome.driver_seconds < outcome.seconds
        samples = await service.sample()
        assert samples[0].used == 0
        assert await service.driver_state(target.root, session=SESSION) == "checkpointed"

        resumed = await service.resume(
            target.root, [uuid], [uuid], session=SESSION, need=outcome.freed
        )
        assert (resumed.status, resumed.message) == ("resumed", "")
        assert 0 < resumed.driver_seconds < resumed.seconds
        assert await service.driver_state(target.root, session=SESSION) == "running"
        assert await target.do("digest", 1) == digest
        assert await target.do("address", 1) == address
        assert held(await service.sample(), uuid, target.pid) == before


async def test_suspended_session_resumes_on_another_device(emulated):
    machine = emulated("3x1GiB,context=16MiB")
    async with machine.started() as (service, devices), machine.target() as target:
        first, last = devices[0].uuid, devices[2].uuid
        await target.do("context")
        digest = await target.do("fill", 8 * MiB, 1)
        there = await service.suspend(target.root, [first], session=SESSION)
        resumed = await service.resume(
            target.root, [last], [first], session=SESSION, need={last: there.freed[first]}
        )
        assert resumed.status == "resumed", resumed.message
        assert await target.do("digest", 1) == digest
        samples = await service.sample()
        assert held(samples, last, target.pid) == there.freed[first]
        assert held(samples, first, target.pid) == 0
        # Now the session moves back.
        back = await service.suspend(target.root, [last], session=SESSION)
        assert back.freed == {last: there.freed[first]}
        resumed = await service.resume(
            target.root, [first], [last], session=SESSION, need={first: back.freed[last]}
        )
        assert resumed.status == "resumed", resumed.message
        assert await target.do("digest", 1) == digest


async def test_outcome_includes_the_time_spent_waiting_for_a_device(emulated, waiting):
    """A session may wait for other sessions that move on its device.

    ``residence.move_cost`` needs the time of this wait.
    """
    _, until_async = waiting
    machine = emulated(ONE)
    async with machine.started() as (service, (device,)), machine.target() as target:
        await target.do("context")
        async with service._workers.locked([device.uuid]):
            task = asyncio.create_task(service.suspend(target.root, [device.uuid], session=SESSION))
            await until_async(lambda: service._workers._locks[device.uuid]._waiters)
            begun = time.monotonic()
            await service.sample()
            least = time.monotonic() - begun
        assert (await task).waited >= least


async def test_session_without_a_context_has_nothing_to_suspend(emulated):
    machine = emulated(ONE)
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        outcome = await service.suspend(target.root, [uuid], session=SESSION)
        # The process has imported the bindings, which may have loaded the library. It has not
        # called cuInit.
        assert (outcome.status, outcome.cuda, outcome.freed) == ("nothing", False, {})
        assert await service.driver_state(target.root, session=SESSION) == "none"


async def test_lack_of_room_is_found_before_any_driver_call(emulated):
    machine = emulated(ONE)
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        await target.do("context")
        digest = await target.do("fill", 8 * MiB, 1)
        await target.do("take", 300 * MiB)
        outcome = await service.suspend(target.root, [uuid], session=SESSION)
        async with machine.target() as other:
            await other.do("context")
            await other.do("take", 800 * MiB)
            resumed = await service.resume(
                target.root, [uuid], [uuid], session=SESSION, need=outcome.freed
            )
            assert resumed.status == "no-room"
            assert "MiB free" in resumed.message
            assert await service.driver_state(target.root, session=SESSION) == "checkpointed"
        resumed = await service.resume(
            target.root, [uuid], [uuid], session=SESSION, need=outcome.freed
        )
        assert resumed.status == "resumed", resumed.message
        assert await target.do("digest", 1) == digest


async def test_failed_restore_is_reported_as_lost(emulated):
    machine = emulated(ONE)
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        await target.do("context")
        outcome = await service.suspend(target.root, [uuid], session=SESSION)
        machine.faults.set("restore-failed")
        resumed = await service.resume(
            target.root, [uuid], [uuid], session=SESSION, need=outcome.freed
        )
        assert resumed.status == "failed"
        assert "CUDA_ERROR_OPERATING_SYSTEM" in resumed.message
        assert await service.driver_state(target.root, session=SESSION) == "failed"


# ------------------------------------------------------------------ sessions of several processes


async def test_processes_of_a_session_are_suspended_children_first(emulated):
    machine = emulated(ONE)
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        await target.do("context")
        digest = await target.do("fill", 8 * MiB, 1)
        child = await target.do("spawn")
        await target.child("context")
        child_digest = await target.child("fill", 4 * MiB, 2)
        outcome = await service.suspend(target.root, [uuid], session=SESSION)
        assert outcome.status == "suspended", outcome.message
        assert [process.pid for process in outcome.processes] == [child, target.pid]
        assert outcome.freed[uuid] >= (8 + 4 + 2 * 16) * MiB
        assert (await service.sample())[0].used == 0
        resumed = await service.resume(
            target.root, [uuid], [uuid], session=SESSION, need=outcome.freed
        )
        assert resumed.status == "resumed", resumed.message
        assert await target.do("digest", 1) == digest
        assert await target.child("digest", 2) == child_digest


async def test_background_process_is_suspended_with_its_session(emulated):
    machine = emulated(ONE)
    async with (
        machine.started() as (service, devices),
        machine.target(GPUPOOL_SESSION=SESSION) as target,
        machine.target(GPUPOOL_SESSION=SESSION) as orphan,
        machine.target(GPUPOOL_SESSION="other") as other,
    ):
        uuid = devices[0].uuid
        for process in (target, orphan, other):
            await process.do("context")
        outcome = await service.suspend(target.root, [uuid], session=SESSION)
        assert outcome.status == "suspended", outcome.message
        assert outcome.processes == (orphan.root, target.root)
        assert await service.driver_state(other.root, session="other") == "running"


@pytest.mark.parametrize("victim", ["parent", "child"])
async def test_refusal_of_one_process_undoes_the_whole_suspend(emulated, victim):
    machine = emulated(ONE)
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        await target.do("context")
        digest = await target.do("fill", 4 * MiB, 1)
        child = await target.do("spawn")
        await target.child("context")
        child_digest = await target.child("fill", 4 * MiB, 2)
        pid = target.pid if victim == "parent" else child
        machine.faults.set("checkpoint-refused", pid=pid)
        used = (await service.sample())[0].used
        outcome = await service.suspend(target.root, [uuid], session=SESSION)
        assert outcome.status == "pinned"
        assert str(pid) in outcome.message
        assert "CUDA_ERROR_NOT_SUPPORTED" in outcome.message
        assert (outcome.freed, outcome.processes) == ({}, ())
        assert await service.driver_state(target.root, session=SESSION) == "running"
        assert (await service.sample())[0].used == used
        assert await target.do("digest", 1) == digest
        assert await target.child("digest", 2) == child_digest


# ------------------------------------------------------------------ refusals


async def test_managed_memory_pins_a_process_that_keeps_running(emulated):
    machine = emulated(ONE)
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        await target.do("context")
        digest = await target.do("fill", 4 * MiB, 1)
        await target.do("managed", MiB)
        outcome = await service.suspend(target.root, [uuid], session=SESSION)
        assert outcome.status == "pinned"
        assert "managed memory" in outcome.message
        assert "pgrade" not in outcome.message
        assert outcome.cuda is True
        assert await target.do("digest", 1) == digest


async def test_process_whose_work_does_not_drain_is_left_running(emulated):
    machine = emulated(ONE)
    async with (
        machine.started(lock_timeout=0.1) as (service, devices),
        machine.target() as target,
    ):
        await target.do("context")
        digest = await target.do("fill", 4 * MiB, 1)
        machine.faults.set("lock-timeout")
        outcome = await service.suspend(target.root, [devices[0].uuid], session=SESSION)
        assert outcome.status == "drain"
        assert "0.1 s" in outcome.message
        assert await target.do("digest", 1) == digest


async def test_process_that_reuses_a_pid_is_not_touched(emulated):
    machine = emulated(ONE)
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        await target.do("context")
        stale = ProcessId(target.pid, target.root.start_time - 1)
        outcome = await service.suspend(stale, [uuid], session=SESSION)
        assert outcome.status == "gone"
        resumed = await service.resume(stale, [uuid], [uuid], session=SESSION, need={})
        assert resumed.status == "gone"
        assert await service.driver_state(stale, session=SESSION) == "gone"
        assert await service.driver_state(target.root, session=SESSION) == "running"


async def test_unknown_device_is_named(emulated):
    async with emulated("1x1GiB").started() as (service, _):
        with pytest.raises(DriverError, match="There is no device GPU-nowhere"):
            await service.suspend(ProcessId(1, 1), ["GPU-nowhere"], session=SESSION)


async def test_retest_of_a_missing_gpu_says_how_to_get_it_back(emulated):
    async with emulated("1x1GiB").started() as (service, _):
        with pytest.raises(DriverError, match="pause the whole pool and resume it"):
            await service.retest("GPU-nowhere")


# ------------------------------------------------------------------ the cost of a context


@pytest.mark.parametrize("pids", [True, False], ids=["listed", "not-listed"])
async def test_cost_of_a_context_equals_what_the_driver_takes(emulated, pids):
    machine = emulated("2x1GiB,context=48MiB")
    if not pids:  # NVML lists no process, as in a container; the free memory shows the cost
        machine.faults.set("nvml-missing-pids")
    async with machine.started() as (service, devices):
        for device in devices:
            assert service.context_bytes(device.uuid) == device.context_bytes == 48 * MiB


async def test_usual_cost_is_assumed_if_no_context_was_seen(emulated):
    machine = emulated("1x1GiB,context=16MiB")
    async with machine.target() as target:
        await target.do("context")
        await target.do("take", 1000 * MiB)
        async with machine.started() as (service, (full,)):
            assert full.context_bytes == 0
            assert service.context_bytes(full.uuid) == 64 * MiB


async def test_next_broker_knows_the_cost_of_a_context(emulated):
    machine = emulated("1x1GiB,context=48MiB")
    async with machine.started() as (_, (device,)):
        pass
    async with machine.service() as service:
        await service.start(known={device.uuid: device})
        assert service.context_bytes(device.uuid) == 48 * MiB


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("hazard", [True, False])
async def test_self_test_suspends_its_program_on_a_driver_that_hangs(
    emulated, monkeypatch, hazard, guard
):
    """On a driver that hangs when a restored process ends, the self-test suspends its program.

    A suspended process has no device file open, so the driver does not hang when SIGKILL ends the
    program.
    """
    machine, seen = emulated(), []
    close, begin = Child.close, device_files(machine.env["EMUCUDA_STATE"])

    async def look_and_close(child):
        if child.program == "selftest":
            seen.append(child.pid in {holder.process.pid for holder in holders(begin)[0]})
        await close(child)

    monkeypatch.setattr(Child, "close", look_and_close)
    version_file = machine.state_dir / "version"
    if hazard:
        version_file.parent.mkdir(exist_ok=True)
        version_file.write_text("Open Kernel Module for x86_64  595.71.05")
    async with machine.service(guard=guard, version_file=version_file) as service:
        devices = await service.start()
    assert [d.can_suspend and d.can_migrate for d in devices] == [True, True]
    assert [d.tier for d in devices] == ["guarded" if guard else "unguarded"] * 2
    assert seen == [not hazard] * 2
