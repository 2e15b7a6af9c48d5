# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Landing: a process that asked about one GPU gets its slice on any GPU of the same model."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from jupyter_gpupool.guard.page import (
    LANDING_BEGUN,
    LANDING_MOVES,
    LANDING_NONE,
    Page,
    device_name,
)

from . import kit
from .kit import MiB, wait_until
from .test_guarded import BIG, CONTEXT, Program

PATIENCE = 60

#: The driver allocates memory in pages of this size.
PAGE = 2 * MiB


@pytest.fixture
def parts():
    return kit.Broker, Program, {"attach": "lazy", "quiet_after": 0.3}


def devices(broker):
    return {d["uuid"]: d for d in broker.status()["devices"]}


def occupy(kernel, but=(), memory=BIG):
    """Keep each GPU busy with a program, except the GPUs in ``but``; return the program by GPU."""
    taken, spare = {}, []
    for _ in range(64):
        if not [u for u in devices(kernel.broker) if u not in taken and u not in but]:
            break
        one = kernel(memory=memory)
        one.begin(MiB)
        (place,) = one.status()["devices"]
        if place in but or place in taken:
            spare.append(one)
            continue
        one.do("storm")
        taken[place] = one
    for one in spare:
        one.kill()
    return taken


@pytest.fixture
def kernel(kernel, broker):
    kernel.broker = broker
    return kernel


def test_process_that_asked_about_a_gpu_can_get_another_gpu(broker, kernel):
    k = kernel(memory=BIG)
    (home,) = k.do("ask")
    assert k.state() == "detached"
    occupy(kernel, but=[u for u in devices(broker) if u != home])
    assert k.do("context") is None
    status = k.status()
    (place,) = status["devices"]
    assert place != home
    assert status["state"] in ("active", "idle")
    assert status["used_bytes"] == CONTEXT
    assert k.do("alloc", bytes=64 * MiB, byte=3) is None
    assert k.do("check") == 64 * MiB
    assert k.status()["used_bytes"] == 64 * MiB + CONTEXT
    (row,) = broker.rows("land")
    assert row["device"] == place
    assert row["detail"]["from"] == home

    # NVML shows all memory of the process on ``place``, the GPU of its slice. It shows no memory of
    # the process on ``home``, the GPU that the process asked about.
    def settled():
        found = devices(broker)
        return found[place]["memory_used"] == 64 * MiB + CONTEXT and not any(
            d["memory_foreign"] for d in found.values()
        )

    wait_until(settled, "NVML shows it on its slice", PATIENCE)


#: The errors of ``do_look``. CUDA is not initialised in a forked child: 3. Without a context, CUDA
#: does not report the free memory: 201.
REFUSED = {"fork": 3, "cuMemGetInfo_v2": 201}


@pytest.mark.parametrize("gpus", [1, 8])
def test_queries_of_a_process_and_its_children_take_no_slice(make_broker, kernels, gpus):
    broker = make_broker(emulate=f"{gpus}x256MiB,context=16MiB").started
    k = kernels(broker, memory=64 * MiB)
    assert len(k.do("ask")) == 1
    assert k.do("look") == REFUSED
    assert k.state() == "detached"
    assert k.status()["attached_seconds_total"] == 0
    assert k.do("context") is None
    assert k.do("info") == [(64 - 16) * MiB, 64 * MiB]
    assert k.status()["used_bytes"] == 16 * MiB


def test_process_stays_on_its_first_gpu_if_this_gpu_has_room(broker, kernel):
    k = kernel(memory=BIG)
    (home,) = k.do("ask")
    k.begin(MiB)
    assert k.status()["devices"] == [home]
    assert broker.rows("land") == []


def test_landed_session_can_move_again_with_its_bytes(broker, kernel):
    k = kernel(memory=BIG)
    (home,) = k.do("ask")
    takers = occupy(kernel, but=[u for u in devices(broker) if u != home])
    k.begin(32 * MiB, byte=5)
    (place,) = k.status()["devices"]
    k.wait_state("idle")
    k.server.call("release", session=k.session)
    k.wait_state("detached")
    other = occupy(kernel, but=[home])  # one of these programs takes the last GPU of k
    takers[home].do("calm")
    takers[home].kill()
    assert place in other
    assert k.do("check") == 32 * MiB
    assert k.status()["devices"] == [home]
    # The process releases its context, and makes the next one on the GPU of its current slice.
    k.do("free", byte=5)
    assert [k.do("release", device=0), k.do("release", device=0)][0] is None
    assert k.do("retain", device=0) is None
    wait_until(lambda: k.status()["used_bytes"] == CONTEXT, "a sample after it", PATIENCE)
    assert len(broker.rows("land")) == 1


def test_process_lands_once_if_eight_threads_make_a_context(broker, kernel):
    k = kernel(memory=BIG)
    (home,) = k.do("ask")
    occupy(kernel, but=[u for u in devices(broker) if u != home])
    assert k.do("threads", count=8) == [0] * 8
    assert k.status()["used_bytes"] == CONTEXT
    assert len(broker.rows("land")) == 1


def test_child_that_asked_about_a_gpu_lands_without_its_parent(broker, kernel):
    k = kernel(memory=BIG)
    (home,) = k.do("sub", command={"do": "ask"})
    occupy(kernel, but=[u for u in devices(broker) if u != home])
    k.begin(16 * MiB, byte=1)  # only the child asked, so k can get any GPU
    (place,) = k.status()["devices"]
    assert place != home
    k.do("storm")
    assert k.do("sub", command={"do": "context"}) is None
    assert k.do("sub", command={"do": "alloc", "bytes": 16 * MiB, "byte": 2}) is None
    assert k.do("sub", command={"do": "check"}) == 16 * MiB
    state = k.do("calm")
    assert state["error"] == 0
    assert k.do("check") == 16 * MiB
    assert k.status()["used_bytes"] == 2 * (16 * MiB + CONTEXT)
    k.do("kill")


def test_session_with_two_gpus_lands_on_two_other_gpus(make_broker, kernels):
    broker = make_broker(emulate="4x512MiB,context=32MiB").started
    k = kernels(broker, memory=BIG, devices=2)
    homes = k.do("ask")
    assert len(homes) == 2
    occupy(maker(kernels, broker), but=[u for u in devices(broker) if u not in homes])
    for device in (1, 0):
        assert k.do("retain", device=device) is None
        assert k.do("alloc", bytes=16 * MiB, byte=device + 1) is None
    assert not {*k.status()["devices"]} & {*homes}
    assert k.do("check") == 32 * MiB
    used = {s["device"]: s["used_bytes"] for s in k.status()["slices"]}
    assert used == dict.fromkeys(k.status()["devices"], 16 * MiB + CONTEXT)
    assert len(broker.rows("land")) == 1


def test_eight_kernels_can_land_on_the_only_free_gpu(make_broker, kernels):
    # Seven other programs compute and must keep their GPUs. A busy machine delays their calls, so
    # ``quiet_after`` is long. ``preempt`` is empty, so that the pool ends no program's turn while
    # it serves the eight kernels.
    broker = make_broker(
        emulate="8x256MiB,context=16MiB", host_memory="4GiB", quiet_after=1.0, preempt=[]
    ).started
    kernel = maker(kernels, broker)
    asked = [kernel(memory=160 * MiB) for _ in range(8)]
    homes = [k.do("ask")[0] for k in asked[:4]]
    first = kernel(memory=160 * MiB)
    first.begin(MiB)
    assert first.status()["devices"] == homes[:1]
    first.do("storm")
    homes += [k.do("ask")[0] for k in asked[4:]]
    assert len({*homes}) > 1
    left = next(uuid for uuid in devices(broker) if uuid not in homes)
    assert len(occupy(kernel, but=[left, homes[0]], memory=160 * MiB)) == 6
    for k in asked:
        k.tell("context")
    for k in asked:
        assert k.answer(PATIENCE) is None
    placed = {uuid for k in asked for uuid in k.status()["devices"]}
    assert placed == {left}
    assert len(broker.rows("land")) == 8
    for number, k in enumerate(asked, 1):
        assert k.do("alloc", bytes=8 * MiB, byte=number) is None
    for k in asked:
        assert k.do("check") == 8 * MiB
    wait_until(
        lambda: not any(d["memory_foreign"] for d in devices(broker).values()),
        "nothing is left where they asked",
        PATIENCE,
    )


@pytest.fixture
def kernels():
    made = []

    def make(broker, **request):
        made.append(Program(broker, **request))
        return made[-1]

    yield make
    for one in made:
        one.close()


def maker(kernels, broker):
    def make(**request):
        return kernels(broker, **request)

    make.broker = broker
    return make


# ---------------------------------------------------------------------- the cost of landing


def test_pool_with_one_gpu_reserves_no_room_for_a_context(make_broker):
    broker = make_broker(emulate="1x512MiB,context=32MiB").started
    (device,) = devices(broker).values()
    assert device["memory_capacity"] == 512 * MiB
    broker.close()
    two = make_broker().started
    assert {d["memory_capacity"] for d in devices(two).values()} == {512 * MiB - CONTEXT}


def test_process_waits_with_a_reason_if_it_cannot_be_moved(make_broker, kernels):
    broker = make_broker()
    broker.faults.set("migration-refused")
    assert broker.started
    assert {d["memory_capacity"] for d in devices(broker).values()} == {512 * MiB}
    kernel = maker(kernels, broker)
    k = kernel(memory=BIG)
    (home,) = k.do("ask")
    takers = occupy(kernel, but=[u for u in devices(broker) if u != home])
    k.tell("context")
    k.wait_state("queued")
    index = devices(broker)[home]["index"]
    wait_until(lambda: f"GPU {index}, and" in k.status()["wait_reason"], "the reason", PATIENCE)
    takers[home].do("calm")
    assert k.answer(PATIENCE) is None
    assert k.status()["devices"] == [home]
    assert broker.rows("land") == []


def test_process_on_a_lost_gpu_gives_its_slice_back(make_broker, kernels):
    broker = make_broker(retest_after=0.5).started
    kernel = maker(kernels, broker)
    k = kernel(memory=BIG)
    (home,) = k.do("ask")
    broker.faults.set("device-lost", device=devices(broker)[home]["index"])
    wait_until(lambda: devices(broker)[home]["drained_reason"], "the Xid", PATIENCE)
    k.tell("context")
    wait_until(lambda: "is out of service" in k.status()["wait_reason"], "the reason", PATIENCE)
    assert (k.state(), k.status()["devices"]) == ("queued", [])
    other = kernel(memory=BIG)
    other.begin(MiB)  # k has given its slice back: another kernel may use the GPU of this slice
    other.do("storm")
    broker.faults.clear()
    assert k.answer(PATIENCE) is None
    assert k.status()["devices"] == [home]
    assert k.do("alloc", bytes=16 * MiB, byte=1) is None
    assert broker.rows("land") == []


def refused_move(broker, kernel):
    """Return a program that waits because the driver refused its move, and the GPU it waits for.

    The last value has the programs that keep GPUs busy, by GPU.
    """
    k = kernel(memory=BIG)
    (home,) = k.do("ask")
    takers = occupy(kernel, but=[u for u in devices(broker) if u != home])
    broker.faults.set("migration-refused", pid=k.process.pid)
    k.tell("context")
    reason = "initialised CUDA on this GPU, and the driver could not move it"
    wait_until(lambda: reason in k.status()["wait_reason"], "it waits where it asked", PATIENCE)
    return k, home, takers


def test_session_waits_for_its_gpu_after_a_refused_move(broker, kernel):
    k, home, takers = refused_move(broker, kernel)
    status = k.status()
    assert (status["state"], status["devices"]) == ("queued", [])
    assert f"on GPU {devices(broker)[home]['index']}, and" in status["wait_reason"]
    wait_until(
        lambda: devices(broker)[home]["memory_used"] == PAGE + CONTEXT,
        "nothing of it is where it asked",
        PATIENCE,
    )
    (row,) = [row for row in broker.rows("refuse") if row["detail"]["what"] == "land"]
    assert (row["session"], row["detail"]["from"]) == (k.session, home)
    # The program has given up its slice, so another kernel may use the GPU of this slice at once.
    other = kernel(memory=BIG)
    other.begin(MiB)
    assert other.status()["devices"] != [home]
    other.do("storm")
    assert takers[home].do("calm")["error"] == 0
    assert k.answer(PATIENCE) is None
    assert k.status()["devices"] == [home]
    assert k.do("alloc", bytes=16 * MiB, byte=1) is None
    assert k.do("check") == 16 * MiB
    assert broker.rows("land") == []
    assert takers[home].do("check") == MiB


def test_wait_after_a_refused_move_survives_a_restart(broker, kernel):
    k, home, takers = refused_move(broker, kernel)
    broker.kill()
    assert broker.started
    k.wait_state("queued")
    assert takers[home].do("calm")["error"] == 0
    assert k.answer(PATIENCE) is None
    assert k.status()["devices"] == [home]


def test_refused_move_is_an_error_while_the_slice_is_in_use(broker, kernel):
    k = kernel(memory=BIG)
    (home,) = k.do("sub", command={"do": "ask"})
    occupy(kernel, but=[u for u in devices(broker) if u != home])
    k.begin(16 * MiB, byte=1)
    k.do("storm")
    broker.faults.set("migration-refused")
    assert k.do("sub", command={"do": "context"}) == {"cuda": 46}
    row = broker.rows("refuse")
    assert row == []
    assert k.do("calm")["error"] == 0
    assert k.do("check") == 16 * MiB
    k.do("kill")


def alone(broker, place, size):
    """Return whether ``size`` bytes are in use on GPU ``place``, and no GPU has foreign memory."""
    found = devices(broker)
    foreign = any(d["memory_foreign"] for d in found.values())
    return found[place]["memory_used"] == size and not foreign


class UnmeasuredBroker(kit.Broker):
    """A broker that does not know the size of a context, so it also grants slices below it."""

    module = "tests.broker.unmeasured_broker"


def test_process_sees_its_gpu_after_a_failed_first_context(folder, parts, kernels):
    with closing(UnmeasuredBroker(folder, **parts[2])) as broker:
        assert broker.start()["ok"]
        failed_first_context(broker, maker(kernels, broker))


def failed_first_context(broker, kernel):
    k = kernel(memory=16 * MiB, limit=16 * MiB)
    (home,) = k.do("ask")
    (other,) = [uuid for uuid in devices(broker) if uuid != home]
    takers = occupy(kernel, but=[other], memory=480 * MiB)
    assert k.do("context") == {"cuda": 2}  # the process moved, but a context exceeds its slice
    assert k.status()["devices"] == [other]
    assert len(broker.rows("land")) == 1
    assert k.sees() == device_name(other)
    k.wait_state("idle")
    k.server.call("release", session=k.session)
    k.wait_state("detached")
    takers[home].kill()
    wait_until(lambda: broker.session(takers[home].session) is None, "its end", PATIENCE)
    occupy(kernel, but=[home], memory=480 * MiB)
    k.server.call("request", session=k.session, memory=100 * MiB)
    assert k.do("context") is None
    assert k.status()["devices"] == [home]
    assert k.do("alloc", bytes=16 * MiB, byte=1) is None
    wait_until(lambda: alone(broker, home, 16 * MiB + CONTEXT), "it is on its slice", PATIENCE)


def test_contextless_process_moves_with_its_session(broker, kernel):
    k = kernel(memory=BIG)
    k.do("ask")
    assert k.do("retain", device=0) is None
    (first,) = k.status()["devices"]
    assert k.do("release", device=0) is None
    assert k.sees() == device_name(first)
    k.wait_state("idle")
    k.server.call("release", session=k.session)
    k.wait_state("detached")
    occupy(kernel, but=[u for u in devices(broker) if u != first])
    assert k.do("retain", device=0) is None
    (second,) = k.status()["devices"]
    assert second != first
    assert k.do("alloc", bytes=16 * MiB, byte=1) is None
    wait_until(lambda: alone(broker, second, 16 * MiB + CONTEXT), "it is on its slice", PATIENCE)
    assert len(broker.rows("land")) + k.status()["migrations"] == 1


@pytest.mark.parametrize("step", ["move", "cancel"])
def test_refused_or_cancelled_move_frees_its_room(broker, kernel, step):
    k = kernel(memory=BIG)
    (home,) = k.do("ask")
    occupy(kernel, but=[u for u in devices(broker) if u != home])
    k.do("hold", hold="attach")
    k.wait_state("active")
    assert k.do("land", step="begin") is None
    wait_until(lambda: k.status()["landing"] == [home], "the room is its", PATIENCE)
    assert k.do("land", step=step) == ("bad-request" if step == "move" else None)
    assert k.status()["landing"] == []
    k.tell("land", step="begin")
    assert k.answer(30) is None  # if the room were still taken, the answer would take 60 s
    assert k.do("land", step="cancel") is None
    assert k.do("context") is None
    assert broker.rows("land")


def set_landing(k, landing):
    """Write the page as a program's guard does."""
    page = Page.open(Path(k.env["GPUPOOL_PAGE"]))
    (slot,) = [slot for slot in page.read().slots if slot.pid == k.process.pid]
    page.set_landing(slot, landing)
    page.close()


def test_refused_move_ends_after_the_contexts_are_released(broker, kernel):
    broker.faults.set("init-not-enough")  # the driver cannot move a process without a context
    k = kernel(memory=BIG)
    (home,) = k.do("ask")
    occupy(kernel, but=[u for u in devices(broker) if u != home])
    k.do("hold", hold="attach")
    k.wait_state("active")
    assert k.do("land", step="begin") is None
    set_landing(k, LANDING_MOVES)
    broker.faults.set("migration-refused", pid=k.process.pid)
    assert k.do("land", step="move") == "not-moved"
    # The process made its contexts only for the move, so the guard releases them now. The test acts
    # as the guard: it writes into the page that the landing is over.
    assert k.mark() == LANDING_BEGUN
    assert k.status()["landing"] == [home]
    set_landing(k, LANDING_NONE)
    wait_until(lambda: k.status()["landing"] == [], "it has released them", PATIENCE)


# ---------------------------------------------------------------------- agents that wait


class MixedBroker(kit.Broker):
    """A broker with two GPUs of different models."""

    module = "tests.broker.mixed_broker"


@pytest.fixture
def mixed(folder, parts):
    broker = MixedBroker(folder, **parts[2])
    assert broker.start()["ok"]
    yield broker
    broker.close()
    print(broker.tail())


def test_cuinit_during_a_wait_binds_the_session_to_one_model(mixed, kernels):
    kernel = maker(kernels, mixed)
    takers = occupy(kernel)
    k = kernel(memory=BIG)
    k.do("hold", hold="attach")
    k.wait_state("queued")
    (home,) = k.do("ask")
    (other,) = [uuid for uuid in devices(mixed) if uuid != home]
    takers[other].kill()
    wait_until(lambda: mixed.session(takers[other].session) is None, "a GPU is free", PATIENCE)
    # The free GPU is of the other model. ``k`` cannot use it, because ``k`` has already called
    # cuInit. A new kernel can use it.
    second = kernel(memory=BIG)
    second.begin(MiB)
    assert second.status()["devices"] == [other]
    assert k.state() == "queued"
    assert takers[home].do("calm")["error"] == 0
    k.wait_state("active", seconds=PATIENCE)
    assert k.do("context") is None
    assert k.status()["devices"] == [home]


def test_session_attaches_to_the_model_that_cuinit_saw(mixed, kernels):
    kernel = maker(kernels, mixed)
    k = kernel(memory=BIG)
    (home,) = k.do("ask")
    takers = occupy(kernel, but=[uuid for uuid in devices(mixed) if uuid != home])
    k.do("hold", hold="attach")
    k.wait_state("queued")
    assert takers[home].do("calm")["error"] == 0
    k.wait_state("active", seconds=PATIENCE)
    assert k.do("context") is None
    assert k.status()["devices"] == [home]


def test_attach_without_migration_uses_the_gpu_that_cuinit_saw(make_broker, kernels):
    broker = make_broker()
    broker.faults.set("migration-refused")
    assert broker.started
    kernel = maker(kernels, broker)
    k = kernel(memory=BIG)
    (home,) = k.do("ask")
    takers = occupy(kernel, but=[uuid for uuid in devices(broker) if uuid != home])
    k.do("hold", hold="attach")
    k.wait_state("queued")
    assert takers[home].do("calm")["error"] == 0
    k.wait_state("active", seconds=PATIENCE)
    assert k.do("context") is None
    assert k.status()["devices"] == [home]


# ---------------------------------------------------------------------- deaths during a landing


def landing(broker, kernel, fault, **params):
    """Start a landing with this fault in the driver; return the program and its first GPU."""
    k = kernel(memory=BIG)
    (home,) = k.do("ask")
    occupy(kernel, but=[u for u in devices(broker) if u != home])
    broker.faults.set(fault, pid=k.process.pid, **params)
    k.tell("context")
    return k, home


@pytest.mark.parametrize("op", ["checkpoint", "restore"])
def test_next_broker_completes_a_landing_after_a_kill(broker, kernel, op):
    k, _home = landing(broker, kernel, "hang", op=op)
    wait_until(lambda: k.mark() >= 2, "the driver is asked", PATIENCE)
    if op == "restore":
        wait_until(lambda: k.mark() == 3, "the restore has begun", PATIENCE)
    broker.kill()
    broker.faults.clear()
    assert broker.started
    assert k.answer(PATIENCE) is None
    assert k.do("alloc", bytes=16 * MiB, byte=1) is None
    assert k.do("check") == 16 * MiB
    assert k.mark() == 0
    assert k.status()["used_bytes"] == 16 * MiB + CONTEXT


def test_next_broker_completes_a_landing_after_logout_and_kill(broker, kernel):
    k, _home = landing(broker, kernel, "hang", op="checkpoint")
    wait_until(lambda: k.mark() >= 2, "the driver is asked", PATIENCE)
    page = Path(k.env["GPUPOOL_PAGE"])
    kit.remove(page.parent)
    wait_until(page.is_symlink, "the page is back as a link", PATIENCE)
    broker.kill()
    broker.faults.clear()
    assert broker.started
    assert k.answer(PATIENCE) is None
    assert k.do("alloc", bytes=16 * MiB, byte=1) is None
    assert k.do("check") == 16 * MiB
    assert k.mark() == 0
    assert len(broker.rows("land")) == 1


def test_deleted_page_that_no_process_has_open_is_reported(broker, kernel):
    k = kernel(memory=BIG)
    page = Path(k.env["GPUPOOL_PAGE"])
    kit.remove(page.parent)
    wait_until(page.is_symlink, "the page is back as a link", PATIENCE)
    broker.kill()  # only the broker had the page open: the program has not called CUDA
    assert broker.started
    assert (
        f"The page of session {k.session} was deleted, and no process has it open" in broker.tail()
    )
    assert "A process that was moving to its GPU" in broker.tail()


def stuck(broker, kernel):
    """Start a landing that the driver refuses, and the way back, too; the state is intact."""
    broker.faults.set("restore-keeps-state")
    k, _home = landing(broker, kernel, "restore-failed")
    wait_until(lambda: broker.rows("kept"), "the broker tells why it waits", PATIENCE)
    assert k.mark() == LANDING_MOVES
    assert k.status()["state"] == "active"
    return k


def continues(broker, k):
    broker.faults.clear()
    assert k.answer(PATIENCE) is None
    assert k.do("alloc", bytes=16 * MiB, byte=1) is None
    assert k.do("check") == 16 * MiB
    assert k.mark() == LANDING_NONE
    assert k.status()["used_bytes"] == 16 * MiB + CONTEXT
    assert len(broker.rows("land")) == 1


def test_landing_is_undone_when_the_driver_restores_again(broker, kernel):
    k = stuck(broker, kernel)
    assert "is not back on its GPU yet" in broker.rows("kept")[0]["reason"]
    continues(broker, k)


@pytest.mark.parametrize("kills", [1, 2])
def test_next_broker_brings_a_stuck_process_back(broker, kernel, kills):
    k = stuck(broker, kernel)
    for number in range(kills):
        broker.kill()
        assert broker.started
        wait_until(lambda n=number + 2: len(broker.rows("kept")) == n, "it is told", PATIENCE)
        assert k.status()["state"] == "active"
    continues(broker, k)


def test_kernel_that_ends_while_stuck_frees_its_slice(broker, kernel):
    k = stuck(broker, kernel)
    broker.kill()
    assert broker.started
    wait_until(lambda: len(broker.rows("kept")) == 2, "the new broker tells it", PATIENCE)
    k.kill()
    wait_until(lambda: broker.session(k.session) is None, "its session ends", PATIENCE)
    broker.faults.clear()
    kernel(memory=BIG).begin(MiB)


def test_process_killed_while_landing_frees_its_room(broker, kernel):
    k, home = landing(broker, kernel, "hang", op="checkpoint")
    wait_until(lambda: k.mark() >= 2, "the driver is asked", PATIENCE)
    k.kill()
    broker.faults.clear()
    wait_until(lambda: broker.session(k.session) is None, "its session ends", PATIENCE)
    second = kernel(memory=BIG)
    if second.do("ask") == [home]:
        assert second.do("context") is None
    wait_until(
        lambda: not any(d["memory_foreign"] for d in devices(broker).values()),
        "nothing is left of it",
        PATIENCE,
    )
