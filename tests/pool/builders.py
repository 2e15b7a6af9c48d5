# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Short forms for the tests of the pool: ``lab.open("a")``, ``lab.hold("a")``, ``got(.., Attach)``.

Sizes are a few bytes: a device has 16 bytes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.machine import Pool
from jupyter_gpupool.pool.model import (
    Device,
    Owner,
    PoolSettings,
    Request,
    SessionRecord,
    Slice,
)

from .checks import check_pool

RULES = PoolSettings(
    host_memory=1000,
    resume_headroom=1,
    idle_timeout=300.0,
    ageing=60.0,
    half_life=0.0,
    preempt=frozenset(),
)


def device(index: int, memory: int = 16, **kwargs: Any) -> Device:
    return Device(
        uuid=f"G{index}",
        index=index,
        name=f"test {index}",
        model=kwargs.pop("model", "A"),
        memory_total=memory,
        **kwargs,
    )


class Lab:
    """A pool and its clock. Most methods send one event and return the actions that follow."""

    def __init__(self, *devices: Device, **rules: Any) -> None:
        self.now = 0.0
        self.pool = Pool(dataclasses.replace(RULES, **rules))
        self.past: list[ev.Action] = []
        for d in devices or (device(0), device(1)):
            self.send(ev.DeviceAppeared, device=d)

    def send(self, kind: type[ev.Event], /, **fields: Any) -> list[ev.Action]:
        actions = self.pool.handle(kind(now=self.now, **fields))
        self.past.extend(actions)
        check_pool(self.pool, self.now, deep=False)
        return actions

    def after(self, seconds: float) -> list[ev.Action]:
        """Advance the clock by ``seconds``.

        Send each tick that the pool asks for, and a last tick at the end.
        """
        end = self.now + seconds
        actions: list[ev.Action] = []
        while (at := self.pool.next_wakeup()) is not None and at <= end:
            assert at >= self.now
            self.now = max(self.now, at)
            actions += self.send(ev.Tick)
        self.now = end
        return actions + self.send(ev.Tick)

    # ------------------------------------------------------------------ events

    def open(self, name: str, memory: int = 10, **fields: Any) -> list[ev.Action]:
        owner = fields.pop("owner", f"user-{name}")
        owner = owner if isinstance(owner, Owner) else Owner(owner)
        request = Request(
            memory=memory,
            limit=fields.pop("limit", memory),
            devices=fields.pop("devices", 1),
            compute=fields.pop("compute", 100),
            priority=fields.pop("priority", "notebook"),
        )
        return self.send(
            ev.SessionOpened,
            session=name,
            owner=owner,
            request=request,
            attach=fields.pop("attach", "cell"),
            rid=fields.pop("rid", ""),
            **fields,
        )

    def hold(self, name: str, hold: str = "c") -> list[ev.Action]:
        return self.send(ev.HoldTaken, session=name, hold=hold, kind="cell")

    def drop(self, name: str, hold: str = "c", cuda: bool | None = None) -> list[ev.Action]:
        return self.send(ev.HoldDropped, session=name, hold=hold, cuda=cuda)

    def done(self, name: str, **fields: Any) -> list[ev.Action]:
        fields.setdefault("epoch", self.record(name).epoch if name in self.pool else 1)
        return self.send(ev.AttachDone, session=name, **fields)

    def failed(self, name: str, message: str = "not free", lost: bool = False) -> list[ev.Action]:
        epoch = self.record(name).epoch
        return self.send(ev.AttachFailed, session=name, epoch=epoch, message=message, lost=lost)

    def suspended(self, name: str, *state: tuple[str, int], **fields: Any) -> list[ev.Action]:
        fields.setdefault("epoch", self.record(name).epoch)
        slices = tuple(Slice(*pair) for pair in state)
        return self.send(ev.SuspendDone, session=name, suspended=slices, **fields)

    def refused(self, name: str, kind: str, message: str = "no") -> list[ev.Action]:
        epoch = self.record(name).epoch
        return self.send(ev.SuspendRefused, session=name, epoch=epoch, kind=kind, message=message)

    def end(self, name: str) -> list[ev.Action]:
        return self.send(ev.SessionEnded, session=name, reason="exit")

    def change(self, name: str, memory: int, rid: str = "q", **fields: Any) -> list[ev.Action]:
        request = dataclasses.replace(
            self.record(name).request,
            memory=memory,
            **{"limit": memory, **fields},
        )
        return self.send(ev.RequestChanged, session=name, request=request, rid=rid)

    def grow(self, name: str, more: int, device: str = "", rid: str = "g") -> list[ev.Action]:
        """Ask for ``more`` bytes on ``device``, by default the first device of the slice."""
        slices = self.record(name).slices if name in self.pool else ()
        where = device or (slices[0].device if slices else "G0")
        return self.send(ev.GrowAsked, session=name, device=where, bytes=more, rid=rid)

    def release(self, name: str) -> list[ev.Action]:
        return self.send(ev.ReleaseAsked, session=name, rid="r")

    def keep(self, name: str, seconds: float) -> list[ev.Action]:
        return self.send(ev.KeepAsked, session=name, until=self.now + seconds, rid="k")

    def seen(self, uuid: str, foreign: int = 0, **footprints: int) -> list[ev.Action]:
        return self.send(ev.DeviceMemorySeen, device=uuid, foreign=foreign, footprints=footprints)

    # ------------------------------------------------------------------ shortcuts

    def running(self, name: str, memory: int = 10, **fields: Any) -> None:
        """Open a session and start a cell in it."""
        self.open(name, memory, **fields)
        got(self.hold(name), ev.Attach, session=name)
        got(self.done(name), ev.HoldGranted, session=name)

    def idle(self, name: str, memory: int = 10, **fields: Any) -> None:
        """Open a session, run a cell in it, and end the cell."""
        self.running(name, memory, **fields)
        self.drop(name)

    def parked(self, name: str, used: int, memory: int = 10, **fields: Any) -> None:
        """Open a session and suspend ``used`` bytes of state."""
        self.idle(name, memory, **fields)
        got(self.release(name), ev.Suspend, session=name)
        where = self.record(name).slices[0].device
        self.suspended(name, (where, used))

    # ------------------------------------------------------------------ questions

    def record(self, name: str) -> SessionRecord:
        return self.pool.record(name)

    def state(self, name: str) -> str:
        return self.record(name).state

    def where(self, name: str) -> list[tuple[str, int]]:
        return [(s.device, s.bytes) for s in self.record(name).slices]

    def reason(self, name: str) -> str:
        return self.record(name).wait_reason

    def free(self) -> list[int]:
        return [d.free for d in self.pool.view(self.now).devices]


def all_of(actions: list[ev.Action], kind: type[ev.Action], **fields: Any) -> list[Any]:
    """Return the actions of ``kind`` whose fields have the given values."""
    return [
        a for a in actions if type(a) is kind and all(getattr(a, k) == v for k, v in fields.items())
    ]


def got(actions: list[ev.Action], kind: type[ev.Action], **fields: Any) -> Any:
    """Return the action of ``kind`` with these fields; fail unless exactly one exists."""
    found = all_of(actions, kind, **fields)
    assert len(found) == 1, f"{len(found)} x {kind.__name__} {fields} in {actions}"
    return found[0]


def none(actions: list[ev.Action], kind: type[ev.Action], **fields: Any) -> None:
    assert not all_of(actions, kind, **fields), actions
