# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What the monitor reports to the pool, and when."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from jupyter_gpupool.broker.gpu import monitor as monitoring
from jupyter_gpupool.broker.gpu.actions import DeviceActions
from jupyter_gpupool.broker.hostmemory import HostRoom
from jupyter_gpupool.devices.model import DeviceSample, ProcessMemory
from jupyter_gpupool.errors import DriverError
from jupyter_gpupool.pool import events as e
from jupyter_gpupool.pool.machine import Pool
from jupyter_gpupool.pool.model import Device, GiB, Owner, PoolSettings, Request, Slice
from jupyter_gpupool.procfs import ProcessId

from .parts import monitor_of


class Core:
    """Stands in for the broker's runner. ``changes`` counts the begins and ends of leases."""

    def __init__(self):
        self.pool = Pool(PoolSettings(default_memory=GiB, host_memory=16 * GiB))
        self.time = 0.0
        self.busy, self.changes, self.sessions = {}, {}, ()
        self.changed = asyncio.Event()
        self.told = 0

    def now(self):
        return self.time

    def handle(self, event):
        self.told += isinstance(event, e.HostMemorySeen)
        return self.pool.handle(event)

    def send(self, event, /, **fields):
        self.time += 1
        return self.handle(event(now=self.time, **fields))

    def lease_changed(self):
        self.changes["G0"] = self.changes.get("G0", 0) + 1


async def unreadable():
    raise DriverError("no devices in this test")


def look(monitor):
    with contextlib.suppress(DriverError):
        asyncio.run(monitor.look())


@pytest.fixture
def a_monitor():
    """Return a function that makes monitors; their threads end with the test."""
    rooms = []

    def make(runner):
        rooms.append(HostRoom())
        return monitor_of(runner, room=rooms[-1], samples=SimpleNamespace(take=unreadable))

    yield make
    for room in rooms:
        room.close()


def test_monitor_reports_host_memory_again_after_each_resume(monkeypatch, a_monitor):
    """After each resume, the monitor must report host memory again.

    The pool subtracts each suspended state from the last report. Without a report after a resume,
    the pool had no host memory left after three suspends, because 3 GiB has room for three states.
    """
    monkeypatch.setattr(HostRoom, "machine", lambda _: 3 * GiB)
    runner = Core()

    async def made():
        return a_monitor(runner)

    monitor = asyncio.run(made())
    device = Device(uuid="G0", index=0, name="x", model="x", memory_total=16 * GiB)
    runner.send(e.DeviceAppeared, device=device)
    request = Request(memory=GiB, limit=GiB)
    runner.send(
        e.SessionOpened, session="a", owner=Owner("o"), request=request, attach="lazy", rid="r"
    )
    for _ in range(20):
        runner.send(e.HoldTaken, session="a", hold="device", kind="device")
        epoch = runner.pool.record("a").epoch
        runner.send(e.AttachDone, session="a", epoch=epoch)
        runner.lease_changed()
        look(monitor)
        runner.send(e.ReleaseAsked, session="a", rid="r")
        runner.send(e.HoldDropped, session="a", hold="device", cuda=True)
        assert runner.pool.record("a").state == "detaching"
        runner.send(
            e.SuspendDone, session="a", epoch=epoch, suspended=(Slice("G0", GiB),), cuda=True
        )
        runner.lease_changed()
        look(monitor)


def test_monitor_reports_only_changes_to_the_pool(monkeypatch, a_monitor):
    monkeypatch.setattr(HostRoom, "machine", lambda _: 3 * GiB)
    runner = Core()

    async def made():
        return a_monitor(runner)

    monitor = asyncio.run(made())
    for _ in range(3):
        look(monitor)
    assert runner.told == 1
    runner.lease_changed()
    look(monitor)
    assert runner.told == 2


#: Bytes of a device: all bytes; the reserved bytes that NVML reports; the further reserved bytes
#: that the broker has measured.
TOTAL, RESERVED, KEPT = 1600, 20, 80

#: Pids of an attached, a suspended and a landing session, and of a process without a session.
ATTACHED, SUSPENDED, LANDING, STRANGER = 11, 12, 13, 14


@pytest.mark.parametrize(
    ("used", "listed", "granted", "want"),
    [
        (500, {ATTACHED: 150, STRANGER: 50}, {"a": 300}, (170, {"a": 150}, {"a": 150})),
        (500, {ATTACHED: 150, -STRANGER: 50}, {"a": 300}, (170, {"a": 150}, {"a": 150})),
        (200, {STRANGER: 50}, {"b": 100}, (50, {"b": 90}, {})),
        (100, {-STRANGER: 100}, {"c": 100}, (0, {"c": 0}, {})),
        (200, {SUSPENDED: 120}, {}, (120, {}, {"s": 120})),
        (200, {LANDING: 120}, {}, (0, {}, {})),
    ],
    ids=[
        "a listed stranger",
        "a number of the host's",
        "what its guard counts",
        "one that has not called cuInit",
        "a suspended one that has memory again",
        "one that is about to be moved to its slice",
    ],
)
def test_sampled_memory_is_attributed_to_its_sessions(
    monkeypatch, used, listed, granted, want, a_monitor
):
    monkeypatch.setattr(monitoring, "identify", lambda pid: ProcessId(pid, 1))
    runner = Core()
    sessions = {
        name: SimpleNamespace(id=name, cuda=name != "c", leaves=("G0",) if name == "l" else ())
        for name in "abcsl"
    }
    runner.sessions = SimpleNamespace(find=sessions.get)
    runner.send(
        e.DeviceAppeared,
        device=Device(
            uuid="G0", index=0, name="x", model="x", memory_total=TOTAL,
            memory_reserved=RESERVED + KEPT,
        ),
    )  # fmt: skip

    async def made():
        return a_monitor(runner)

    monitor = asyncio.run(made())
    owners = {ATTACHED: "a", SUSPENDED: "s", LANDING: "l", STRANGER: None}
    monitor._known = {ProcessId(pid, 1): owner for pid, owner in owners.items()}
    shown = tuple(ProcessMemory(pid, size) for pid, size in listed.items())
    sample = DeviceSample("G0", TOTAL, used, RESERVED, TOTAL - RESERVED - used, shown)
    found = monitor._attribute(sample, granted, {"b": {"G0": 90}})
    assert (found.foreign, found.footprints, found.shown) == want


def test_longer_samples_are_followed_by_longer_pauses(a_monitor):
    """Even if leases change all the time, the samples take at most a quarter of the time."""
    took, ends = 0.1, []

    async def run():
        runner = Core()
        runner.sessions = ("a",)
        monitor, enough = a_monitor(runner), asyncio.Event()
        begins = []

        async def slow():
            begins.append(asyncio.get_running_loop().time())
            await asyncio.sleep(took)  # the monitor measures how long this sample takes
            ends.append(asyncio.get_running_loop().time())
            runner.changed.set()
            if len(ends) == 4:
                enough.set()

        monitor.look = slow
        monitor.start()
        await asyncio.wait_for(enough.wait(), 60)
        await monitor.close()
        return [begin - end for end, begin in zip(ends, begins[1:], strict=False)]

    # On a busy machine the pauses only become longer.
    assert min(asyncio.run(run())) >= monitoring.BREATH * took * 0.95


def test_sample_says_nothing_about_a_later_failure():
    told = []

    def readable(uuid, failed):
        told.append((uuid, failed))
        raise DriverError("the end of this look")

    health = SimpleNamespace(failed={"G0": "NVML cannot read it."}, readable=readable)

    async def take():
        health.failed["G0"] = "Xid 79"
        return [DeviceSample("G0", total=1, used=0, reserved=0, free=1)]

    async def looked():
        room = SimpleNamespace(machine=None, read=read)
        await monitor_of(
            Core(), room=room, samples=SimpleNamespace(take=take), health=health
        ).look()

    async def read(_):
        return GiB

    with pytest.raises(DriverError, match="the end of this look"):
        asyncio.run(looked())
    assert told == [("G0", {"G0": "NVML cannot read it."})]


def test_restore_needs_room_for_all_of_its_state():
    """If a GPU has less room than the state needs, the restore fails and the process ends."""
    pool = Pool(PoolSettings(resume_headroom=GiB))
    device = Device(
        uuid="G0", index=0, name="x", model="x", memory_total=64 * GiB, memory_reserved=2 * GiB
    )
    pool.handle(e.DeviceAppeared(now=0.0, device=device))
    actions = DeviceActions(
        SimpleNamespace(pool=pool), None, samples=None, room=None, pages=None, activity=None,
        health=None, drain_timeout=10.0,
    )  # fmt: skip
    for state, slice_, need in ((10, 11, 11), (61, 62, 62), (62, 62, 62), (63, 62, 63)):
        record = SimpleNamespace(suspended=(Slice("G0", state * GiB),))
        action = e.Attach(session="a", epoch=1, slices=(Slice("G0", slice_ * GiB),), origin=("G0",))
        assert actions._need(record, action) == {"G0": need * GiB}
