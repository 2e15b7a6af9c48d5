# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The broker learns how much driver memory the guard misses, and charges this to the slice."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from jupyter_gpupool.broker.gpu.accounting import Overheads
from jupyter_gpupool.devices.model import DeviceSample, ProcessMemory
from jupyter_gpupool.guard.page import Reading, Slot
from jupyter_gpupool.pool.attribution import AGREE, excused
from jupyter_gpupool.pool.model import Device, Slice
from jupyter_gpupool.procfs import ProcessId

from . import kit
from .kit import MiB, wait_until
from .test_guarded import OUT_OF_MEMORY, Program

#: The sizes of a context and of lazily loaded code. The code is larger than 128 MiB: this is the
#: overuse that the watchdog tolerates on a device of 2 GiB. The code is smaller than 256 MiB: this
#: is the most that the broker accepts as driver memory of one process.
CONTEXT, CODE = 32 * MiB, 200 * MiB


@pytest.fixture
def parts():
    return kit.Broker, Program, {"emulate": "1x2GiB,context=32MiB", "attach": "lazy"}


@pytest.fixture
def begun(make_broker):
    """Start a broker; then give its driver a quirk, if any, and start a program on the broker."""
    programs = []

    def make(memory, *temperament, **config):
        broker = make_broker(**config).started
        if temperament:
            broker.faults.set(temperament[0], bytes=temperament[1])
        programs.append(Program(broker, memory=memory))
        return broker, programs[-1]

    yield make
    for program in programs:
        program.close()


def used(program, size):
    wait_until(lambda: program.status()["used_bytes"] == size, f"{size >> 20} MiB in use", 60)


def test_lazily_loaded_code_does_not_count_as_overuse(begun):
    broker, program = begun(600 * MiB, "loaded-code", CODE, overuse="end")
    program.begin(560 * MiB)  # data and context take 592 of 600 MiB; the code does not fit
    used(program, 560 * MiB + CONTEXT + CODE)
    wait_until(lambda: broker.status()["devices"][0]["memory_used"] >= 792 * MiB, "NVML shows it")
    assert program.status()["overuse_bytes"] == 0
    assert not broker.rows("overuse", "lost")
    assert program.do("check") == 560 * MiB


def test_lazily_loaded_code_is_charged_to_the_slice(begun):
    _broker, program = begun(600 * MiB, "loaded-code", CODE)
    program.begin(64 * MiB)
    used(program, 64 * MiB + CONTEXT + CODE)
    # The program can still allocate 600 - 296 MiB.
    assert program.do("alloc", bytes=320 * MiB, byte=7) == OUT_OF_MEMORY
    assert program.do("alloc", bytes=280 * MiB, byte=8) is None


def test_slice_is_charged_the_real_size_of_a_large_context(begun):
    _broker, program = begun(600 * MiB, "context-more", 100 * MiB)
    program.begin()
    used(program, CONTEXT + 100 * MiB)
    assert program.do("alloc", bytes=300 * MiB, byte=1) is None
    used(program, CONTEXT + 400 * MiB)


def test_learnt_overhead_is_charged_again_after_a_resume(begun):
    broker, program = begun(600 * MiB, "loaded-code", CODE)
    program.begin(64 * MiB)
    used(program, 64 * MiB + CONTEXT + CODE)
    program.wait_state("idle")
    program.server.call("release", session=program.session)
    program.wait_state("detached")
    assert broker.session(program.session)["suspended_bytes"] == 64 * MiB + CONTEXT + CODE
    assert program.do("check") == 64 * MiB
    used(program, 64 * MiB + CONTEXT + CODE)


# ---------------------------------------------------------------------- unit tests of the rule


OWNERS = {ProcessId(7, 1): "s"}


def look(beyond, session, shown, counted, constant=32, *, before=None, listed=None):
    """Give the rule one sample of a process; return the MiB that it adds to the guard's count."""

    def reading(size):
        slot = Slot(7, 1, 0, 0, 0, 0, (size * MiB,), (constant * MiB,), 0)
        return {"s": Reading(0, 1, 1, 0, (1,), (slot,))}

    used = (shown if listed is None else listed) * MiB
    sample = DeviceSample(
        "G", 2048 * MiB, used, 0, 2048 * MiB - used, (ProcessMemory(7, shown * MiB),)
    )
    first, second = reading(counted if before is None else before), reading(counted)
    beyond._activity.reading = lambda of: second.get(of.id)
    asyncio.run(beyond.learn([sample], first, (), OWNERS))
    return session.use.beyond[0] // MiB if session.use.beyond else 0


@pytest.fixture
def rule():
    use = SimpleNamespace(beyond=(), explained={}, processes=())
    session = SimpleNamespace(id="s", use=use)
    record = SimpleNamespace(state="detached", slices=(Slice("G", 600 * MiB),))
    device = Device("G", 0, "test", "A", 2048 * MiB)
    runner = SimpleNamespace(
        sessions=[session],
        record=lambda _name: record,
        pool=SimpleNamespace(device=lambda _uuid: device),
    )
    return Overheads(runner, None, SimpleNamespace()), session


def test_nothing_is_learnt_before_several_samples_agree(rule):
    looks = [look(*rule, 300, 200) for _ in range(AGREE)]
    assert looks == [0] * (AGREE - 1) + [100]


def test_memory_freed_between_two_samples_is_not_learnt(rule):
    for _ in range(10):
        # The program freed 100 MiB between the NVML sample and the second read of the page.
        assert look(*rule, 200, 100, before=200) == 0


def test_small_context_costs_less_if_nvmls_list_is_complete(rule):
    for _ in range(AGREE):
        cheaper = look(*rule, 20, 32)
    assert cheaper == -12
    assert look(*rule, 84, 96) == -12, "of the context, whatever is allocated beside it"


def test_context_costs_full_size_if_nvmls_list_is_incomplete(rule):
    for _ in range(AGREE):
        assert look(*rule, 20, 32, listed=32) == 0


def test_driver_memory_that_is_not_overuse_is_bounded(rule):
    look(*rule, 1000, 100)
    assert rule[1].use.explained == {"G": excused(2048 * MiB)}
    assert excused(80 << 30) == 1 << 30
