# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Tests of a real broker on emulated drivers with quirks.

In some cases it is not known how real drivers behave. A quirk emulates one possible behaviour. The
emulator's README lists the quirks. If a test turns on a quirk, its docstring begins with the quirk.
"""

from __future__ import annotations

import pytest

from .kit import CAPACITY, Kernel, MiB, wait_until

#: The size of a small session: its context and 32 MiB of data fill the slice.
SMALL = 64 * MiB


@pytest.fixture
def made():
    """Make kernels that end with the test."""
    kernels = []

    def make(*args, **kwargs):
        kernels.append(Kernel(*args, **kwargs))
        return kernels[-1]

    yield make
    for one in kernels:
        one.close()


@pytest.fixture
def ready(make_broker):
    """Make a broker whose driver has its quirks from the start."""

    def make(*temperaments, **config):
        broker = make_broker(**config)
        for name, params in temperaments:
            broker.faults.set(name, **params)
        return broker.started

    return make


def device_of(broker, kernel):
    return broker.session(kernel.session)["devices"][0]


def foreign(broker):
    return [d["memory_foreign"] for d in broker.status()["devices"]]


def away(kernel):
    """Suspend a kernel."""
    kernel.do("drop", hold="cell")
    kernel.server.call("release", session=kernel.session)
    kernel.wait_state("detached")


def seen(broker, kernel, least):
    """Wait until a sample shows a kernel's memory."""
    wait_until(
        lambda: (broker.session(kernel.session)["footprint_bytes"] or 0) >= least,
        "its memory to be seen",
    )


# ------------------------------------------------------------------ memory


def test_slice_can_have_all_memory_except_the_drivers_residue(ready, made):
    """residue: the capacity excludes the memory that the driver uses before the first session.

    So no kernel waits for this memory.
    """
    broker = ready(("residue", {"bytes": "40MiB"}))
    (capacity,) = {d["memory_capacity"] for d in broker.status()["devices"]}
    assert capacity == CAPACITY - 40 * MiB - 2 * MiB  # the margin for changes of the residue
    whole = made(broker, "whole", memory=capacity)
    whole.attach()
    whole.do("alloc", bytes=400 * MiB, byte=7)
    seen(broker, whole, 400 * MiB)
    assert foreign(broker) == [0, 0]
    # The residue grows by the whole margin of 2 MiB. The kernel's data nearly fills its slice, and
    # the kernel can still resume.
    away(whole)
    broker.faults.set("residue", bytes="42MiB")
    whole.attach()
    assert whole.do("check") == 400 * MiB
    assert foreign(broker) == [0, 0]


def test_growing_residue_counts_as_outside_the_pool(ready, made):
    """residue: growth beyond the margin counts as memory outside the pool.

    A wait reason mentions this memory, and names no process as its owner.
    """
    broker = ready(("residue", {"bytes": "40MiB"}), devices=["0"])
    capacity = broker.status()["devices"][0]["memory_capacity"]
    one = made(broker, "one", memory=SMALL)
    one.attach()
    one.do("alloc", bytes=32 * MiB, byte=2)  # a full slice hides no growth of the residue
    broker.faults.set("residue", bytes="60MiB")
    wait_until(lambda: foreign(broker)[0] == 18 * MiB, "the growth to be seen")
    whole = made(broker, "whole", memory=capacity)
    whole.do("ask", hold="cell")
    wait_until(
        lambda: "outside the pool" in ((whole.link()["queue"] or {}).get("reason") or ""),
        "the reason",
    )
    broker.faults.set("residue", bytes="40MiB")
    away(one)
    whole.do("got", hold="cell")


def test_growing_residue_is_measured_again_on_a_device_at_rest(ready, made):
    """residue: on a device at rest, the broker measures the residue again, and accepts a growth."""
    broker = ready(("residue", {"bytes": "40MiB"}), devices=["0"])
    before = broker.status()["devices"][0]["memory_capacity"]
    one = made(broker, "one", memory=SMALL)
    one.attach()
    one.do("alloc", bytes=32 * MiB, byte=2)  # a full slice hides no growth of the residue
    broker.faults.set("residue", bytes="60MiB")
    wait_until(lambda: foreign(broker)[0] == 18 * MiB, "the growth to be seen", 60)
    away(one)
    capacity = before - 20 * MiB
    wait_until(
        lambda: broker.status()["devices"][0]["memory_capacity"] == capacity,
        "the device was measured at rest", 60,
    )  # fmt: skip
    wait_until(lambda: foreign(broker)[0] == 0, "what was measured is not foreign", 60)
    whole = made(broker, "whole", memory=capacity)
    whole.attach()
    # The broker measures again when the residue shrinks.
    away(whole)
    broker.faults.set("residue", bytes="40MiB")
    wait_until(
        lambda: broker.status()["devices"][0]["memory_capacity"] == before, "what it was", 60
    )
    one.attach()
    assert one.do("check") == 32 * MiB


def test_context_that_nvml_does_not_list_is_counted_once(ready, made):
    """nvml-less: NVML does not list the context. It is part of the slice, not foreign memory."""
    broker = ready(("nvml-less", {"bytes": "30MiB"}), devices=["0"])
    kernels = [made(broker, f"k{n}", memory=CAPACITY // 4) for n in range(4)]
    for kernel in kernels[:3]:
        kernel.attach()
        kernel.do("alloc", bytes=64 * MiB, byte=3)
        seen(broker, kernel, 60 * MiB)
    assert foreign(broker) == [0]
    kernels[3].attach()
    away(kernels[0])
    # The suspended bytes include the context, although NVML's list showed fewer bytes.
    assert broker.session(kernels[0].session)["suspended_bytes"] == 96 * MiB
    kernels[0].attach()
    assert kernels[0].do("check") == 64 * MiB


@pytest.mark.parametrize(
    "temperament",
    [
        ("nvml-lag", {"ms": 3_600_000}),
        ("suspend-keeps", {"bytes": 0}),
        ("suspend-keeps", {"bytes": "1MiB"}),
    ],
    ids=["as before", "with nothing", "with a little"],
)
def test_suspended_kernel_in_nvmls_list_delays_no_other_kernel(ready, made, temperament):
    """nvml-lag, suspend-keeps: NVML still lists a kernel after its suspend.

    Other kernels get the memory of its slice, and the broker reports no overuse.
    """
    broker = ready(
        temperament, ("residue", {"bytes": "4MiB"}), devices=["0"], overuse="end",
        foreign_processes="report",
    )  # fmt: skip
    capacity = broker.status()["devices"][0]["memory_capacity"]
    one, two = made(broker, "one"), made(broker, "two", memory=capacity)
    one.attach()
    one.do("alloc", bytes=200 * MiB, byte=5)
    seen(broker, one, 200 * MiB)
    away(one)
    two.attach()
    two.do("alloc", bytes=300 * MiB, byte=6)
    seen(broker, two, 300 * MiB)
    assert foreign(broker) == [0]
    away(two)
    one.attach()
    assert one.do("check") == 200 * MiB
    assert not broker.rows("overuse", "foreign", "lost")


def test_kernel_that_grew_in_a_restore_is_suspended_again(ready, made):
    """restore-more: the pool counts the larger memory."""
    broker = ready()
    one = made(broker, "one")
    one.attach()
    one.do("alloc", bytes=64 * MiB, byte=9)
    broker.faults.set("restore-more", bytes="16MiB", count=1)
    for size in (96, 112):
        away(one)
        assert broker.session(one.session)["suspended_bytes"] == size * MiB
        one.attach()
        assert one.do("check") == 64 * MiB


# ------------------------------------------------------------------ time


def test_no_kernel_ends_if_nvml_waits_for_a_copy(ready, made):
    """nvml-waits: NVML answers only after a kernel's copy.

    Meanwhile, a new kernel gets its slice. The broker treats no device as lost, and ends no kernel.
    """
    broker = ready(("nvml-waits", {}))
    one, two = made(broker, "one"), made(broker, "two")
    one.attach()
    one.do("alloc", bytes=64 * MiB, byte=1)
    broker.faults.set("slow-copies", bandwidth="10MB/s", pid=one.process.pid)
    one.do("drop", hold="cell")
    one.server.call("release", session=one.session)
    one.wait_state("detaching")
    two.attach()
    one.wait_state("detached")
    one.attach()
    assert one.do("check") == 64 * MiB
    assert not broker.rows("device-lost", "lost")
    assert "is killed" not in broker.tail()


def test_kernel_survives_a_lock_that_ignores_its_timeout(ready, made):
    """lock-ignores-timeout: the suspend is refused, and the pool suspends the kernel later."""
    broker = ready(lock_timeout=0.2)
    one = made(broker, "one")
    one.attach()
    one.do("alloc", bytes=64 * MiB, byte=1)
    broker.faults.set("lock-ignores-timeout")
    one.do("drop", hold="cell")
    one.server.call("release", session=one.session)
    wait_until(
        lambda: [r for r in broker.rows("refuse") if r["detail"].get("kind") == "drain"],
        "the refusal", 60,
    )  # fmt: skip
    assert one.state() == "idle"
    broker.faults.clear()
    assert one.do("check") == 64 * MiB  # the process is not locked any more
    one.wait_state("detached", seconds=60)
    one.attach()
    assert one.do("check") == 64 * MiB
    assert not broker.rows("lost")


# ------------------------------------------------------------------ restore


def test_restore_that_fails_and_keeps_the_state_is_retried(ready, made):
    """restore-keeps-state: the kernel waits, and the wait reason quotes the driver's error."""
    broker = ready(("restore-keeps-state", {}))
    one = made(broker, "one")
    one.attach()
    one.do("alloc", bytes=64 * MiB, byte=1)
    away(one)
    broker.faults.set("restore-failed", pid=one.process.pid)
    one.do("ask", hold="cell")
    reason = wait_until(
        lambda: (
            (q := one.link()["queue"]) and "still has the GPU state" in q["reason"] and q["reason"]
        ),
        "the reason",
    )
    assert "CUDA_ERROR_OPERATING_SYSTEM" in reason
    broker.faults.clear("restore-failed")
    one.do("got", hold="cell")
    assert one.do("check") == 64 * MiB
    assert not broker.rows("lost")


@pytest.mark.long
def test_state_that_can_never_be_restored_counts_as_lost(ready, made):
    """restore-hides-loss: the driver says that it has the state, but refuses each restore."""
    broker = ready(("restore-hides-loss", {}))
    one = made(broker, "one")
    one.attach()
    one.do("alloc", bytes=64 * MiB, byte=1)
    away(one)
    broker.faults.set("restore-failed", pid=one.process.pid, count=1)
    one.do("ask", hold="cell")
    (row,) = wait_until(lambda: broker.rows("lost"), "the loss", 280)
    assert row["reason"].startswith("The driver refused "), row
    assert "tries again" not in row["reason"]
    other = made(broker, "other")  # other kernels may use its GPU again
    other.attach()


def test_kernel_that_cannot_move_waits_for_its_gpu(ready, made):
    """The kernel waits for its old GPU, and the wait reason names this GPU.

    In the self-test, the driver moved a process to another GPU. Later, the driver refuses to move
    the kernel (fault ``migration-refused``).
    """
    broker = ready()
    one, busy = made(broker, "one"), made(broker, "busy")
    one.attach()
    one.do("alloc", bytes=64 * MiB, byte=1)
    first = device_of(broker, one)
    away(one)
    busy.attach()
    if device_of(broker, busy) != first:  # best fit may take either device
        other = made(broker, "other")
        other.attach()
        busy, other = other, busy
        away(other)
    broker.faults.set("migration-refused")
    one.do("ask", hold="cell")
    wait_until(lambda: (q := one.link()["queue"]) and "did not move" in q["reason"], "the reason")
    away(busy)
    one.do("got", hold="cell")
    assert device_of(broker, one) == first
    assert one.do("check") == 64 * MiB
    assert not broker.rows("lost")
