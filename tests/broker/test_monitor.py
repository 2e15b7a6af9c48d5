# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What the monitor tells the pool, and when."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from types import SimpleNamespace

from jupyter_gpupool.broker import host
from jupyter_gpupool.broker.monitor import Monitor
from jupyter_gpupool.errors import DriverError
from jupyter_gpupool.pool import events as e
from jupyter_gpupool.pool.machine import Pool
from jupyter_gpupool.pool.model import Device, GiB, Owner, PoolSettings, Request, Slice


class Runner:
    """A pool and its clock; ``changes`` counts leases that came and went, as the broker does."""

    def __init__(self):
        self.pool = Pool(PoolSettings(default_memory=GiB, host_memory=16 * GiB))
        self.time = 0.0
        self.busy, self.changes = {}, {}
        self.told = 0

    def now(self):
        return self.time

    def handle(self, event):
        self.told += isinstance(event, e.HostMemorySeen)
        return self.pool.handle(event)

    def send(self, event, /, **fields):
        self.time += 1
        return self.handle(event(now=self.time, **fields))

    def changed(self):
        self.changes["G0"] = self.changes.get("G0", 0) + 1


async def unreadable():
    raise DriverError("no devices in this test")


def look(monitor):
    with contextlib.suppress(DriverError):
        asyncio.run(monitor.look())


def a_monitor(runner):
    return Monitor(runner, SimpleNamespace(sample=unreadable), None, logging.getLogger("test"))


def test_a_session_can_be_suspended_for_ever_though_host_memory_stays_as_it_is(monkeypatch):
    """Each suspend counts against the last word of what the host has; resumes bring news, too.

    Without that word, room for three states was used up by three suspends, all of them over.
    """
    monkeypatch.setattr(host, "available", lambda *_: 3 * GiB)
    runner = Runner()

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
        runner.changed()
        look(monitor)
        runner.send(e.ReleaseAsked, session="a", rid="r")
        runner.send(e.HoldDropped, session="a", hold="device", cuda=True)
        assert runner.pool.record("a").state == "detaching"
        runner.send(
            e.SuspendDone, session="a", epoch=epoch, suspended=(Slice("G0", GiB),), cuda=True
        )
        runner.changed()
        look(monitor)


def test_without_anything_new_the_pool_is_not_told(monkeypatch):
    monkeypatch.setattr(host, "available", lambda *_: 3 * GiB)
    runner = Runner()

    async def made():
        return a_monitor(runner)

    monitor = asyncio.run(made())
    for _ in range(3):
        look(monitor)
    assert runner.told == 1
    runner.changed()
    look(monitor)
    assert runner.told == 2
