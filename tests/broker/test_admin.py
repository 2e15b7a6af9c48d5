# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Only an admin may give orders about the sessions of other users."""

from __future__ import annotations

import signal
import time

import pytest

from jupyter_gpupool.errors import RefusedError

from .kit import Kernel, MiB, wait_until
from .test_lies import as_nobody, machine_wide, root_only

__all__ = ["machine_wide"]  # a fixture

#: Orders that only an admin may send. Each order is about a session.
ORDERS = (
    ("recall", {"minutes": 5}),
    ("prioritise", {"priority": "batch"}),
    ("end", {}),
)


@pytest.fixture
def busy(kernel):
    """A kernel in the middle of a cell, with data on its GPU."""
    found = kernel("train.ipynb", memory=300 * MiB)
    found.attach()
    found.do("alloc", bytes=64 * MiB, byte=1)
    return found


def test_recall_suspends_a_busy_kernel_and_informs_its_owner(broker, busy):
    with broker.client() as client:
        answer = client.call("recall", session=busy.session, minutes=0.05, reason="a lecture")
        assert answer["note"].startswith("The pool takes the slice back in 3 s: ")
    shown = broker.session(busy.session)
    assert shown["recall_at"] is not None
    notice = wait_until(lambda: busy.link()["notice"], "the notice")
    assert "takes the slice of this kernel back in 3 s: a lecture. Nothing is lost" in notice
    wait_until(lambda: broker.session(busy.session)["suspends"] == 1, "it was suspended")
    # No other kernel waits, so the kernel gets its slice back at once, and the cell continues.
    wait_until(lambda: busy.state() == "active", "it has a slice again")
    assert busy.do("check") == 64 * MiB
    assert broker.session(busy.session)["recall_at"] is None
    (row,) = broker.rows("admin")
    assert (row["session"], row["detail"]["order"]) == (busy.session, "recall")
    assert row["detail"]["by"] in row["reason"]
    assert f"session {busy.session}: recall in 3 s" in broker.tail()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "needs the number of minutes"),
        ({"minutes": 0}, "cannot be taken back in 0 minutes"),
        ({"minutes": -5}, "cannot be taken back in -5 minutes"),
        ({"minutes": 10081}, "cannot be taken back in 10081 minutes"),
        ({"minutes": 5, "cancel": True}, "either a number of minutes or 'cancel'"),
        ({"minutes": ""}, "'minutes' of a 'recall' message has the wrong type"),
        ({"minutes": "5"}, "'minutes' of a 'recall' message has the wrong type"),
        ({"minutes": None}, "'minutes' of a 'recall' message has the wrong type"),
        ({"minutes": True}, "'minutes' of a 'recall' message has the wrong type"),
    ],
)
def test_invalid_recall_is_refused_and_takes_no_slice(broker, busy, fields, words):
    with broker.client() as client, pytest.raises(RefusedError, match=words):
        client.call("recall", session=busy.session, **fields)
    shown = broker.session(busy.session)
    assert (shown["recall_at"], shown["state"]) == (None, "active")
    assert broker.rows("admin") == []


def test_recall_is_kept_after_the_broker_is_killed(broker, busy):
    broker.disturbed = True
    with broker.client() as client:
        client.call("recall", session=busy.session, minutes=60)
    at = broker.session(busy.session)["recall_at"]
    broker.kill()
    assert broker.started
    assert broker.session(busy.session)["recall_at"] == at
    with broker.client() as client:
        answer = client.call("recall", session=busy.session, cancel=True)
    assert answer["note"] == "The slice stays."
    assert broker.session(busy.session)["recall_at"] is None


def test_changed_priority_applies_and_the_owner_gets_a_notice(broker, busy):
    with broker.client() as client:
        answer = client.call("prioritise", session=busy.session, priority="batch", reason="night")
        assert answer["request"]["priority"] == "batch"
        with pytest.raises(RefusedError, match="no-such"):
            client.call("prioritise", session=busy.session, priority="no-such")
    assert broker.session(busy.session)["priority"] == "batch"
    notice = wait_until(lambda: busy.link()["notice"], "the notice")
    assert notice.endswith("has moved this kernel to the priority class batch: night.")
    assert [row["detail"]["before"] for row in broker.rows("admin")] == ["notebook"]


def test_admin_ends_a_kernel_and_its_slice_becomes_free(broker, busy):
    with broker.client() as client:
        assert client.call("end", session=busy.session, reason="x")["note"]
    wait_until(lambda: broker.session(busy.session) is None, "the session is gone")
    assert busy.process.wait(60) != 0
    reasons = [row["reason"] for row in broker.rows("admin", "close")]
    assert len(reasons) == 2
    assert all("has ended this kernel: x." in reason for reason in reasons)
    assert all(device["memory_granted"] == 0 for device in broker.status()["devices"])


def test_figures_of_the_last_hour_include_a_granted_slice(broker, busy):
    uuid = broker.session(busy.session)["device"]

    def shown():
        with broker.client() as client:
            hour = client.call("hour")
        granted = hour["devices"][uuid]["granted"][-1]
        return hour if granted else None

    hour = wait_until(shown, "a sample with the slice")
    assert hour["devices"][uuid]["granted"][-1] <= 300 * MiB
    assert hour["queue"][-1] == 0


@root_only
def test_only_admins_give_orders(machine_wide):
    mine = Kernel(machine_wide, "mine")
    calls = [(kind, {"session": mine.session, **fields}) for kind, fields in ORDERS]
    calls.append(("maintain", {"action": "pause"}))
    try:
        mine.attach()
        status, *answers = as_nobody(machine_wide.socket, ("status", {}), *calls)
        assert status["admin"] is False
        assert [answer["code"] for answer in answers] == ["not-allowed"] * 4
        shown = machine_wide.session(mine.session)
        assert (shown["recall_at"], shown["priority"]) == (None, "notebook")
        assert machine_wide.status()["admin"] is True
        machine_wide.configure(admins=["nobody"])
        machine_wide.process.send_signal(signal.SIGHUP)
        end = time.monotonic() + 30
        while not (status := as_nobody(machine_wide.socket, ("status", {}))[0])["admin"]:
            assert time.monotonic() < end, machine_wide.tail()
        assert [s["label"] for s in status["sessions"]] == ["mine"], "an admin sees names"
        (answer,) = as_nobody(machine_wide.socket, calls[0])
        assert answer["note"].startswith("The pool takes the slice back in 5 min")
        assert machine_wide.session(mine.session)["recall_reason"].startswith(
            "the administrator nobody took"
        )
    finally:
        mine.close()
