# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A promise or a reservation must not delay a session that is further ahead in the queue."""

from __future__ import annotations

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.model import Quota

from .builders import Lab, device, got, none


def test_session_ahead_takes_quota_promised_to_a_later_session():
    """The pool has promised quota and memory to ``behind``. ``first`` takes only the quota."""
    lab = Lab(device(0), device(1, 8), quotas={"u": Quota(leases=1)})
    lab.idle("a", 8)
    assert lab.where("a") == [("G1", 8)]
    lab.running("busy", 16)
    lab.open("behind", 8, owner="u", priority="batch")
    got(lab.hold("behind"), ev.Suspend, session="a")
    lab.open("first", 12, owner="u")  # too large for the device promised to "behind"
    none(lab.hold("first"), ev.Attach)
    got(lab.end("busy"), ev.Attach, session="first")
    assert lab.pool.explain("behind").reason.rule == "quota"


def test_request_that_idle_leases_cannot_serve_waits_for_memory():
    """A suspend of an idle lease would make room for ``less``, but host memory is short.

    No suspend of an idle lease would make room for ``more``. So ``more`` waits for running cells.
    """
    lab = Lab(device(0), device(1))
    lab.running("c", 9)
    lab.idle("d", 5)
    lab.running("a", 10)
    lab.idle("b", 6)
    assert lab.free() == [2, 0]
    lab.send(ev.HostMemorySeen, available=1)
    lab.open("head", 16)
    lab.hold("head")
    lab.open("less", 6)
    lab.hold("less")
    lab.open("more", 7)
    lab.hold("more")
    rules = {n: lab.pool.explain(n).reason.rule for n in ("head", "less", "more")}
    assert rules == {"head": "busy", "less": "host", "more": "busy"}


def test_lease_of_the_former_head_is_reserved_for_next_head():
    """At first, the growth of ``g`` is the head of the queue, and ``h`` is second.

    When ``g`` becomes idle, its growth goes to the end of the queue. Then ``h`` is the head.
    """
    lab = Lab(device(0, 12))
    for name, size in (("x", 6), ("y", 1), ("g", 3)):
        lab.running(name, size)
    lab.change("g", 10)
    for name, size in (("h", 6), ("l", 2)):
        lab.open(name, size)
        none(lab.hold(name), ev.Attach)
    # "h" can start with the bytes of "g" and "y" and the 2 free bytes. So "l" must not get the free
    # bytes.
    none(lab.drop("g"), ev.Attach)
    assert lab.reason("l") == "the free memory is reserved for the next kernel in the queue"


def test_lease_granted_in_this_pass_is_reserved_for_the_head(make):
    """In one pass, the pool grants a lease to ``first`` and reserves the device for ``head``.

    The bytes of this new lease are reserved, too: when it ends, ``head`` has enough bytes.
    """
    lab = make(device(0, 9))
    lab.running("a", 4)
    lab.seen("G0", foreign=5)
    for name, size in (("first", 1), ("head", 5), ("behind", 2)):
        lab.open(name, size)
        lab.hold(name)
    actions = lab.seen("G0")
    got(actions, ev.Attach, session="first")
    none(actions, ev.Attach, session="behind")
    assert lab.pool.explain("behind").reason.rule == "behind-head"
    lab.done("first")
    got(lab.end("first"), ev.Attach, session="head")
