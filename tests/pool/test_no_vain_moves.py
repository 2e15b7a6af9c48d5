# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The pool moves an idle holder only if a waiting session gains by the move.

For each suspend of an idle holder, one of these two statements is true:

* the plan promises the freed bytes to a waiting session;
* the freed bytes are for the head of the queue, and the holder cannot take them back before the
  head has attached.
"""

from __future__ import annotations

import copy
import random

import pytest

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.model import Slice
from jupyter_gpupool.pool.schedule import HEAD

from .builders import Lab, all_of, device, got, none

#: Reasons for which the pool suspends a session even if no other session waits.
OWN_REASONS = {"idle", "release"}


class Watched(Lab):
    """A lab that checks, for each suspend of an idle holder, that one of the statements is true."""

    for_head = 0

    def send(self, kind, /, **fields):
        actions = super().send(kind, **fields)
        for a in all_of(actions, ev.Suspend):
            if not a.busy and a.reason not in OWN_REASONS:
                self.check(a)
        return actions

    def check(self, a):
        plan = self.pool._plan
        devices = {x.device for x in a.slices}
        if a.reason != HEAD:
            promised = {x.device for p in plan.promises.values() for x in p.takes}
            assert devices & promised, f"{a.session} was moved, and nobody gets its bytes"
            return
        type(self).for_head += 1
        held = plan.reservation
        assert held is not None
        head = held.session
        # Try on a copy of the pool: the victim starts a cell directly after its suspend. While the
        # head waits, the victim must not get its bytes back.
        pool = copy.deepcopy(self.pool)
        common = {"now": self.now, "session": a.session}
        done = ev.SuspendDone(
            **common, epoch=a.epoch, suspended=tuple(Slice(x.device, x.bytes) for x in a.slices)
        )
        actions = [*pool.handle(done)]
        actions += pool.handle(ev.HoldTaken(**common, hold="again", kind="cell"))
        if pool.record(head).state == "queued":
            back = [
                x.device for b in all_of(actions, ev.Attach, session=a.session) for x in b.slices
            ]
            assert not devices & {*back}, f"{a.session} has its bytes back, and {head} waits"


def test_idle_slice_stays_if_the_head_does_not_need_it():
    """Two kernels wait for 6 bytes each. With the bytes of the idle lease, only 3 would be free."""
    lab = Watched(device(0, 8), device(1, 8))
    lab.running("cat", 5)
    lab.idle("mine", 2)
    lab.running("bob", 6)
    for name in ("dan", "eve"):
        lab.open(name, 6)
        lab.hold(name)
    none(lab.after(200), ev.Suspend)
    # The end of a running kernel is enough to make room for the head. So "mine" keeps its slice.
    got(lab.end("cat"), ev.Attach, session="dan")
    assert lab.state("mine") == "idle"


def test_bytes_of_an_idle_slice_stay_free_for_the_head():
    lab = Watched(device(0, 8))
    lab.running("cat", 5)
    lab.idle("mine", 2)
    lab.open("head", 8)
    lab.hold("head")
    got(lab.after(60), ev.Suspend, session="mine", reason=HEAD)
    lab.suspended("mine", ("G0", 2))
    why = (
        "The pool took its slice while it was idle: the next kernel in the queue waited for memory."
    )
    assert why in lab.pool.why("mine").lines
    none(lab.hold("mine"), ev.Attach)
    got(lab.end("cat"), ev.Attach, session="head")


@pytest.mark.parametrize("seed", range(6))
def test_idle_holder_moves_only_if_a_waiting_session_gains(seed):
    chance = random.Random(seed)
    lab = Watched(device(0, 16), device(1, 16), ageing=3.0, max_swap_overhead=0.0)
    names = [f"s{i}" for i in range(9)]
    for name in names:
        lab.open(name, chance.choice((2, 3, 5, 6, 8, 11, 14, 16)))
    for _ in range(250):
        name = chance.choice(names)
        state = lab.state(name)
        if state in ("detached", "idle"):
            lab.hold(name)
        elif state == "attaching":
            lab.done(name)
        elif state == "active":
            lab.drop(name)
        elif state == "detaching":
            lab.suspended(name, *((x.device, x.bytes) for x in lab.record(name).slices))
        lab.after(chance.choice((0.0, 0.5, 2.0)))
    assert lab.for_head
