# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""NVML may list pids of another PID namespace. The service must not take them for local pids."""

from __future__ import annotations

import logging
import os
import subprocess

import pytest

from jupyter_gpupool.devices.model import DeviceSample, ProcessMemory
from jupyter_gpupool.devices.nvidia import sampler
from jupyter_gpupool.devices.nvidia.sampler import Numbers

MiB = 1 << 20
SESSION = "s1"
MACHINE = "2x1GiB,context=16MiB"


@pytest.fixture
def bystander():
    """A process that uses no GPU."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait(60)


async def test_self_test_shows_which_namespace_nvml_lists(emulated):
    async with emulated(MACHINE).started() as (service, _):
        assert service.numbers is True
    other = emulated(MACHINE)
    other.faults.set("nvml-host-pids")
    async with other.started() as (service, devices):
        assert service.numbers is False
        assert all(device.can_suspend for device in devices), devices
        # NVML's pids are not local pids, so the service computes the cost of a context from the
        # device's free memory.
        assert [service.context_bytes(device.uuid) for device in devices] == [16 * MiB] * 2


async def test_later_service_knows_the_pids_without_a_self_test(emulated):
    machine = emulated(MACHINE)
    machine.faults.set("nvml-host-pids")
    async with machine.started() as (_, devices):
        known = {device.uuid: device for device in devices}
    async with machine.service(numbers=False) as service:
        await service.start(known)
        assert service.numbers is False


@pytest.mark.parametrize("collides", [False, True], ids=["nobody's number", "a living process's"])
async def test_session_is_suspended_although_nvml_lists_other_pids(emulated, bystander, collides):
    machine = emulated(MACHINE)
    machine.faults.set("nvml-host-pids", **({"number": bystander.pid} if collides else {}))
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        await target.do("context")
        digest = await target.do("fill", 64 * MiB, 1)
        (sample, _) = await service.sample()
        (listed,) = sample.processes
        # The service negates a pid of another namespace, so that it matches no local process.
        assert listed == ProcessMemory(-abs(listed.pid), 80 * MiB)
        assert listed.pid == (-bystander.pid if collides else -(target.pid + (1 << 22)))
        outcome = await service.suspend(target.root, [uuid], session=SESSION)
        assert (outcome.status, outcome.message) == ("suspended", "")
        assert outcome.freed == {uuid: 80 * MiB}
        resumed = await service.resume(
            target.root, [uuid], [uuid], session=SESSION, need=outcome.freed
        )
        assert resumed.status == "resumed", resumed.message
        assert await target.do("digest", 1) == digest
    assert bystander.poll() is None


async def test_process_that_nvml_does_not_list_has_nothing_to_free(emulated):
    """The service must not wait until its time-out, and not report that nothing was freed."""
    machine = emulated(MACHINE)
    async with machine.started() as (service, devices), machine.target() as target:
        uuid = devices[0].uuid
        await target.do("context")
        await target.do("leave")
        (sample, _) = await service.sample()
        assert sample.processes == ()
        outcome = await service.suspend(target.root, [uuid], session=SESSION)
        assert (outcome.status, outcome.message) == ("suspended", "")
        assert outcome.freed == {uuid: 0}


# ------------------------------------------------------------------ evidence


def sample(*listed):
    return DeviceSample("GPU-a", 100, 50, 0, 50, tuple(ProcessMemory(pid, 10) for pid in listed))


@pytest.fixture
def make_numbers(monkeypatch):
    """Return a function that makes ``Numbers`` in the initial or in another PID namespace."""

    def make(*, initial, known=None):
        first = sampler.FIRST_NAMESPACE
        monkeypatch.setattr(sampler, "pid_namespace", lambda: first if initial else "pid:[7]")
        return Numbers(logging.getLogger("test"), known)

    return make


@pytest.mark.parametrize(
    ("initial", "known", "proven"),
    [(True, None, True), (False, None, None), (False, True, True), (True, False, False)],
    ids=["initial namespace", "nothing is known", "found before", "found before to be others'"],
)
def test_namespace_or_known_result_decides_without_a_self_test(
    make_numbers, initial, known, proven
):
    judge = make_numbers(initial=initial, known=known)
    judge.settle()
    assert judge.proven is proven
    listed = judge.translate(sample(os.getpid())).processes[0].pid
    assert listed == (os.getpid() if proven else -os.getpid())


def test_only_a_new_pid_in_nvmls_list_is_a_proof(make_numbers):
    judge = make_numbers(initial=False)
    judge.learn(sample(), sample(), 5)
    judge.learn(sample(5), sample(5), 5)
    assert judge.proven is None
    judge.learn(sample(), sample(99), 5)
    assert judge.proven is False
    judge.learn(sample(99), sample(99, 5), 5)
    assert judge.proven is True


def test_proof_is_revoked_if_listed_pids_have_no_process(make_numbers):
    gone = (1 << 22) + 1
    judge = make_numbers(initial=False, known=True)
    judge.settle()
    for _ in range(sampler.ABSENT - 1):
        assert judge.translate(sample(os.getpid(), gone)).processes[0].pid == os.getpid()
    judge.translate(sample(os.getpid()))  # the process may have just ended
    for _ in range(sampler.ABSENT):
        last = judge.translate(sample(os.getpid(), gone))
    assert [process.pid for process in last.processes] == [-os.getpid(), -gone]
    assert judge.proven is False
