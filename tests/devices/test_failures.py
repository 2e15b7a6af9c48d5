# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Workers die or hang, target processes stop or end, and devices are lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from jupyter_gpupool import procfs
from jupyter_gpupool.devices import DeviceSample
from jupyter_gpupool.devices.children import Child, ChildLost
from jupyter_gpupool.devices.nvidia.child_programs import NICE
from jupyter_gpupool.devices.nvidia.interpreter import PROGRAMS, child_environment
from jupyter_gpupool.devices.nvidia.sampler import Sampler
from jupyter_gpupool.devices.nvidia.visibility import holders
from jupyter_gpupool.errors import DriverError
from tests.emulated import device_files

MiB = 1 << 20
SESSION = "s1"


def worker_of(service, uuid):
    return service._workers.children[uuid]


async def answer_started(service, uuid, op):
    """Wait until a device's worker has received ``op``; return the worker's pid."""
    worker = worker_of(service, uuid)
    while worker.current != op:
        await asyncio.sleep(0.002)
    return worker.pid


# ------------------------------------------------------------------ workers


async def test_worker_killed_during_a_suspend_loses_no_state(emulated, waiting):
    """The driver completes the checkpoint after the worker's death. So the suspend succeeds."""
    machine = emulated("1x1GiB,context=16MiB")
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        await target.do("context")
        digest = await target.do("fill", 16 * MiB, 1)
        machine.faults.set("slow-copies", bandwidth="48MiB/s")
        task = asyncio.create_task(service.suspend(target.root, [uuid], session=SESSION))
        os.kill(await answer_started(service, uuid, "checkpoint"), signal.SIGKILL)
        outcome = await task
        assert outcome.status == "suspended", outcome.message
        assert outcome.freed[uuid] >= 32 * MiB
        machine.faults.clear()
        resumed = await service.resume(
            target.root, [uuid], [uuid], session=SESSION, need=outcome.freed
        )
        assert resumed.status == "resumed", resumed.message
        assert await target.do("digest", 1) == digest


async def test_worker_killed_during_a_resume_loses_no_state(emulated):
    """The driver leaves the target locked after the worker's death. The next worker unlocks it."""
    machine = emulated("1x1GiB,context=16MiB")
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        await target.do("context")
        digest = await target.do("fill", 16 * MiB, 1)
        outcome = await service.suspend(target.root, [uuid], session=SESSION)
        machine.faults.set("slow-copies", bandwidth="48MiB/s")
        task = asyncio.create_task(
            service.resume(target.root, [uuid], [uuid], session=SESSION, need=outcome.freed)
        )
        os.kill(await answer_started(service, uuid, "bring_back"), signal.SIGKILL)
        resumed = await task
        assert resumed.status == "resumed", resumed.message
        assert await target.do("digest", 1) == digest


async def test_resume_sends_its_worker_two_requests(emulated, monkeypatch):
    """Each request must wake the worker. That takes longer than the driver's own work."""
    machine = emulated("1x1GiB,context=16MiB")
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        await target.do("context")
        digest = await target.do("fill", 4 * MiB, 1)
        outcome = await service.suspend(target.root, [uuid], session=SESSION)
        worker, asked = worker_of(service, uuid), []

        async def call(op, timeout, **fields):
            asked.append((op, fields.get("known")))
            return await type(worker).call(worker, op, timeout, **fields)

        monkeypatch.setattr(worker, "call", call)
        resumed = await service.resume(
            target.root, [uuid], [uuid],
            session=SESSION, need=outcome.freed, known=outcome.processes,
        )  # fmt: skip
        assert resumed.status == "resumed", resumed.message
        known = [{"pid": p.pid, "start_time": p.start_time} for p in outcome.processes]
        assert asked == [("look", known), ("bring_back", None)]
        assert await target.do("digest", 1) == digest


async def test_resume_finds_processes_that_the_caller_does_not_know(emulated):
    machine = emulated("1x1GiB,context=16MiB")
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        await target.do("context")
        digest = await target.do("fill", 4 * MiB, 1)
        outcome = await service.suspend(target.root, [uuid], session=SESSION)
        ended = procfs.ProcessId(target.root.pid, target.root.start_time - 1)
        resumed = await service.resume(
            target.root, [uuid], [uuid], session=SESSION, need=outcome.freed, known=[ended]
        )
        assert resumed.status == "resumed", resumed.message
        assert await target.do("digest", 1) == digest


@pytest.mark.parametrize("op", ["lock", "checkpoint"])
async def test_hanging_worker_is_replaced_and_the_session_runs(emulated, op):
    machine = emulated("1x1GiB,context=16MiB")
    async with (
        machine.started(lock_timeout=0.1, call_timeout=6.0) as (service, devices),
        machine.target() as target,
    ):
        uuid = devices[0].uuid
        await target.do("context")
        digest = await target.do("fill", 4 * MiB, 1)
        first = worker_of(service, uuid).pid
        machine.faults.set("hang", op=op, count=1)
        outcome = await service.suspend(target.root, [uuid], session=SESSION)
        assert outcome.status == ("drain" if op == "lock" else "pinned"), outcome.message
        assert worker_of(service, uuid).pid not in (None, first)
        assert procfs.identify(first) is None
        assert await service.driver_state(target.root, session=SESSION) == "running"
        assert await target.do("digest", 1) == digest
        outcome = await service.suspend(target.root, [uuid], session=SESSION)
        assert outcome.status == "suspended", outcome.message


async def test_hanging_restore_leaves_the_session_suspended(emulated):
    machine = emulated("1x1GiB,context=16MiB")
    async with (
        machine.started(call_timeout=6.0) as (service, devices),
        machine.target() as target,
    ):
        uuid = devices[0].uuid
        await target.do("context")
        digest = await target.do("fill", 4 * MiB, 1)
        outcome = await service.suspend(target.root, [uuid], session=SESSION)
        machine.faults.set("hang", op="restore", count=1)
        resumed = await service.resume(
            target.root, [uuid], [uuid], session=SESSION, need=outcome.freed
        )
        assert resumed.status == "no-room"
        assert "Nothing was resumed" in resumed.message
        resumed = await service.resume(
            target.root, [uuid], [uuid], session=SESSION, need=outcome.freed
        )
        assert resumed.status == "resumed", resumed.message
        assert await target.do("digest", 1) == digest


async def test_silent_driver_counts_as_hung_in_bounded_time(emulated):
    machine = emulated("1x1GiB,context=16MiB")
    async with (
        machine.started(lock_timeout=0.1, call_timeout=6.0) as (service, devices),
        machine.target() as target,
    ):
        await target.do("context")
        machine.faults.set("hang")
        assert await service.driver_state(target.root, session=SESSION) == "hung"
        outcome = await service.suspend(target.root, [devices[0].uuid], session=SESSION)
        assert outcome.status == "drain"  # no operation had begun on the process
        machine.faults.clear()
        assert await service.driver_state(target.root, session=SESSION) == "running"


async def test_cancelled_caller_does_not_stop_the_driver(emulated):
    machine = emulated("1x1GiB,context=16MiB")
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        await target.do("context")
        machine.faults.set("slow-copies", bandwidth="32MiB/s")
        await target.do("fill", 8 * MiB, 1)
        task = asyncio.create_task(service.suspend(target.root, [uuid], session=SESSION))
        await answer_started(service, uuid, "checkpoint")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The next operation on the device waits for the running operation.
        assert await service.driver_state(target.root, session=SESSION) == "checkpointed"


async def test_close_ends_a_child_that_is_starting():
    child = Child("worker", module=PROGRAMS, env=child_environment(None), log=logging.getLogger())
    start = asyncio.ensure_future(child.start())
    await asyncio.sleep(0)  # the child's process is starting
    await child.close()
    with pytest.raises(ChildLost):
        await start
    assert child.pid is None
    assert child._reader.done()


async def test_close_waits_for_a_child_that_has_just_died():
    child = Child("worker", module=PROGRAMS, env=child_environment(None), log=logging.getLogger())
    await child._spawn(60)
    reader = child._reader
    os.kill(child.pid, signal.SIGKILL)
    while child.pid:
        await asyncio.sleep(0)
    await child.close()
    assert reader.done()


async def test_close_waits_for_a_child_that_was_replaced(monkeypatch):
    """The old child's pipes are open until the event loop notices the end of the old child."""
    child = Child("worker", module=PROGRAMS, env=child_environment(None), log=logging.getLogger())
    await child._spawn(60)
    first, lost, noticed, reap = child._reader, child._process, asyncio.Event(), Child._reap

    async def late(self, process):
        if process is lost:
            await noticed.wait()
        await reap(self, process)

    monkeypatch.setattr(Child, "_reap", late)
    os.kill(child.pid, signal.SIGKILL)
    while child.pid:
        await asyncio.sleep(0)
    await child._spawn(60)
    closing = asyncio.create_task(child.close())
    await asyncio.wait({child._reader})
    for _ in range(20):
        await asyncio.sleep(0)
    assert not closing.done()
    noticed.set()
    await closing
    assert first.done()


async def test_cancelled_start_ends_the_process_that_it_started(monkeypatch):
    """asyncio alone would leave the pipes open, and the broker would log an error at its end."""
    execute, begun, made = asyncio.create_subprocess_exec, asyncio.Event(), []

    async def late(*command, **options):
        begun.set()
        made.append(await execute(*command, **options))
        return made[0]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", late)
    child = Child("worker", module=PROGRAMS, env=child_environment(None), log=logging.getLogger())
    start = asyncio.create_task(child.start())
    await begun.wait()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert made[0].returncode == -signal.SIGKILL
    await child.close()


@pytest.mark.parametrize("guard", [False, True])
async def test_close_ends_a_self_test_without_a_caller(emulated, monkeypatch, guard):
    """The self-test continues after its caller is cancelled.

    With the guard, it would also start another self-test. ``close`` must end the self-test's
    process. Otherwise, the log has an error after the event loop is closed.
    """
    machine, begun, made = emulated("1x1GiB,context=16MiB"), asyncio.Event(), []
    execute = asyncio.create_subprocess_exec

    async def noting(*command, **options):
        made.append(await execute(*command, **options))
        if "selftest" in command:
            begun.set()
        return made[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noting)
    async with machine.service(guard=guard) as service:
        start = asyncio.create_task(service.start())
        await begun.wait()
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        await service.close(0)
        assert None not in [process.returncode for process in made]
        ended = len(made)
        running = [*service._workers._running]
        await asyncio.gather(*running, return_exceptions=True)
        assert len(made) == ended


async def test_children_end_with_their_parent(emulated, waiting):
    until, _ = waiting
    code = (
        "import asyncio, os; from jupyter_gpupool.devices.nvidia.service import DeviceService\n"
        "async def main():\n"
        "    service = DeviceService(); devices = await service.start()\n"
        "    await service.sample()\n"
        "    workers = service._workers.children.values()\n"
        "    pids = [service._sampler.child.pid, *(worker.pid for worker in workers)]\n"
        "    print(*pids, flush=True); await asyncio.sleep(3600)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        env={**emulated("2x1GiB").env, "PYTHONPATH": str(Path.cwd())},
        stdout=asyncio.subprocess.PIPE,
    )
    line = await process.stdout.readline()
    children = [procfs.identify(int(word)) for word in line.split()]
    assert len(children) == 3
    assert None not in children
    for child in children:
        # The children have their own sessions, so ^C in a terminal does not reach them.
        assert os.getsid(child.pid) == child.pid
    sampler, worker, _ = (os.getpriority(os.PRIO_PROCESS, child.pid) for child in children)
    # The sampler has a higher nice value than a worker, because a kernel's request is more urgent
    # than a sample. The tests themselves may run at 19, the maximum.
    assert sampler == min(worker + NICE, 19)
    policies = [os.sched_getscheduler(child.pid) for child in children]
    assert policies == [os.SCHED_BATCH, os.SCHED_OTHER, os.SCHED_OTHER]
    # A stopped child cannot read the end of its stdin.
    os.kill(children[1].pid, signal.SIGSTOP)
    process.kill()
    await process.wait()
    until(lambda: all(procfs.presence(child) == "gone" for child in children))


# ------------------------------------------------------------------ target processes


async def test_stopped_target_is_not_touched(emulated):
    machine = emulated("1x1GiB,context=16MiB")
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        await target.do("context")
        digest = await target.do("fill", 4 * MiB, 1)
        first = worker_of(service, uuid).pid
        target.stop()
        outcome = await service.suspend(target.root, [uuid], session=SESSION)
        assert outcome.status == "drain"
        assert "is stopped (SIGSTOP)" in outcome.message
        assert f"kill -CONT {target.pid}" in outcome.message
        assert await service.driver_state(target.root, session=SESSION) == "hung"
        assert worker_of(service, uuid).pid == first  # no call reached its time-out
        target.go_on()
        assert await target.do("digest", 1) == digest


async def test_stopped_target_is_not_resumed(emulated):
    machine = emulated("1x1GiB,context=16MiB")
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        await target.do("context")
        digest = await target.do("fill", 4 * MiB, 1)
        outcome = await service.suspend(target.root, [uuid], session=SESSION)
        target.stop()
        resumed = await service.resume(
            target.root, [uuid], [uuid], session=SESSION, need=outcome.freed
        )
        assert resumed.status == "no-room"
        assert "is stopped (SIGSTOP)" in resumed.message
        target.go_on()
        resumed = await service.resume(
            target.root, [uuid], [uuid], session=SESSION, need=outcome.freed
        )
        assert resumed.status == "resumed", resumed.message
        assert await target.do("digest", 1) == digest


@pytest.mark.parametrize("calls", [False, True], ids=["alone", "with calls meanwhile"])
async def test_target_that_stops_during_a_suspend_runs_after_sigcont(emulated, waiting, calls):
    machine = emulated("1x1GiB,context=16MiB")
    _, until_async = waiting
    async with (
        machine.started(call_timeout=6.0) as (service, devices),
        machine.target() as target,
    ):
        uuid = devices[0].uuid
        await target.do("context")
        digest = await target.do("fill", 32 * MiB, 1)
        machine.faults.set("slow-copies", bandwidth="32MiB/s")
        task = asyncio.create_task(service.suspend(target.root, [uuid], session=SESSION))
        await answer_started(service, uuid, "checkpoint")
        target.stop()
        outcome = await task
        assert outcome.status == "drain"
        assert "is stopped (SIGSTOP)" in outcome.message
        machine.faults.clear()
        if calls:
            assert await service.driver_state(target.root, session=SESSION) == "hung"
            again = await service.suspend(target.root, [uuid], session=SESSION)
            assert again.status == "drain"
        target.go_on()
        # The service completes the checkpoint and then restores the target, which still has its
        # lease.
        assert await target.do("digest", 1) == digest
        await until_async(lambda: not service._workers.settling)
        assert await service.driver_state(target.root, session=SESSION) == "running"


async def test_target_that_ends_during_a_suspend_counts_as_gone(emulated):
    machine = emulated("1x1GiB,context=16MiB")
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        await target.do("context")
        await target.do("fill", 64 * MiB, 1)
        machine.faults.set("slow-copies", bandwidth="32MiB/s")
        task = asyncio.create_task(service.suspend(target.root, [uuid], session=SESSION))
        await answer_started(service, uuid, "checkpoint")
        target.process.kill()
        await target.process.wait()
        outcome = await task
        assert outcome.status == "gone"
        assert (await service.sample())[0].used == 0


async def test_end_of_a_child_during_a_suspend_causes_no_failure(emulated):
    machine = emulated("1x1GiB,context=16MiB")
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        await target.do("context")
        digest = await target.do("fill", 4 * MiB, 1)
        child = await target.do("spawn")
        await target.child("context")
        await target.child("fill", 32 * MiB, 2)
        machine.faults.set("slow-copies", bandwidth="32MiB/s")
        task = asyncio.create_task(service.suspend(target.root, [uuid], session=SESSION))
        await answer_started(service, uuid, "checkpoint")
        os.kill(child, signal.SIGKILL)
        outcome = await task
        assert outcome.status == "suspended", outcome.message
        machine.faults.clear()
        resumed = await service.resume(
            target.root, [uuid], [uuid], session=SESSION, need=outcome.freed
        )
        assert resumed.status == "resumed", resumed.message
        assert await target.do("digest", 1) == digest


async def test_nothing_is_suspended_if_all_processes_end_meanwhile(emulated):
    machine = emulated("1x1GiB,context=16MiB")
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        child = await target.do("spawn")
        await target.child("context")
        await target.child("fill", 32 * MiB, 2)
        machine.faults.set("slow-copies", bandwidth="32MiB/s")
        task = asyncio.create_task(service.suspend(target.root, [uuid], session=SESSION))
        await answer_started(service, uuid, "checkpoint")
        os.kill(child, signal.SIGKILL)
        outcome = await task
        assert (outcome.status, outcome.freed, outcome.processes) == ("nothing", {}, ())


async def test_locked_session_of_a_dead_broker_is_recovered(emulated):
    """The dead broker left a locked session, or a suspended session without a record."""
    machine = emulated("1x1GiB,context=16MiB")
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        await target.do("context")
        digest = await target.do("fill", 4 * MiB, 1)
        process = {"pid": target.root.pid, "start_time": target.root.start_time}
        worker = worker_of(service, uuid)
        await worker.call("lock", 10.0, process=process, drain=5.0)
        assert await service.driver_state(target.root, session=SESSION) == "locked"
        await service.unlock(target.root, session=SESSION)
        assert await service.driver_state(target.root, session=SESSION) == "running"
        assert await target.do("digest", 1) == digest

        await worker.call("lock", 10.0, process=process, drain=5.0)
        outcome = await service.suspend(target.root, [uuid], session=SESSION)
        assert outcome.status == "suspended", outcome.message
        again = await service.suspend(target.root, [uuid], session=SESSION)
        assert (again.status, again.freed) == ("suspended", {})
        resumed = await service.resume(
            target.root, [uuid], [uuid], session=SESSION, need=outcome.freed
        )
        assert resumed.status == "resumed", resumed.message
        assert await target.do("digest", 1) == digest


# ------------------------------------------------------------------ devices and NVML


async def test_lost_device_is_reported_at_most_once_by_each_sign(emulated, waiting):
    """The service reports a lost device for its Xid, and for a sample that fails before the Xid."""
    machine = emulated("2x1GiB,context=16MiB")
    _, until_async = waiting
    async with machine.started() as (service, devices):
        machine.faults.set("device-lost", device=1)
        samples = await service.sample()
        await until_async(lambda: any("Xid" in reason for _, reason in machine.lost))
        while not samples[1].lost:
            samples = await service.sample()
        assert samples[0].lost == ""
        assert samples[1].free == 0
        assert samples[1].total == 1 << 30
        await service.sample()
        assert {uuid for uuid, _ in machine.lost} == {devices[1].uuid}
        assert ["Xid" in reason for _, reason in machine.lost] in ([True], [False, True])


@pytest.mark.parametrize(
    ("sampled", "reported"),
    [("Xid 79", ["Xid 79"]), ("cannot be read", ["cannot be read", "Xid 79"]), ("", ["Xid 79"])],
)
async def test_xid_that_a_sample_has_reported_is_reported_once(sampled, reported):
    """The monitor marks the device as lost before it sends the event, so a sample may be first."""
    told = []
    monitor = SimpleNamespace(pid=1, generation=0)
    children = SimpleNamespace(make=lambda *_, **__: monitor)
    log = logging.getLogger(__name__)
    sampler = Sampler(children=children, log=log, on_lost=lambda *lost: told.append(lost))
    device = DeviceSample("a", total=1, used=0, reserved=0, free=0, processes=(), lost=sampled)
    row = {**asdict(device), "processes": []}

    async def ask(*_, **__):
        return {"samples": [row]}

    monitor.ask = ask
    await sampler.sample(["a"])
    sampler._take({"event": "lost", "uuid": "a", "reason": "Xid 79"})
    row["lost"] = "Xid 79"
    await sampler.sample(["a"])
    assert told == [("a", reason) for reason in reported]


async def test_sample_from_before_an_xid_counts_as_lost():
    """The event of an Xid may be faster than the answer with a sample from before the Xid."""
    told = []
    monitor = SimpleNamespace(pid=1, generation=0)
    children = SimpleNamespace(make=lambda *_, **__: monitor)
    log = logging.getLogger(__name__)
    sampler = Sampler(children=children, log=log, on_lost=lambda *lost: told.append(lost))
    row = {**asdict(DeviceSample("a", total=2, used=1, reserved=0, free=1)), "processes": []}

    async def ask(*_, **__):
        sampler._take({"event": "lost", "uuid": "a", "reason": "Xid 79"})
        return {"samples": [row]}

    monitor.ask = ask
    for _ in range(2):
        (sample,) = await sampler.sample(["a"])
        assert (sample.lost, sample.free) == ("Xid 79", 0)
    assert told == [("a", "Xid 79")]


async def test_session_of_a_lost_device_resumes_on_another(emulated):
    machine = emulated("2x1GiB,context=16MiB")
    async with machine.started() as (service, devices), machine.target() as target:
        first, second = (device.uuid for device in devices)
        await target.do("context")
        digest = await target.do("fill", 4 * MiB, 1)
        outcome = await service.suspend(target.root, [first], session=SESSION)
        machine.faults.set("device-lost", device=0)
        nowhere = await service.resume(
            target.root, [first], [first], session=SESSION, need=outcome.freed
        )
        assert nowhere.status == "no-room"
        assert "is lost" in nowhere.message
        resumed = await service.resume(
            target.root, [second], [first], session=SESSION, need={second: outcome.freed[first]}
        )
        assert resumed.status == "resumed", resumed.message
        assert await target.do("digest", 1) == digest


async def test_session_on_a_lost_device_is_not_suspended(emulated):
    machine = emulated("1x1GiB,context=16MiB")
    async with machine.started() as (service, devices), machine.target() as target:
        await target.do("context")
        machine.faults.set("device-lost", device=0)
        outcome = await service.suspend(target.root, [devices[0].uuid], session=SESSION)
        assert outcome.status == "pinned"
        assert "CUDA_ERROR_LAUNCH_FAILED" in outcome.message
        assert await service.driver_state(target.root, session=SESSION) == "running"


async def test_resume_names_an_origin_that_no_longer_exists(emulated):
    machine = emulated("1x1GiB,context=16MiB")
    async with machine.started() as (service, devices), machine.target() as target:
        resumed = await service.resume(
            target.root, [devices[0].uuid], ["GPU-removed"], session=SESSION, need={}
        )
        assert resumed.status == "no-room"
        assert "GPU-removed" in resumed.message


async def test_suspended_process_that_is_killed_leaves_no_memory(emulated):
    machine = emulated("1x1GiB,context=16MiB")
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        await target.do("context")
        outcome = await service.suspend(target.root, [uuid], session=SESSION)
        target.process.kill()
        await target.process.wait()
        assert await service.driver_state(target.root, session=SESSION) == "gone"
        resumed = await service.resume(
            target.root, [uuid], [uuid], session=SESSION, need=outcome.freed
        )
        assert resumed.status == "gone"
        assert (await service.sample())[0].used == 0


async def test_operations_on_one_device_wait_for_each_other(emulated):
    machine = emulated("1x1GiB,context=16MiB")
    async with (
        machine.started() as (service, devices),
        machine.target() as first,
        machine.target() as second,
    ):
        uuid = devices[0].uuid
        for target in (first, second):
            await target.do("context")
            await target.do("fill", 4 * MiB, 1)
        outcomes = await asyncio.gather(
            *(service.suspend(t.root, [uuid], session=f"s{t.pid}") for t in (first, second))
        )
        assert [outcome.status for outcome in outcomes] == ["suspended"] * 2
        # If the two suspends ran in parallel, each would count the memory that both of them freed.
        assert outcomes[0].freed == outcomes[1].freed


async def test_free_memory_is_used_if_nvml_lists_no_process(emulated):
    machine = emulated("1x1GiB,context=16MiB")
    machine.faults.set("nvml-missing-pids")
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        assert devices[0].can_suspend, devices[0].tier_reason
        await target.do("context")
        digest = await target.do("fill", 64 * MiB, 1)
        sample = (await service.sample())[0]
        assert sample.processes == ()
        outcome = await service.suspend(target.root, [uuid], session=SESSION)
        assert (outcome.status, outcome.message) == ("suspended", "")
        assert outcome.freed == {uuid: sample.used}
        resumed = await service.resume(
            target.root, [uuid], [uuid], session=SESSION, need=outcome.freed
        )
        assert resumed.status == "resumed", resumed.message
        assert await target.do("digest", 1) == digest


async def test_hanging_nvml_is_replaced_in_bounded_time(emulated):
    machine = emulated("1x1GiB,context=16MiB")
    async with (
        machine.started(sample_timeout=2.0) as (service, devices),
        machine.target() as target,
    ):
        await target.do("context")
        first = service._sampler.child.pid
        # A stopped process, like one that hangs in the driver, does not answer.
        os.kill(first, signal.SIGSTOP)
        with pytest.raises(DriverError, match="NVML did not answer"):
            await service.sample()
        assert procfs.identify(first) is None
        (sample,) = await service.sample()
        assert sample.uuid == devices[0].uuid
        assert sample.used > 0
        os.kill(service._sampler.child.pid, signal.SIGSTOP)
        outcome = await service.suspend(target.root, [devices[0].uuid], session=SESSION)
        assert outcome.status == "drain"
        assert "NVML did not answer" in outcome.message


async def test_new_monitor_watches_for_lost_devices(emulated, waiting):
    machine = emulated("1x1GiB,context=16MiB")
    _, until_async = waiting
    async with machine.started() as (service, devices):
        os.kill(service._sampler.child.pid, signal.SIGKILL)
        await until_async(lambda: service._sampler.child.pid is None)
        assert (await service.sample())[0].lost == ""
        machine.faults.set("device-lost", device=0)
        await service.sample()
        await until_async(lambda: machine.lost)
        assert machine.lost[0][0] == devices[0].uuid


def users_of(machine, device):
    """Return the pids of the processes that have a GPU's device file open."""
    files = device_files(machine.state_dir)
    return {holder.process.pid for holder in holders(files, device.index)[0]}


async def test_device_is_set_aside_even_if_nvml_does_not_answer(emulated):
    machine = emulated("2x1GiB,context=16MiB")
    async with machine.started(sample_timeout=1.0) as (service, (away, kept)):
        await service.sample()
        os.kill(service._sampler.child.pid, signal.SIGSTOP)
        await service.stand_down("paused", [away.uuid])
        assert [sample.uuid for sample in await service.sample()] == [kept.uuid]
        assert not users_of(machine, away)


async def test_device_can_migrate_after_a_test_without_its_peer(emulated):
    machine = emulated("2x1GiB,context=16MiB")
    async with machine.started() as (service, (away, kept)):
        await service.stand_down("paused", [away.uuid])
        assert (await service.self_test(kept.uuid)).can_migrate
        devices = await service.renew([away.uuid])
        assert all(device.can_migrate for device in devices)


@pytest.mark.parametrize("lost", [False, True])
async def test_interrupted_sample_leaves_the_paused_device_closed(emulated, waiting, lost):
    """The next sampler must not open the paused device.

    With ``lost``, the other device is lost. The next sampler must not look for the lost device.
    """
    _, until_async = waiting
    machine = emulated("2x1GiB,context=16MiB")
    async with machine.started(sample_timeout=30.0) as (service, (away, kept)):
        await service.sample()
        if lost:
            machine.faults.set("device-lost", device=1)
            await until_async(lambda: any("Xid" in reason for _, reason in machine.lost))
        os.kill(service._sampler.child.pid, signal.SIGSTOP)
        under_way = asyncio.create_task(service.sample())
        await until_async(lambda: service._sampler.child.current == "sample")
        processes = service._sampler.child.generation
        await service.stand_down("paused", [away.uuid])
        assert [sample.uuid for sample in await under_way] == [kept.uuid]
        assert not users_of(machine, away)
        # The service started only one new sampler, and told it not to watch the paused device. So
        # this sampler never opened the device's file.
        assert service._sampler.child.generation == processes + 1


async def test_starting_worker_is_replaced_if_a_device_is_set_aside(emulated, waiting):
    _, until_async = waiting
    machine = emulated("2x1GiB,context=16MiB")
    async with machine.started() as (service, (away, kept)):
        worker = service._workers.children[kept.uuid]
        await worker.replace()
        old = asyncio.create_task(worker.start())
        await until_async(lambda: worker._lock.locked())
        processes = worker.generation
        await service.stand_down("paused", [away.uuid])
        with contextlib.suppress(ChildLost):
            await old
        await worker.start()
        assert worker.generation == processes + 1
        assert not users_of(machine, away)
