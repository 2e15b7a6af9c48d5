# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Tests the device service on the machine's driver: how it finds the devices, and how it suspends
each kind of process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from jupyter_gpupool import procfs
from jupyter_gpupool.devices import assumed_context
from jupyter_gpupool.devices.nvidia.calls import LOCK_GRACE
from jupyter_gpupool.devices.nvidia.service import DeviceService

from .device import CALL, SETTLED, START, bench, bytes_of, speeds, threads, until
from .machine import GiB, MiB
from .target import target
from .workloads import expected

#: The lock's time-out in these tests, and the run time of a GPU kernel that outlasts this time-out,
#: both in seconds.
LOCK = 0.5
SPIN = 3 * LOCK


# ------------------------------------------------------------------ the device


async def test_service_finds_the_device_and_tests_it(machine, note):
    service = DeviceService(env=machine.env)
    try:
        begin = time.monotonic()
        devices = await asyncio.wait_for(service.start(), START)
        started = time.monotonic() - begin
        assert devices, service.problem
        device = devices[0]
        begin = time.monotonic()
        tested = await asyncio.wait_for(service.self_test(device.uuid), START)
        note(
            devices=len(devices),
            name=device.name,
            tier=device.tier,
            tier_reason=device.tier_reason,
            can_migrate=device.can_migrate,
            driver=service.driver_version,
            cuda=service.cuda_version,
            start_s=round(started, 2),
            self_test_s=round(time.monotonic() - begin, 2),
            memory_mib=device.memory_total >> 20,
            reserved_mib=device.memory_reserved >> 20,
            context_mib=tested.context_bytes >> 20,
            assumed_context_mib=assumed_context(device.memory_total) >> 20,
        )
        assert service.problem == ""
        assert service.driver_version
        assert service.cuda_version
        assert (device.can_suspend, device.tier) == (True, "unguarded"), device.tier_reason
        assert (tested.can_suspend, service.untested) == (True, set()), tested.tier_reason
        # The self-test measures the size of a context. It must be a plausible size.
        assert 0 < tested.context_bytes < 2 * GiB
        assert device.emulated is not machine.real
    finally:
        await asyncio.wait_for(service.close(), SETTLED)


async def test_memory_figures_of_a_device_add_up(machine, note):
    async with bench(machine) as found:
        before = await found.sample()
        async with target("cuda-core", found.env) as process:
            idle = await found.sample()
            size = machine.bytes(512 * MiB)
            await process.do("take", size)
            begin = time.monotonic()
            while (full := await found.sample()).used < idle.used + size - found.slack:
                assert time.monotonic() - begin < SETTLED, "NVML does not see what was taken"
            free, total = await process.do("info")
            note(
                before_mib=before.used >> 20,
                context_mib=(idle.used - before.used) >> 20,
                listed_mib=None if (listed := await found.held(process)) is None else listed >> 20,
                nvml_late_s=round(time.monotonic() - begin, 3),
                driver_total_mib=total >> 20,
                driver_less_than_nvml_mib=(full.free - free) >> 20,
            )
        for sample in (before, idle, full):
            assert not sample.lost
            assert sample.total == found.device.memory_total
            whole = sample.used + sample.free + sample.reserved
            assert abs(whole - sample.total) <= 2 * MiB, sample
        assert total <= full.total
        note(back_s=round(await found.empty(process), 3))


async def test_sample_during_a_copy_reports_no_device_as_lost(machine, note):
    """A sample may take long, as NVML may answer only after the copy. No device counts as lost."""
    # On an emulated device, a small array is enough: a sample is taken during each copy, however
    # short. A large array would take more time, mainly for its hash.
    size = machine.bytes(2 * GiB)
    async with bench(machine) as found, target("cuda-core", found.env) as process:
        await process.do("put", "x", size, 3)

        async def watched(copy):
            task, longest, looks = asyncio.ensure_future(copy), 0.0, 0
            while not task.done():
                begin = time.monotonic()
                assert not (await found.sample()).lost
                longest, looks = max(longest, time.monotonic() - begin), looks + 1
            outcome = task.result()
            return outcome, {**speeds(outcome), "looks": looks, "longest_s": round(longest, 3)}

        there, suspend = await watched(found.suspend(process))
        assert there.status == "suspended", there
        back, resume = await watched(found.resume(process, there))
        assert back.status == "resumed", back
        note(mib=size >> 20, suspend=suspend, resume=resume)
        assert await process.do("digest", "x") == expected(size, 3, 0)
        assert min(suspend["looks"], resume["looks"]) >= 1


# ------------------------------------------------------------------ kinds of processes


async def stateless(found, process, outcome):
    """Check the suspend of a process without a context: it has freed nothing, or was not needed."""
    if outcome.status == "suspended":
        assert outcome.freed == {found.uuid: 0}, outcome
        assert await found.state(process) == "checkpointed"
        back = await found.resume(process, outcome)
        assert back.status == "resumed", back
        assert await found.state(process) == "running"
    else:
        assert (outcome.status, outcome.freed) == ("nothing", {}), outcome
        assert await found.state(process) == "none"


async def test_process_without_cuda_has_nothing_to_suspend(machine, note):
    async with bench(machine) as found, target("cuda-core", machine.env, start=False) as process:
        outcome = await found.suspend(process)
        assert (outcome.status, outcome.cuda, outcome.freed) == ("nothing", False, {}), outcome
        assert await found.state(process) == "none"
        note(suspend=speeds(outcome))


async def test_process_that_only_uses_nvml_is_unharmed_by_a_suspend(machine, note):
    """Driver 580.159.04 suspends such a process as if it had called cuInit.

    The emulated driver does not suspend it. The service does not move the session of such a process
    to other devices. This is safe.
    """
    async with bench(machine) as found, target("cuda-core", machine.env, start=False) as process:
        seen = await process.do("nvml")
        assert seen >= 1
        outcome = await found.suspend(process)
        note(
            status=outcome.status,
            cuda=outcome.cuda,
            suspend=speeds(outcome),
            thread=await found.ask("thread", process.root),
        )
        await stateless(found, process, outcome)
        assert await process.do("nvml") == seen


async def test_process_that_only_called_cuinit_has_no_state(machine, note):
    async with bench(machine) as found, target("cuda-core", found.env, start=False) as process:
        assert await process.do("init") == "CUDA_SUCCESS"
        note(
            state=await found.ask("state", process.root),
            thread=await found.ask("thread", process.root),
        )
        outcome = await found.suspend(process)
        note(status=outcome.status, cuda=outcome.cuda, suspend=speeds(outcome))
        await stateless(found, process, outcome)
        # The process can make its context afterwards.
        await process.do("start")
        await process.do("put", "a", 4 * MiB, 1)
        assert await process.do("digest", "a") == expected(4 * MiB, 1)
        assert outcome.cuda is not False, (
            "The driver does not tell a process that has called cuInit from one that has not: "
            "the pool would move a session to another device to which it is not bound any more"
        )


async def test_driver_gives_known_answers_for_each_kind_of_process(machine, note):
    """Ask the driver directly for the answers on which the service's ``calls.probe`` relies."""
    async with bench(machine) as found, target("cuda-core", found.env, start=False) as asker:
        for kind, begin in (("none", "pid"), ("nvml", "nvml"), ("cuinit", "init")):
            async with target("cuda-core", found.env, start=False) as process:
                await process.do(begin)
                note(**{kind: await asker.do("asks", process.pid, timeout=CALL)})
        async with target("cuda-core", found.env) as process:
            told = await asker.do("asks", process.pid, timeout=CALL)
            note(context=told)
            assert told["state"] == ["CUDA_SUCCESS", 0]
            result, thread = told["thread"]
            assert result == "CUDA_SUCCESS"
            assert Path(f"/proc/{process.pid}/task/{thread}").is_dir(), told
            for op, value in (("state", "running"), ("thread", str(thread))):
                answer = await found.ask(op, process.root)
                assert (answer["outcome"], answer["value"]) == ("ok", value)
        note(ended=await asker.do("asks", process.pid, timeout=CALL))
        for op in ("state", "thread"):
            assert (await found.ask(op, process.root))["outcome"] == "gone"


async def test_stopped_process_is_not_touched(machine, note):
    async with bench(machine) as found, target("cuda-core", found.env) as process:
        await process.do("put", "a", 4 * MiB, 1)
        os.kill(process.pid, signal.SIGSTOP)
        assert await until(lambda: procfs.presence(process.root) == "stopped")
        worker = found.worker.pid
        outcome = await asyncio.wait_for(found.suspend(process), CALL)
        assert outcome.status == "drain", outcome
        assert "is stopped (SIGSTOP)" in outcome.message
        assert await found.state(process) == "hung"
        note(suspend=speeds(outcome))
        assert found.worker.pid == worker  # no call reached its time-out
        os.kill(process.pid, signal.SIGCONT)
        assert await process.do("digest", "a") == expected(4 * MiB, 1)
        await found.there_and_back(process)
        assert await process.do("digest", "a") == expected(4 * MiB, 1)


async def test_suspend_does_not_stop_a_gpu_kernel_that_runs_too_long(machine, note):
    async with (
        bench(machine, lock_timeout=LOCK) as found,
        target("cuda-core", found.env) as process,
    ):
        await process.do("put", "a", 4 * MiB, 1)
        await process.do("spin", int(SPIN * 1e9))
        outcome = await asyncio.wait_for(found.suspend(process), CALL)
        note(refused=speeds(outcome), message=outcome.message)
        assert outcome.status == "drain", outcome
        assert f"{LOCK:g} s" in outcome.message
        assert outcome.driver_seconds < LOCK + LOCK_GRACE
        assert await found.state(process) == "running"
        await process.do("steps", "a", 1, 5)
        assert await process.do("digest", "a") == expected(4 * MiB, 1, 5)
        there, back = await found.there_and_back(process)
        note(suspend=speeds(there), resume=speeds(back))
        assert await process.do("digest", "a") == expected(4 * MiB, 1, 5)


# ------------------------------------------------------------------ while a process is suspended


async def test_call_made_during_a_suspend_waits_and_takes_effect_once(machine, note):
    """A suspended process launches a kernel. The launch waits in the driver until the resume.

    A synchronisation would end with a segmentation fault there. So the process launches first.
    """
    size = machine.bytes(64 * MiB)
    async with bench(machine) as found, target("cuda-core", found.env) as process:
        await process.do("put", "a", size, 1)
        there = await found.suspend(process)
        assert there.status == "suspended", there
        process.ask("steps", "a", 1, 5)
        answer = asyncio.create_task(process.answer())
        try:
            for _ in range(50):
                assert await found.state(process) == "checkpointed"
                assert not answer.done(), f"a launch did not wait for the resume: {answer}"
            note(threads=sorted(threads(process.pid)))
            back = await found.resume(process, there)
            assert back.status == "resumed", back
            await answer
        finally:
            answer.cancel()
            await asyncio.wait({answer})
        assert await process.do("digest", "a") == expected(size, 1, 5)


async def test_nvml_of_a_suspended_process_answers_after_the_resume(machine, note):
    """With driver 580.159.04, NVML calls of a suspended process wait until its unlock.

    The test also notes whether they wait in a process that is only locked.
    """

    async def blocks():
        answer = asyncio.create_task(process.do("nvml"))
        await asyncio.wait({answer}, timeout=1.0)
        return answer, not answer.done()

    async with bench(machine) as found, target("cuda-core", found.env) as process:
        seen = await process.do("nvml")
        step = {"pid": process.root.pid, "start_time": process.root.start_time}
        answers = []
        locks = await found.worker.call("lock", CALL, process=step, drain=LOCK)
        assert locks["outcome"] == "ok", locks
        try:
            answer, waits_locked = await blocks()
        finally:
            await found.worker.call("unlock", CALL, process=step)
        answers.append(await answer)

        there = await found.suspend(process)
        assert there.status == "suspended", there
        answer, waits_suspended = await blocks()
        back = await found.resume(process, there)
        assert back.status == "resumed", back
        answers.append(await answer)
        note(waits_while_locked=waits_locked, waits_while_suspended=waits_suspended)
        assert answers == [seen, seen]
        assert await process.do("nvml") == seen


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
async def test_suspended_process_ended_by_signals_leaves_no_memory(machine, name, note):
    """SIGKILL ends a suspended process. The test only notes whether the other signal also does."""
    async with bench(machine) as found, target("cuda-core", found.env) as process:
        await process.do("put", "a", machine.bytes(256 * MiB), 1)
        there = await found.suspend(process)
        assert there.status == "suspended", there
        begin = time.monotonic()
        os.kill(process.pid, getattr(signal, name))
        ends = asyncio.create_task(process.process.wait())
        await asyncio.wait({ends}, timeout=1.0)
        note(
            ended_with=ends.result() if ends.done() else None,
            ended_s=round(time.monotonic() - begin, 2) if ends.done() else None,
            threads=sorted(threads(process.pid)),
            state=None if ends.done() else await found.state(process),
        )
        begin = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.wait_for(ends, SETTLED)
        note(killed_s=round(time.monotonic() - begin, 3), left_mib=bytes_of(process.pid) >> 20)
        await found.empty(process)
