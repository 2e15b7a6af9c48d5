# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The history of the last minutes, and the total hours of use.

The server invents no values, and uses a bounded amount of memory.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_gpupool.server import kernel_history
from jupyter_gpupool.server.kernel_history import KEPT, KernelHistory, KernelUsage


def kernel(name="k", session="s", **fields):
    return {
        "id": session,
        "kernel_id": name,
        "here": True,
        "state": "idle",
        "guard": True,
        "used_bytes": 10,
        "footprint_bytes": 7,
        "busy_seconds": 0.0,
        "opened_at": 90.0,
        "attached_seconds_total": 0.0,
        **fields,
    }


def view(now, *sessions, utilisation=50):
    devices = [{"uuid": "GPU-0", "utilisation": utilisation}]
    return {"now": now, "sessions": list(sessions), "devices": devices}


# ---------------------------------------------------------------------- the last minutes


def shown(*views, now=None, kernels=("k",)):
    found = KernelHistory()
    for one in views:
        found.take(one)
    return found.shown(views[-1]["now"] if now is None else now, kernels, devices=True)


def test_points_have_the_values_of_the_snapshots():
    found = shown(
        view(100.0, kernel(busy_seconds=5.0), utilisation=None),
        view(102.0, kernel(busy_seconds=6.0, used_bytes=20), utilisation=0),
        view(104.0, kernel(busy_seconds=8.25, used_bytes=None)),
    )
    assert found == {
        "now": 104.0,
        "interval": 1.0,
        "kernels": {
            "k": {"time": [100.0, 102.0, 104.0], "used": [10, 20, 7], "busy": [None, 0.5, 1.0]}
        },
        "devices": {"GPU-0": {"time": [100.0, 102.0, 104.0], "utilisation": [None, 0, 50]}},
    }


def test_history_has_at_most_one_point_a_second():
    found = shown(*(view(100 + n / 10, kernel(busy_seconds=n / 40)) for n in range(50)))
    assert found["kernels"]["k"]["time"] == [100.0, 101.0, 102.0, 103.0, 104.0]
    # ``busy`` is the busy share of the time since the previous point of the history. Several
    # snapshots may lie between two points.
    assert found["kernels"]["k"]["busy"] == [None, 0.25, 0.25, 0.25, 0.25]


@pytest.mark.parametrize(
    "after",
    [
        kernel(session="another process", busy_seconds=9.0),
        kernel(busy_seconds=1.0),  # a new broker counts from zero
        kernel(guard=False),
        kernel(busy_seconds=None),
    ],
)
def test_unmeasured_share_is_null(after):
    found = shown(view(100.0, kernel(busy_seconds=5.0)), view(102.0, after))
    assert found["kernels"]["k"]["busy"] == [None, None]


def test_memory_without_a_guard_comes_from_the_driver():
    blind = {"guard": False, "used_bytes": None}
    found = shown(view(100.0, kernel(**blind)), view(102.0, kernel(**blind, footprint_bytes=None)))
    assert found["kernels"]["k"]["used"] == [7, None]


def test_line_has_a_gap_for_the_time_without_a_client():
    found = KernelHistory()
    found.take(view(100.0, kernel()))
    found.pause()
    found.take(view(160.0, kernel(busy_seconds=30.0)))
    found.pause()
    found.take(view(161.0, kernel(busy_seconds=30.0)))
    seen = found.shown(161.0, ("k",), devices=True)
    assert seen["kernels"]["k"] == {
        "time": [100.0, 101.0, 160.0, 161.0],
        "used": [10, None, 10, 10],
        "busy": [None, None, None, None],
    }
    assert seen["devices"]["GPU-0"]["utilisation"] == [50, None, 50, 50]


def test_only_the_last_minutes_are_kept():
    found = KernelHistory()
    for n in range(1000):
        found.take(view(100.0 + n, kernel(), kernel(f"old{n}", session=f"o{n}")))
    seen = found.shown(1099.0, [f"old{n}" for n in range(1000)] + ["k"])
    times = seen["kernels"]["k"]["time"]
    assert (times[0], times[-1], len(times)) == (1099.0 - KEPT, 1099.0, KEPT + 1)
    assert len(seen["kernels"]) <= KEPT + 2, "kernels that ended long ago are forgotten"
    assert found.shown(5000.0, ("k",))["kernels"]["k"]["time"] == []


def test_other_users_and_ended_kernels_are_not_shown():
    found = KernelHistory()
    found.take(view(100.0, kernel("mine"), kernel("foreign", session="f", here=False)))
    assert set(found.shown(100.0, ("mine", "foreign"))["kernels"]) == {"mine"}
    assert found.shown(100.0, ())["kernels"] == {}
    assert "devices" not in found.shown(100.0, ()), "there may be many"


def test_history_starts_again_after_the_clock_goes_back():
    found = shown(view(1000.0, kernel()), view(100.0, kernel()), view(101.0, kernel()))
    assert found["kernels"]["k"]["time"] == [100.0, 101.0]


@given(
    st.lists(st.tuples(st.floats(0, 400), st.floats(0, 500), st.booleans()), min_size=1),
)
def test_points_are_ordered_and_shares_are_from_0_to_1(steps):
    found, now, busy = KernelHistory(), 100.0, 0.0
    for step, used, pause in steps:
        now, busy = now + step, busy + used
        found.take(view(now, kernel(busy_seconds=busy)))
        if pause:
            found.pause()
    ring = found.shown(now, ("k",))["kernels"]["k"]
    assert len(ring["time"]) == len(ring["used"]) == len(ring["busy"]) <= KEPT + 2
    assert ring["time"] == sorted(set(ring["time"]))
    assert all(share is None or 0 <= share <= 1 for share in ring["busy"])


# ---------------------------------------------------------------------- the total hours


def counted(*steps, since=50.0):
    """Return the seconds of slices and of kernels, as counted after the steps.

    A step is a view, or a view and the new rows of the journal.
    """
    found = KernelUsage(since)
    for step in steps:
        found.take(*(step if isinstance(step, tuple) else (step, ())))
    found = found.shown()
    return found["attached_seconds"], found["kernel_seconds"]


def row(time, kind, session="s", **detail):
    return {"time": time, "kind": kind, "session": session, "detail": detail}


def test_usage_of_a_kernel_starts_when_it_opens():
    one = kernel(attached_seconds_total=4.0)
    assert counted(view(100.0, one)) == (4.0, 10.0)
    assert counted(view(100.0, one), view(130.0, {**one, "attached_seconds_total": 9.0})) == (
        *(9.0, 40.0),
    )


def test_usage_of_an_older_session_starts_at_the_first_snapshot():
    one = kernel(attached_seconds_total=4.0)
    assert counted(view(100.0, one), since=95.0) == (0.0, 0.0)
    later = {**one, "attached_seconds_total": 6.0}
    assert counted(view(100.0, one), view(110.0, later), since=95.0) == (2.0, 10.0)


def test_usage_of_an_ended_kernel_stops_at_its_end():
    one = kernel(attached_seconds_total=4.0)
    assert counted(view(100.0, one), view(200.0)) == (4.0, 10.0)
    # The journal has the time at which the kernel ended. The kernel had its slice until this time.
    assert counted(view(100.0, one), (view(200.0), [row(103.0, "close")])) == (7.0, 13.0)
    rows = [row(101.0, "state", new="detached"), row(103.0, "close")]
    assert counted(view(100.0, one), (view(200.0), rows)) == (5.0, 13.0)
    none = kernel(state="detached", attached_seconds_total=4.0)
    rows = [row(101.0, "state", new="attaching"), row(103.0, "close")]
    assert counted(view(100.0, none), (view(200.0), rows)) == (6.0, 13.0)
    assert counted(view(100.0, none), (view(200.0), [row(103.0, "close")])) == (4.0, 13.0)


def test_newer_rows_are_counted_at_the_next_snapshot():
    one = kernel(attached_seconds_total=4.0)
    rows = [row(99.0, "state", new="detached"), row(102.0, "close")]
    assert counted((view(100.0, one), rows), view(101.0, one)) == (6.0, 12.0)


def test_killed_broker_does_not_reduce_the_usage():
    found = KernelUsage(50.0)
    found.take(view(100.0, kernel(attached_seconds_total=8.0)), ())
    # The broker was killed before it wrote this lease to the journal. So the new broker does not
    # count the 8 s before the kill: it has counted only 2 s for this kernel.
    found.take(view(110.0, kernel(attached_seconds_total=2.0)), ())
    assert found.shown()["attached_seconds"] == 8.0
    found.take(view(113.0, kernel(attached_seconds_total=5.0)), ())
    assert found.shown()["attached_seconds"] == 11.0
    assert found.shown()["kernel_seconds"] == 23.0


def test_number_of_remembered_sessions_is_limited(monkeypatch):
    monkeypatch.setattr(kernel_history, "MOST", 10)
    found = KernelUsage(50.0)
    for n in range(100):
        found.take(view(100.0 + n, kernel(session=f"s{n}", opened_at=99.0 + n)), ())
    assert len(found._seen) <= 11
    assert found.shown()["kernel_seconds"] == 100.0


SESSION = st.builds(
    kernel,
    session=st.sampled_from(["a", "b"]),
    state=st.sampled_from(["detached", "queued", "attaching", "active", "idle", "detaching"]),
    opened_at=st.one_of(st.none(), st.floats(0, 2000)),
    attached_seconds_total=st.floats(0, 2000),
    here=st.booleans(),
)
ROW = st.builds(
    row,
    st.floats(0, 2000),
    st.sampled_from(["state", "close", "open"]),
    session=st.sampled_from(["a", "b", "c"]),
    new=st.sampled_from(["detached", "active", "ended"]),
)


@given(
    st.floats(0, 1000),
    st.lists(
        st.tuples(st.floats(0, 2000), st.lists(SESSION, max_size=2), st.lists(ROW, max_size=3))
    ),
)
def test_usage_only_grows_and_slices_never_exceed_sessions(since, steps):
    """Both figures never decrease, and the seconds of slices never exceed those of kernels.

    This is true even if the clock jumps, or if a count of the broker decreases.
    """
    found = KernelUsage(since)
    before = (0.0, 0.0)
    for now, sessions, rows in steps:
        found.take(view(now, *{s["id"]: s for s in sessions}.values()), rows)
        figures = found.shown()
        after = figures["attached_seconds"], figures["kernel_seconds"]
        assert 0 <= before[0] <= after[0] <= after[1]
        assert before[1] <= after[1]
        before = after


def test_history_is_kept_for_the_documented_time():
    assert (kernel_history.KEPT, kernel_history.LEAST) == (300.0, 1.0), (
        "the documents say five minutes"
    )
