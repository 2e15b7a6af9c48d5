# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Pure functions compute from snapshots what the server shows, and which changes it sends."""

from __future__ import annotations

import json

from jupyter_gpupool.server import views


def session(name, **fields):
    return {
        "id": name,
        "owner": "me",
        "label": f"{name}.ipynb",
        "kernel_id": f"k-{name}",
        "state": "active",
        "granted_bytes": 10,
        "suspended_bytes": 0,
        "devices": ["GPU-0"],
        "device": "GPU-0",
        "queue_position": None,
        "queue_length": 0,
        "expected": None,
        "wait_reason": "",
        "idle_since": None,
        "idle_seconds": None,
        "priority": "notebook",
        **fields,
    }


def other(name, **fields):
    return {
        "id": name,
        "owner": "other",
        "state": "active",
        "granted_bytes": 10,
        "device": "GPU-0",
        "devices": ["GPU-0"],
        "queue_position": None,
        **fields,
    }


def snapshot(*sessions, now=100.0, local=("k-a", "k-b"), user="me", **fields):
    status = {
        "version": "1",
        "now": now,
        "emulated": True,
        "machine": "",
        "socket": "/s",
        "pid": 1,
        "devices": [{"uuid": "GPU-0", "memory_granted": 10}],
        "sessions": list(sessions),
        "queue_length": 0,
        "host": {"used_bytes": 0, "available_bytes": 5},
        "settings": {"idle_timeout": 60.0},
        "broker": {"journal": "/secret"},
        **fields,
    }
    return views.visible(status, views.is_mine(local, user), local)


def kinds(old, new):
    return [(kind, data) for kind, data in views.changes(old, new)]


def test_an_admins_server_shows_no_names_of_other_users():
    # The broker shows all names to root.
    view = snapshot(session("a"), session("x", owner="alice", kernel_id="k-x"))
    mine, theirs = view["sessions"]
    assert mine["here"]
    assert mine["mine"]
    assert mine["label"] == "a.ipynb"
    assert theirs == {
        "id": "x",
        "owner": "other",
        "state": "active",
        "granted_bytes": 10,
        "device": "GPU-0",
        "devices": ["GPU-0"],
        "slices": [],
        "queue_position": None,
        "priority": "notebook",
        "mine": False,
        "here": False,
    }
    assert "alice" not in json.dumps(view)
    assert "secret" not in json.dumps(view)
    assert views.session_of(view, "k-x") is None


def test_kernels_of_this_server_are_mine_under_any_owner_name():
    (found,) = snapshot(session("a", owner="uid-1000"))["sessions"]
    assert found["mine"]
    assert found["here"]


def test_kernel_of_my_other_server_is_mine_but_not_here():
    (found,) = snapshot(session("z"))["sessions"]
    assert found["mine"]
    assert not found["here"]
    assert kinds(None, snapshot(session("z"))) == []


def test_session_without_a_kernel_id_cannot_be_mine():
    (found,) = snapshot(other("a", kernel_id="k-a"))["sessions"]
    assert not found["mine"]
    assert "kernel_id" not in found


def test_the_newest_session_of_a_kernel_is_found():
    view = snapshot(session("a", kernel_id="k-a"), session("b", kernel_id="k-a"))
    assert views.session_of(view, "k-a")["id"] == "b"


def test_small_changes_of_a_share_or_budget_are_not_published():
    def at(left, used, spent=False):
        budgets = [{"group": "", "seconds": 3600, "left": left, "spent": spent, "until": None}]
        share = [{"of": "ada", "used": used, "due": 0.5}]
        return snapshot(session("a", budgets=budgets, share=share, standing=[f"{left}"]))

    # The budget is now below 50 %.
    assert views.delta(at(1800.0, 0.251), at(1799.0, 0.252)) is not None
    assert views.delta(at(1799.0, 0.251), at(1770.0, 0.252)) is None
    assert views.delta(at(1770.0, 0.251), at(1763.0, 0.252)) is not None
    assert views.delta(at(1770.0, 0.254), at(1770.0, 0.256)) is not None
    assert views.delta(at(0.0, 0.251), at(0.0, 0.251, spent=True)) is not None


def test_there_is_no_delta_if_only_time_has_passed():
    old = snapshot(session("a"))
    new = snapshot(
        session("a", idle_seconds=5.0), now=105.0, host={"used_bytes": 0, "available_bytes": 5}
    )
    assert views.delta(old, new) is None


def test_delta_has_queue_length_only_for_waiting_sessions():
    old = snapshot(session("a"), session("b", queue_position=1, queue_length=1), queue_length=1)
    new = snapshot(
        session("a", queue_length=2),
        session("b", queue_position=1, queue_length=2),
        queue_length=2,
    )
    found = views.delta(old, new)
    assert [(s["id"], s["queue_length"]) for s in found["sessions"]] == [("b", 2)]


def test_delta_has_only_the_changes():
    old = snapshot(session("a"), session("b"), other("x"))
    new = snapshot(session("a", state="idle"), other("x"), now=101.0, queue_length=1)
    found = views.delta(old, new)
    assert found["now"] == 101.0
    assert found["queue_length"] == 1
    assert [s["id"] for s in found["sessions"]] == ["a"]
    assert found["removed"] == ["b"]
    assert set(found) == {"now", "queue_length", "sessions", "removed"}
    new = snapshot(session("a"), session("b"), other("x"), devices=[])
    assert views.delta(old, new) == {"now": 100.0, "removed": ["GPU-0"]}


def test_lease_causes_events():
    waiting = {"state": "queued", "queue_position": 1, "devices": [], "granted_bytes": 0}
    old = snapshot(session("a", **waiting, queue_length=1, wait_reason="all in use"))
    lease, queue = kinds(None, old)
    assert lease[0] == "lease"
    assert lease[1]["previous"] is None
    assert lease[1]["state"] == "queued"
    assert queue == (
        "queue",
        {
            "kernel_id": "k-a",
            "position": 1,
            "length": 1,
            "least_seconds": None,
            "most_seconds": None,
            "reason": "all in use",
        },
    )
    assert kinds(old, old) == []
    new = snapshot(session("a"))
    ((kind, data),) = kinds(old, new)
    assert (kind, data["previous"], data["state"], data["devices"]) == (
        *("lease", "queued", "active"),
        ["GPU-0"],
    )
    ((kind, data),) = kinds(new, snapshot())
    assert (kind, data["state"], data["granted_bytes"]) == ("lease", "ended", 0)


def test_a_restarted_kernel_does_not_end():
    old = snapshot(session("a", kernel_id="k-a"))
    new = snapshot(session("b", kernel_id="k-a", state="detached", devices=[], granted_bytes=0))
    ((kind, data),) = kinds(old, new)
    assert (kind, data["previous"], data["state"]) == ("lease", "active", "detached")
    # The kernel's old session may still exist when the new session begins.
    both = snapshot(*old["sessions"], session("b", kernel_id="k-a", state="detached"))
    assert [data["state"] for _, data in kinds(old, both)] == ["detached"]


def test_events_name_no_user():
    for _, data in kinds(None, snapshot(session("a"))):
        assert not {"owner", "label", "pid"} & set(data)


def test_time_left_is_never_negative():
    left = [views.seconds_left({"leaves_at": at}, 100.0) for at in (110.0, 99.0, None)]
    assert left == [10.0, 0.0, None]


def test_free_host_memory_is_published_after_a_large_change():
    gib = 1 << 30

    def told(before, now):
        old, new = (snapshot(host={"used_bytes": 0, "available_bytes": n}) for n in (before, now))
        # The server compares the new value with the value that it sent last. The value in the
        # previous snapshot makes no difference.
        changed = views.delta({**old, "host": new["host"]}, new, before)
        assert changed == views.delta(old, new)
        return changed is not None and changed["host"]["available_bytes"] == now

    assert [told(100 * gib, n * gib) for n in (100, 99, 101)] == [False, True, True]
    assert not told(100 * gib, 99 * gib + 1)
    assert [told(1000, n) for n in (1000, 951, 950, 1049, 1050)] == [
        *(False, False, True, False, True),
    ]
    assert [told(*pair) for pair in ((0, 0), (0, 1), (5, None))] == [False, True, True]
    assert views.delta(
        snapshot(host={"available_bytes": None}), snapshot(host={"available_bytes": 5})
    )


def test_view_hides_the_use_of_other_users_slices():
    pieces = [{"device": "GPU-0", "granted_bytes": 7, "used_bytes": 5}]
    mine, others = snapshot(
        session("a", slices=pieces), session("b", owner="bob", kernel_id="far", slices=pieces)
    )["sessions"]
    assert mine["slices"] == pieces
    assert others["slices"] == [{"device": "GPU-0", "granted_bytes": 7}]


def test_view_hides_the_idle_time_outs_of_other_users():
    known = other("x", state="idle", leaves_at=100.0, wanted=True)
    assert not {"leaves_at", "wanted"} & set(snapshot(known)["sessions"][0])


ORDER = {
    "kind": "pause", "device": "", "reason": "new driver", "by": "root", "since": 90.0,
    "closed": False,
}  # fmt: skip


def test_view_has_admin_orders_without_private_fields():
    private = {"waits": [{"session": "x"}], "others": 1, "files": [{"pid": 1}], "text": "..."}
    assert snapshot(maintenance=[{**ORDER, **private}])["maintenance"] == [ORDER]
    assert snapshot()["maintenance"] == []


def test_delta_has_orders_and_the_configuration_notice():
    """Without these fields in the delta, an open page would keep the old orders and notice."""
    old = snapshot()
    new = {**snapshot(maintenance=[ORDER]), "configuration_notice": "another one"}
    assert views.delta(old, new) == {
        "now": 100.0, "maintenance": [ORDER], "configuration_notice": "another one",
    }  # fmt: skip
    assert views.delta(new, {**old, "configuration_notice": ""})["maintenance"] == []
