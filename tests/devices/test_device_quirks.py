# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The device service on drivers with quirks.

A quirk is a way in which real drivers may differ. The emulator's README lists the quirks. The
docstring of a test names the quirk that the test turns on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import pytest

from jupyter_gpupool import procfs
from jupyter_gpupool.devices import Continued
from jupyter_gpupool.devices.children import ChildLost
from jupyter_gpupool.devices.nvidia import service as service_module
from jupyter_gpupool.devices.nvidia.calls import SessionCalls
from jupyter_gpupool.errors import DriverError
from jupyter_gpupool.pool.attribution import slack

MiB = 1 << 20
SESSION = "s1"
ONE, TWO = "1x1GiB,context=64MiB", "2x1GiB,context=64MiB"


async def beginning(service, uuid, op, task):
    """Wait until the device's worker makes the driver call ``op``.

    Fail if ``task`` ends first.
    """
    while service._workers.children[uuid].current != op:
        assert not task.done(), f"it ended without {op}: {task.result()}"
        await asyncio.sleep(0.002)


async def filled(target, size=16 * MiB):
    """Make a context and fill a buffer with known bytes in the target; return their hash."""
    await target.do("context")
    return await target.do("fill", size, 1)


async def suspended(service, target, uuid):
    outcome = await service.suspend(target.root, [uuid], session=SESSION)
    assert outcome.status == "suspended", outcome
    return outcome


async def back(service, target, to, origin, need):
    return await service.resume(target.root, [to], [origin], session=SESSION, need={to: need})


async def resumed(service, target, to, origin, need):
    outcome = await back(service, target, to, origin, need)
    assert outcome.status == "resumed", outcome


# ------------------------------------------------------------------ memory


async def test_memory_used_before_any_session_counts_as_driver_memory(emulated):
    """residue: the service measures the residue after its self-tests.

    A part of the residue appears only with the first context.
    """
    machine = emulated(TWO)
    machine.faults.set("residue", device=0, bytes="100MiB")
    async with machine.started() as (service, devices):
        assert [d.tier for d in devices] == ["unguarded"] * 2
        assert devices[0].memory_reserved == 100 * MiB + slack(1 << 30)
        assert devices[1].memory_reserved == 0
        machine.faults.clear()
    # When a broker restarts, the memory in use may belong to a session. So the service does not
    # measure again, and keeps the earlier figure.
    async with machine.service() as service:
        again = await service.start({d.uuid: d for d in devices})
        assert [d.memory_reserved for d in again] == [d.memory_reserved for d in devices]


async def test_memory_beyond_a_drivers_residue_is_foreign(emulated):
    """residue: the service counts at most an eighth of a device as the driver's memory.

    It counts the rest as memory of processes that NVML does not list.
    """
    machine = emulated(ONE)
    machine.faults.set("residue", bytes="600MiB")
    async with machine.started() as (_, devices):
        assert devices[0].memory_reserved == 128 * MiB + slack(1 << 30)


async def test_resume_reserves_memory_that_the_list_does_not_show(emulated):
    """nvml-less: NVML's list omits the context.

    So the service must reserve room for the context: a resume without this room is fatal.
    """
    machine = emulated(ONE)
    machine.faults.set("nvml-less", bytes="60MiB")
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        assert devices[0].context_bytes == 64 * MiB
        digest = await filled(target)
        outcome = await suspended(service, target, uuid)
        assert outcome.freed == {uuid: 80 * MiB}
        await resumed(service, target, uuid, uuid, outcome.freed[uuid])
        assert await target.do("digest", 1) == digest


async def test_memory_that_another_process_frees_does_not_count(emulated):
    """nvml-less: a suspend does not count the memory that another process frees meanwhile."""
    machine = emulated(ONE)
    machine.faults.set("nvml-less", bytes="60MiB")
    async with (
        machine.started() as (service, devices),
        machine.target() as target,
        machine.target() as other,
    ):
        await filled(target)
        await filled(other)
        machine.faults.set("slow-copies", bandwidth="32MiB/s", pid=target.pid)
        task = asyncio.create_task(suspended(service, target, devices[0].uuid))
        await beginning(service, devices[0].uuid, "checkpoint", task)
        await other.end()
        assert (await task).freed == {devices[0].uuid: 20 * MiB}


@pytest.mark.parametrize("size", [0, 4 * MiB])
async def test_small_memory_left_after_a_suspend_causes_no_delay(emulated, size):
    """suspend-keeps: NVML still lists the suspended process, with no memory or a few MiB."""
    machine = emulated(ONE)
    machine.faults.set("suspend-keeps", bytes=size)
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        digest = await filled(target)
        outcome = await suspended(service, target, uuid)
        assert (outcome.message, outcome.freed) == ("", {uuid: 80 * MiB})
        await resumed(service, target, uuid, uuid, outcome.freed[uuid])
        assert await target.do("digest", 1) == digest


async def test_suspend_succeeds_if_nvml_drops_the_process_late(emulated, monkeypatch):
    """nvml-lag: NVML lists a suspended process for a long time, but the service stops waiting.

    The service still counts the freed bytes correctly.
    """
    monkeypatch.setattr("jupyter_gpupool.devices.nvidia.sampler.FREED_TIMEOUT", 0.2)
    machine = emulated(ONE)
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        digest = await filled(target)
        machine.faults.set("nvml-lag", ms=3_600_000)
        outcome = await suspended(service, target, uuid)
        assert "still shows" in outcome.message
        assert outcome.freed == {uuid: 80 * MiB}
        await resumed(service, target, uuid, uuid, outcome.freed[uuid])
        assert await target.do("digest", 1) == digest


async def test_free_memory_is_used_if_nvml_lists_a_process_late(emulated):
    """nvml-late: the service suspends the process before NVML lists it."""
    machine = emulated(ONE)
    machine.faults.set("nvml-late", ms=3_600_000)
    async with machine.started() as (service, devices), machine.target() as target:
        await filled(target)
        outcome = await suspended(service, target, devices[0].uuid)
        assert (outcome.message, outcome.freed) == ("", {devices[0].uuid: 80 * MiB})


async def test_second_suspend_counts_memory_the_resume_added(emulated):
    """restore-more: the service counts the freed bytes again at each suspend."""
    machine = emulated(ONE)
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        digest = await filled(target)
        machine.faults.set("restore-more", bytes="16MiB", count=1)
        for has in (80 * MiB, 96 * MiB):
            outcome = await suspended(service, target, uuid)
            assert outcome.freed == {uuid: has}
            await resumed(service, target, uuid, uuid, has)
        assert await target.do("digest", 1) == digest


# ------------------------------------------------------------------ NVML that waits


async def test_sample_waits_while_nvml_waits_for_a_copy(emulated):
    """nvml-waits: a sample exceeds its time-out. No device is lost, and no process is replaced."""
    machine = emulated(TWO)
    async with (
        machine.started(sample_timeout=1.0) as (service, devices),
        machine.target() as target,
        machine.target(device="1") as other,
    ):
        first, second = (d.uuid for d in devices)
        digest = await filled(target, 32 * MiB)
        await filled(other)
        machine.faults.set("nvml-waits")
        machine.faults.set("slow-copies", bandwidth="10MiB/s", pid=target.pid)
        task = asyncio.create_task(suspended(service, target, first))
        await beginning(service, first, "checkpoint", task)
        monitor = service._sampler.child.pid
        samples = asyncio.create_task(service.sample())
        # The suspend of the other session gives up early. Otherwise this session would stay locked
        # until the end of the copy.
        outcome = await service.suspend(other.root, [second], session="s2")
        assert outcome.status == "drain"
        assert "while the driver copies the memory of another kernel" in outcome.message
        assert await service.driver_state(other.root, session="s2") == "running"
        assert not task.done()
        assert [s.lost for s in await samples] == ["", ""]
        outcome = await task
        assert outcome.freed == {first: 96 * MiB}
        assert service._sampler.child.pid == monitor
        assert machine.lost == []
        machine.faults.clear("slow-copies")
        await resumed(service, target, first, first, outcome.freed[first])
        assert await target.do("digest", 1) == digest


async def test_sample_may_begin_before_a_copy_and_end_after_the_copy(emulated, monkeypatch):
    machine = emulated(ONE)
    async with machine.started(sample_timeout=2.0) as (service, _):
        sampler, late = service._sampler, asyncio.Event()
        make = sampler._more

        def told():
            more = make()
            return lambda: (late.set(), more())[1]

        monkeypatch.setattr(sampler, "_more", told)
        monitor = sampler.child.pid
        os.kill(monitor, signal.SIGSTOP)
        samples = asyncio.create_task(service.sample())
        while sampler.child.current != "sample":
            await asyncio.sleep(0)
        with sampler.copying(3600.0):
            await late.wait()
        os.kill(monitor, signal.SIGCONT)
        assert [s.lost for s in await samples] == [""]
        assert sampler.child.pid == monitor


async def test_nvml_that_hangs_without_a_copy_is_replaced(emulated):
    machine = emulated(ONE)
    async with machine.started(sample_timeout=1.0) as (service, _):
        with service._sampler.copying(3600.0):
            pass
        first = service._sampler.child.pid
        os.kill(first, signal.SIGSTOP)
        with pytest.raises(DriverError, match="NVML did not answer"):
            await service.sample()
        await service.sample()
        assert service._sampler.child.pid != first


async def test_nvml_that_hangs_during_endless_copies_is_replaced(emulated):
    machine = emulated(ONE)
    async with machine.started(sample_timeout=1.0) as (service, _):
        sampler = service._sampler
        first = sampler.child.pid
        os.kill(first, signal.SIGSTOP)
        samples = asyncio.create_task(service.sample())
        while not samples.done():
            with sampler.copying(0.5):
                await asyncio.wait({samples}, timeout=0.05)
        with pytest.raises(DriverError, match="NVML did not answer"):
            await samples
        await service.sample()
        assert sampler.child.pid != first


async def test_service_waits_for_a_slow_copy_that_makes_progress(emulated, monkeypatch):
    """The checkpoint exceeds its time-out several times.

    The worker ends, but the copy continues.
    """
    monkeypatch.setattr("jupyter_gpupool.devices.nvidia.calls.PROGRESS", 1 * MiB)
    machine = emulated(ONE)
    async with (
        machine.started(call_timeout=1.0) as (service, devices),
        machine.target() as target,
    ):
        uuid = devices[0].uuid
        digest = await filled(target, 32 * MiB)
        machine.faults.set("slow-copies", bandwidth="4MiB/s", pid=target.pid)
        outcome = await suspended(service, target, uuid)
        assert outcome.freed == {uuid: 96 * MiB}
        machine.faults.clear()
        await resumed(service, target, uuid, uuid, outcome.freed[uuid])
        assert await target.do("digest", 1) == digest


class Silent:
    """A worker whose driver no longer answers."""

    async def call(self, op, timeout, **fields):
        raise ChildLost(f"No answer to {op!r} in {timeout:g} s.", hung=True)

    ask = call


@pytest.mark.parametrize("op", ["checkpoint", "restore"])
@pytest.mark.parametrize(
    ("sizes", "looks"),
    [
        pytest.param([100, 400] * 10, 3, id="a thread takes memory and gives it back without end"),
        pytest.param([100, 200, 300, 400], 5, id="a copy that comes to an end, and hangs"),
        pytest.param([100, 0], 3, id="it cannot be read any more"),
    ],
)
async def test_memory_that_rises_and_falls_is_not_progress(monkeypatch, op, sizes, looks):
    """Other operations on the device wait for this call, so the call must end."""
    seen = []

    def resident(_):
        assert len(seen) < 20, "it never ends"
        seen.append(sizes[min(len(seen), len(sizes) - 1)] * MiB)
        return seen[-1], 0

    monkeypatch.setattr(procfs, "resident", resident)
    here = procfs.identify(os.getpid())
    silent = SessionCalls(Silent(), here, SESSION, lock_timeout=1.0, call_timeout=1.0)
    answer = await silent.call(op, here)
    assert (answer.outcome, len(seen)) == ("hung", looks)


# ------------------------------------------------------------------ restore


async def test_failed_restore_that_keeps_the_state_can_be_repeated(emulated):
    """restore-keeps-state: after a failed restore, the driver still has the state."""
    machine = emulated(TWO)
    machine.faults.set("restore-keeps-state")
    async with machine.started() as (service, devices), machine.target() as target:
        first, second = (d.uuid for d in devices)
        digest = await filled(target)
        need = (await suspended(service, target, first)).freed[first]
        machine.faults.set("restore-failed", device=0)
        outcome = await back(service, target, first, first, need)
        assert (outcome.status, outcome.stay) == ("refused", False)
        assert "did not resume process" in outcome.message
        assert await service.driver_state(target.root, session=SESSION) == "checkpointed"
        await resumed(service, target, second, first, need)
        assert await target.do("digest", 1) == digest


async def test_restore_without_room_can_keep_the_state(emulated):
    """restore-keeps-state: the caller does not say how many bytes the restore needs.

    So the service cannot check for room, and lets the driver try the restore.
    """
    machine = emulated(ONE)
    machine.faults.set("restore-keeps-state")
    async with (
        machine.started() as (service, devices),
        machine.target() as target,
        machine.target() as hog,
    ):
        uuid = devices[0].uuid
        digest = await filled(target)
        await suspended(service, target, uuid)
        await hog.do("context")
        await hog.do("take", 900 * MiB)
        outcome = await back(service, target, uuid, uuid, 0)
        assert outcome.status == "refused"
        assert "CUDA_ERROR_OUT_OF_MEMORY" in outcome.message
        await hog.end()
        await resumed(service, target, uuid, uuid, 0)
        assert await target.do("digest", 1) == digest


async def test_refused_resume_suspends_restored_processes_again(emulated):
    """restore-keeps-state: the driver refuses to resume one of two processes.

    The whole session then stays suspended.
    """
    machine = emulated(ONE)
    machine.faults.set("restore-keeps-state")
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        digest = await filled(target)
        child = await target.do("spawn")
        await target.child("context")
        theirs = await target.child("fill", 4 * MiB, 2)
        need = (await suspended(service, target, uuid)).freed[uuid]
        machine.faults.set("restore-failed", pid=child)
        outcome = await back(service, target, uuid, uuid, need)
        assert outcome.status == "refused", outcome
        assert (await service.sample())[0].used == 0
        machine.faults.clear("restore-failed")
        await resumed(service, target, uuid, uuid, need)
        assert await target.do("digest", 1) == digest
        assert await target.child("digest", 2) == theirs


async def test_undo_retries_a_restore_until_it_succeeds(emulated):
    """restore-keeps-state: the driver suspends one process and refuses the other process.

    Both processes must run again.
    """
    machine = emulated(ONE)
    machine.faults.set("restore-keeps-state")
    async with machine.started() as (service, devices), machine.target() as target:
        digest = await filled(target)
        child = await target.do("spawn")
        await target.child("context")
        theirs = await target.child("fill", 4 * MiB, 2)
        machine.faults.set("checkpoint-refused", pid=target.pid)
        machine.faults.set("restore-failed", pid=child, count=3)
        outcome = await service.suspend(target.root, [devices[0].uuid], session=SESSION)
        assert outcome.status == "pinned", outcome
        assert await target.do("digest", 1) == digest
        assert await target.child("digest", 2) == theirs


async def test_suspend_that_cannot_be_undone_is_kept_and_retried(emulated, waiting):
    """restore-keeps-state: the driver has the state, so the session is not lost."""
    machine = emulated(ONE)
    machine.faults.set("restore-keeps-state")
    _, until = waiting
    async with machine.started() as (service, devices), machine.target() as target:
        digest = await filled(target)
        child = await target.do("spawn")
        await target.child("context")
        theirs = await target.child("fill", 4 * MiB, 2)
        machine.faults.set("checkpoint-refused", pid=target.pid)
        machine.faults.set("restore-failed", pid=child)
        told = []
        suspending = asyncio.ensure_future(
            service.suspend(target.root, [devices[0].uuid], session=SESSION, on_kept=told.append)
        )
        await until(lambda: told, 60)
        assert f"Process {child} is not back on its GPU yet" in told[0]
        # The service keeps trying to restore the process. Meanwhile, it serves other processes.
        async with machine.target() as other:
            await other.do("context")
            assert await service.driver_state(other.root, session="other") == "running"
        assert not suspending.done()
        machine.faults.clear("restore-failed")
        outcome = await asyncio.wait_for(suspending, 90)
        assert outcome.status == "pinned", outcome
        assert await target.do("digest", 1) == digest
        assert await target.child("digest", 2) == theirs


async def test_undone_suspend_is_restored_only_with_enough_room(emulated, waiting):
    """A restore without room is fatal: the process stays suspended until the memory is free."""
    machine = emulated("1x256MiB,context=16MiB")
    _, until = waiting
    async with machine.started() as (service, devices), machine.target() as target:
        digest = await filled(target)
        child = await target.do("spawn")
        await target.child("context")
        theirs = await target.child("fill", 64 * MiB, 2)
        machine.faults.set("restore-keeps-state")
        machine.faults.set("checkpoint-refused", pid=target.pid)
        machine.faults.set("restore-failed", pid=child)
        told = []
        suspending = asyncio.ensure_future(
            service.suspend(target.root, [devices[0].uuid], session=SESSION, on_kept=told.append)
        )
        async with machine.target() as thief:
            await thief.do("context")
            await until_taken(thief, suspending)
            await until(lambda: told, 60)
            assert "MiB free" in told[0]
            machine.faults.clear("restore-failed")
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(suspending), 2)
        outcome = await asyncio.wait_for(suspending, 90)
        assert outcome.status == "pinned", outcome
        assert await target.do("digest", 1) == digest
        assert await target.child("digest", 2) == theirs


async def test_landed_says_that_a_process_is_still_suspended(emulated):
    """restore-keeps-state: the driver refuses the restore, but keeps the state."""
    machine = emulated(ONE)
    machine.faults.set("restore-keeps-state")
    async with machine.started() as (service, devices), machine.target() as target:
        digest = await filled(target)
        outcome = await service.suspend(target.root, [devices[0].uuid], session=SESSION)
        assert outcome.status == "suspended", outcome
        machine.faults.set("restore-failed", pid=target.pid)
        found = await service.landed(target.root, session=SESSION)
        assert (found.state, found.refused) == ("checkpointed", True)
        assert f"Process {target.pid} is not back on its GPU yet" in found.problem
        machine.faults.clear("restore-failed")
        assert await service.landed(target.root, session=SESSION) == Continued("checkpointed")
        assert await target.do("digest", 1) == digest


async def test_landing_that_cannot_be_undone_is_kept_and_retried(emulated, waiting):
    """restore-keeps-state: the driver refuses the move, and at first also the way back."""
    machine = emulated(TWO)
    machine.faults.set("restore-keeps-state")
    _, until = waiting
    async with machine.started() as (service, devices), machine.target() as target:
        origin, place = (device.uuid for device in devices)
        digest = await filled(target)
        told, steps = [], []
        machine.faults.set("restore-failed", pid=target.pid)
        landing = asyncio.ensure_future(
            service.land(
                target.root, [place], [origin], session=SESSION, need={place: 80 * MiB},
                restoring=lambda: steps.append("restoring"),
                staying=lambda: steps.append("staying"), on_kept=told.append,
            )
        )  # fmt: skip
        await until(lambda: told, 60)
        assert steps == ["restoring", "staying"]
        assert f"Process {target.pid} is not back on its GPU yet" in told[0]
        state = await service.driver_state(target.root, session=SESSION)
        assert (state, landing.done()) == ("checkpointed", False)
        machine.faults.clear("restore-failed")
        outcome = await asyncio.wait_for(landing, 90)
        assert outcome.status == "refused", outcome
        assert "not back on its GPU yet" not in outcome.message
        assert await target.do("digest", 1) == digest
        used = {sample.uuid: sample.used for sample in await service.sample()}
        assert used[origin] > 0
        assert used[place] == 0


async def test_kept_state_counts_as_lost_after_many_refusals(emulated, monkeypatch):
    """restore-hides-loss: the driver says that it has the state, but refuses each restore."""
    monkeypatch.setattr(service_module, "KEPT_PATIENCE", 1.0)
    monkeypatch.setattr(service_module, "KEPT_PAUSE", 1.0)
    machine = emulated(ONE)
    machine.faults.set("restore-hides-loss")
    async with machine.started() as (service, devices), machine.target() as target:
        await filled(target)
        child = await target.do("spawn")
        await target.child("context")
        machine.faults.set("checkpoint-refused", pid=target.pid)
        machine.faults.set("restore-failed", pid=child, count=1)
        outcome = await service.suspend(target.root, [devices[0].uuid], session=SESSION)
        assert outcome.status == "failed"
        assert f"times to restore process {child}, although there was room" in outcome.message
        assert "tries again" not in outcome.message


async def test_bring_back_ends_with_the_loss_of_the_state(emulated, monkeypatch):
    """restore-hides-loss: the driver says that it has the state, but refuses each restore."""
    monkeypatch.setattr(service_module, "KEPT_PATIENCE", 1.0)
    monkeypatch.setattr(service_module, "KEPT_PAUSE", 1.0)
    machine = emulated(ONE)
    machine.faults.set("restore-hides-loss")
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        await filled(target)
        await suspended(service, target, uuid)
        machine.faults.set("restore-failed", pid=target.pid, count=1)
        told = []
        lost = await service.bring_back(
            target.root, session=SESSION, origin=[uuid], on_kept=told.append
        )
        assert f"times to restore process {target.pid}, although there was room" in lost
        assert len(told) == 1


async def test_bring_back_waits_for_a_paused_gpu(emulated, waiting):
    machine = emulated(ONE)
    _, until = waiting
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        digest = await filled(target)
        await suspended(service, target, uuid)
        await service.stand_down("a new driver", [uuid])
        told = []
        task = asyncio.ensure_future(
            service.bring_back(target.root, session=SESSION, origin=[uuid], on_kept=told.append)
        )
        await until(lambda: told, 60)
        assert "paused" in told[0]
        await service.renew([uuid])
        assert await asyncio.wait_for(task, 60) == ""
        assert await target.do("digest", 1) == digest


async def test_refused_landing_is_undone_only_with_enough_room(emulated, waiting):
    """A restore without room is fatal: the process stays suspended until the memory is free."""
    machine = emulated("2x256MiB,context=16MiB")
    _, until = waiting
    async with machine.started() as (service, devices), machine.target() as target:
        origin, place = (device.uuid for device in devices)
        await target.do("context")
        digest = await target.do("fill", 64 * MiB, 1)
        machine.faults.set("restore-keeps-state")
        machine.faults.set("restore-failed", pid=target.pid)
        told = []
        landing = asyncio.ensure_future(
            service.land(
                target.root, [place], [origin], session=SESSION, need={place: 80 * MiB},
                restoring=lambda: None, staying=lambda: None, on_kept=told.append,
            )
        )  # fmt: skip
        async with machine.target() as thief:
            await thief.do("context")
            await until_taken(thief, landing, 170 * MiB)
            await until(lambda: told, 60)
            assert "MiB free" in told[0]
            machine.faults.clear("restore-failed")
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(landing), 2)
        outcome = await asyncio.wait_for(landing, 90)
        assert outcome.status == "refused", outcome
        assert await target.do("digest", 1) == digest


async def test_landed_restores_a_process_only_with_enough_room(emulated):
    """A restore without room is fatal, so the process stays suspended."""
    machine = emulated("1x256MiB,context=16MiB")
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        digest = await filled(target)
        await suspended(service, target, uuid)
        steps = []
        origin = {"origin": [uuid], "staying": lambda: steps.append("staying")}
        async with machine.target() as thief:
            await thief.do("context")
            await thief.do("take", 232 * MiB)
            found = await service.landed(target.root, session=SESSION, **origin)
            assert (found.state, steps) == ("checkpointed", ["staying"])
            assert "has 8 MiB free, and the session needs 16 MiB" in found.problem
            assert not found.refused
            state = await service.driver_state(target.root, session=SESSION)
            assert state == "checkpointed"
        found = await service.landed(target.root, session=SESSION, **origin)
        assert found == Continued("checkpointed")
        assert await target.do("digest", 1) == digest


async def test_landed_says_that_a_process_is_stopped(emulated):
    machine = emulated(ONE)
    async with machine.started() as (service, devices), machine.target() as target:
        digest = await filled(target)
        await suspended(service, target, devices[0].uuid)
        target.stop()
        found = await service.landed(target.root, session=SESSION)
        assert found.state == "hung"
        assert f"Process {target.pid} is stopped" in found.problem
        target.go_on()
        assert await service.landed(target.root, session=SESSION) == Continued("checkpointed")
        assert await target.do("digest", 1) == digest


async def until_taken(thief, suspending, size=140 * MiB):
    """Let ``thief``, a process outside the pool, take the memory that the suspended child freed."""
    while True:
        assert not suspending.done()
        with contextlib.suppress(RuntimeError):
            await thief.do("take", size)
            return
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("code", [1, 801])
async def test_process_that_cannot_migrate_resumes_on_its_device(emulated, code):
    """migration-refused: the state is intact. The process can resume only on its old device."""
    machine = emulated(TWO)
    async with machine.started() as (service, devices), machine.target() as target:
        first, second = (d.uuid for d in devices)
        digest = await filled(target)
        need = (await suspended(service, target, first)).freed[first]
        machine.faults.set("migration-refused", code=code)
        outcome = await back(service, target, second, first, need)
        assert (outcome.status, outcome.stay) == ("refused", True)
        assert "did not move" in outcome.message
        await resumed(service, target, first, first, need)
        assert await target.do("digest", 1) == digest


async def test_self_test_finds_that_a_driver_cannot_migrate(emulated):
    """migration-refused: the device can suspend, but its sessions cannot migrate."""
    machine = emulated(TWO)
    machine.faults.set("migration-refused")
    async with machine.started() as (_, devices):
        assert [(d.can_suspend, d.can_migrate) for d in devices] == [(True, False)] * 2


async def test_state_survives_a_device_that_fails_in_a_resume(emulated):
    """restore-keeps-state: a device is lost in a resume. The session resumes on another device."""
    machine = emulated(TWO)
    machine.faults.set("restore-keeps-state")
    async with machine.started() as (service, devices), machine.target() as target:
        first, second = (d.uuid for d in devices)
        digest = await filled(target)
        need = (await suspended(service, target, first)).freed[first]
        no_room = service._workers.operation  # the device is lost after the check for room

        def losing(*arguments, **options):
            operation = no_room(*arguments, **options)
            look = operation._no_room

            async def then_lost(wanted):
                found = await look(wanted)
                machine.faults.set("device-lost", device=0)
                return found

            operation._no_room = then_lost
            return operation

        service._workers.operation = losing
        outcome = await back(service, target, first, first, need)
        service._workers.operation = no_room
        assert (outcome.status, outcome.stay) == ("refused", False)
        await resumed(service, target, second, first, need)
        assert await target.do("digest", 1) == digest


async def test_state_is_known_if_a_device_fails_as_a_suspend_ends(emulated):
    """device-lost: the device fails between the copy and the check for freed memory.

    Host memory has the state.
    """
    machine = emulated(TWO)
    async with machine.started() as (service, devices), machine.target() as target:
        first, second = (d.uuid for d in devices)
        digest = await filled(target)
        make = service._workers.operation

        def losing(*arguments, **options):
            operation = make(*arguments, **options)
            verify = operation._verify

            async def after_the_loss(*seen):
                machine.faults.set("device-lost", device=0)
                return await verify(*seen)

            operation._verify = after_the_loss
            return operation

        service._workers.operation = losing
        outcome = await suspended(service, target, first)
        service._workers.operation = make
        assert outcome.freed == {first: 80 * MiB}
        await resumed(service, target, second, first, outcome.freed[first])
        assert await target.do("digest", 1) == digest


# ------------------------------------------------------------------ locks


async def test_session_survives_a_lock_that_ignores_its_time_out(emulated, waiting):
    """lock-ignores-timeout: the service stops waiting for the lock.

    If the lock succeeds later, the service unlocks the process.
    """
    _, until_async = waiting
    machine = emulated(ONE)
    async with (
        machine.started(lock_timeout=0.1, call_timeout=3) as (service, devices),
        machine.target() as target,
    ):
        uuid = devices[0].uuid
        digest = await filled(target)
        machine.faults.set("lock-ignores-timeout")
        outcome = await service.suspend(target.root, [uuid], session=SESSION)
        assert outcome.status == "drain", outcome
        again = await service.suspend(target.root, [uuid], session=SESSION)
        assert again.status == "drain", again
        # The target's work ends, so the lock succeeds, and the service unlocks the process.
        machine.faults.clear()
        assert await target.do("digest", 1) == digest
        await until_async(lambda: not service._workers.settling)
        assert await service.driver_state(target.root, session=SESSION) == "running"
        outcome = await suspended(service, target, uuid)
        await resumed(service, target, uuid, uuid, outcome.freed[uuid])
        assert await target.do("digest", 1) == digest


async def test_close_ends_the_watch_on_a_late_lock(emulated):
    """lock-ignores-timeout: the service closes while a suspend waits for the lock.

    When the suspend ends, it starts a task that waits for the late lock. The close must end this
    task, too.
    """
    machine = emulated(ONE)
    async with machine.target() as target:
        async with machine.started(lock_timeout=0.1, call_timeout=3) as (service, devices):
            uuid = devices[0].uuid
            await filled(target)
            machine.faults.set("lock-ignores-timeout")
            task = asyncio.create_task(service.suspend(target.root, [uuid], session=SESSION))
            await beginning(service, uuid, "lock", task)
            await service.close()
            assert (await task).status == "drain"
            assert service._workers.settling == {}
        machine.faults.clear()


@pytest.mark.parametrize("code", [304, 702, 999])
async def test_lock_error_at_the_time_out_means_work_did_not_drain(emulated, code):
    """lock-timeout with a code other than NOT_READY: the process can still be suspended later."""
    machine = emulated(ONE)
    async with (
        machine.started(lock_timeout=0.2) as (service, devices),
        machine.target() as target,
    ):
        digest = await filled(target)
        machine.faults.set("lock-timeout", code=code, count=1)
        outcome = await service.suspend(target.root, [devices[0].uuid], session=SESSION)
        assert outcome.status == "drain", outcome
        assert "did not finish in 0.2 s" in outcome.message
        assert await target.do("digest", 1) == digest


# ------------------------------------------------------------------ cuInit alone


@pytest.mark.parametrize("enough", [True, False])
async def test_process_that_only_called_cuinit_is_suspended(emulated, enough):
    """init-not-enough: the driver cannot suspend a process that has only called cuInit.

    With and without this quirk, the process has no state.
    """
    machine = emulated(ONE)
    if not enough:
        machine.faults.set("init-not-enough")
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        await target.do("init")
        outcome = await service.suspend(target.root, [uuid], session=SESSION)
        assert outcome.cuda is True
        if not enough:
            assert outcome.status == "nothing"
            return
        assert (outcome.status, outcome.freed) == ("suspended", {uuid: 0})
        await resumed(service, target, uuid, uuid, 0)
        await filled(target)
