# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Requests: quotas, impossible and changed sizes, release, keep; and the wording of answers."""

from __future__ import annotations

import dataclasses

import pytest

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.model import GiB, PoolSettings, Quota, Slice

from .builders import RULES, Lab, all_of, device, got, none


def suspends(actions):
    return [a.session for a in all_of(actions, ev.Suspend)]


def attaches(actions):
    return [a.session for a in all_of(actions, ev.Attach)]


# --------------------------------------------------------------------------- impossible requests


@pytest.mark.parametrize(
    ("fields", "rules", "code"),
    [
        ({"memory": 0}, {}, "bad-request"),
        ({"memory": 4, "limit": 3}, {}, "bad-request"),
        ({"memory": 4, "devices": 0}, {}, "bad-request"),
        ({"memory": 4, "compute": 0}, {}, "bad-request"),
        ({"memory": 4, "compute": 101}, {}, "bad-request"),
        ({"memory": 4, "priority": "vip"}, {}, "unknown-priority"),
        ({"memory": 17}, {}, "over-device"),
        ({"memory": 16}, {"reserve": 1}, "over-device"),
        ({"memory": 4, "devices": 3}, {}, "too-many-devices"),
        ({"memory": 9}, {"max_memory_per_kernel": 8}, "over-kernel-limit"),
        ({"memory": 8, "limit": 9}, {"max_memory_per_kernel": 8}, "over-kernel-limit"),
        ({"memory": 4, "limit": 17}, {}, "over-device"),
        ({"memory": 4, "limit": 9}, {"quotas": {"*": Quota(memory=8)}}, "over-quota"),
        ({"memory": 4, "limit": 5, "devices": 2}, {"quotas": {"*": Quota(memory=8)}}, "over-quota"),
        ({"memory": 9}, {"quotas": {"*": Quota(memory=8)}}, "over-quota"),
        ({"memory": 5, "devices": 2}, {"quotas": {"*": Quota(memory=8)}}, "over-quota"),
        ({"memory": 4, "devices": 2}, {"quotas": {"*": Quota(devices=1)}}, "over-quota"),
        ({"memory": 4}, {"quotas": {"user-a": Quota(leases=0)}}, "over-quota"),
        ({"memory": 9}, {"quotas": {"*": Quota(suspended=8)}}, "over-quota"),
        ({"memory": 9}, {"host_memory": 8}, "over-host"),
        ({"memory": 5, "devices": 2}, {"host_memory": 8}, "over-host"),
    ],
)
def test_impossible_request_is_refused_at_once(make, fields, rules, code):
    lab = make(**rules)
    refusal = got(lab.open("a", rid="1", **fields), ev.Answer, rid="1").refusal
    assert refusal.code == code
    assert refusal.message.endswith(".")
    assert refusal.next_step.endswith(".")
    assert "a" not in lab.pool
    # An open session that asks for the same values gets the same refusal. It keeps its old request.
    lab.open("b", 2, owner="user-a")
    if "b" in lab.pool:
        memory = fields["memory"]
        more = {k: v for k, v in fields.items() if k != "memory"}
        assert got(lab.change("b", memory, **more), ev.Answer).refusal.code == code
        assert lab.record("b").request.memory == 2
        assert attaches(lab.hold("b")) == ["b"]
    else:
        assert rules["quotas"]["user-a"].leases == 0


def test_host_budget_is_ignored_without_suspend(make):
    lab = make(device(0, can_suspend=False), host_memory=1)
    assert got(lab.open("a", 16, rid="1"), ev.Answer).refusal is None


def test_pool_without_devices_refuses_and_says_what_to_run():
    lab = Lab.__new__(Lab)
    from jupyter_gpupool.pool.machine import Pool

    lab.now, lab.pool, lab.past = 0.0, Pool(RULES), []
    refusal = got(lab.open("a", 4), ev.Answer).refusal
    assert refusal.code == "no-device"
    assert "jupyter gpupool doctor" in refusal.next_step


def test_refusals_say_what_is_possible_and_what_to_do():
    lab = Lab(
        device(0, 16 * GiB),
        max_memory_per_kernel=12 * GiB,
        host_memory=64 * GiB,
        quotas={"*": Quota(memory=10 * GiB)},
    )
    assert str(got(lab.open("a", 14 * GiB), ev.Answer).refusal) == (
        "14 GiB was asked for; a kernel may have at most 12 GiB on a GPU "
        "(c.GPUPool.max_memory_per_kernel). Ask for at most 12 GiB, or ask an admin for more."
    )
    assert str(got(lab.open("a", 11 * GiB), ev.Answer).refusal) == (
        "11 GiB was asked for; your quota for all your kernels together is 10 GiB of GPU memory. "
        "Ask for at most 10 GiB, or ask an admin for a larger quota."
    )
    lab = Lab(device(0, 2 * GiB))
    assert str(got(lab.open("a", GiB, limit=64 * GiB), ev.Answer).refusal) == (
        "A limit of 64 GiB was asked for; the largest GPU can give at most 2 GiB. "
        "Give a limit of at most 2 GiB."
    )


def test_changed_rules_end_waits_that_have_become_impossible(make):
    lab = make(device(0))
    lab.running("a", 16)
    lab.open("w", 12)
    lab.hold("w")
    rules = dataclasses.replace(lab.pool.settings, max_memory_per_kernel=8)
    refusal = got(lab.send(ev.SettingsChanged, settings=rules), ev.HoldRefused, session="w").refusal
    assert refusal.code == "over-kernel-limit"
    assert lab.state("w") == "detached"
    assert lab.state("a") == "active"


# --------------------------------------------------------------------------- quotas


def test_session_over_its_quota_waits_and_the_reason_says_so(make):
    lab = make(quotas={"ann": Quota(memory=16)})
    lab.running("a", 10, owner="ann")
    lab.open("b", 10, owner="ann")
    assert attaches(lab.hold("b")) == []
    assert lab.reason("b") == "your quota of 16 B is in use by your other kernel"
    # The wait of b does not delay other owners.
    lab.open("c", 10)
    assert attaches(lab.hold("c")) == ["c"]
    assert attaches(lab.end("a")) == ["b"]


def test_idle_session_makes_room_in_its_owners_quota(make):
    lab = make(quotas={"ann": Quota(memory=16)})
    lab.idle("a", 10, owner="ann")
    lab.idle("other", 4)
    lab.open("b", 10, owner="ann")
    actions = lab.hold("b")
    assert suspends(actions) == ["a"]
    assert attaches(lab.suspended("a", ("G0", 3))) == ["b"]


@pytest.mark.parametrize("quota", [Quota(leases=1), Quota(devices=1)])
def test_quotas_limit_the_number_of_leases_and_devices(make, quota):
    lab = make(quotas={"*": quota})
    lab.running("a", 2, owner="ann")
    lab.open("b", 2, owner="ann")
    assert attaches(lab.hold("b")) == []
    lab.open("c", 2, owner="bob")
    assert attaches(lab.hold("c")) == ["c"]
    assert attaches(lab.end("a")) == ["b"]


def test_quota_goes_to_the_session_that_asked_first(make):
    lab = make(quotas={"ann": Quota(memory=16)})
    lab.running("a", 10, owner="ann")
    lab.open("b", 10, owner="ann")
    lab.hold("b")
    lab.open("c", 6, owner="ann")
    assert attaches(lab.hold("c")) == []
    assert (
        lab.reason("c") == "another kernel of yours is ahead in the queue and waits for your quota"
    )
    assert attaches(lab.end("a")) == ["b", "c"]


def test_full_quota_of_suspended_state_prevents_a_suspend(make):
    lab = make(device(0), quotas={"ann": Quota(suspended=12)})
    lab.parked("p", used=8, memory=8, owner="ann")
    lab.idle("a", 10, owner="ann")
    lab.open("w", 16)
    assert suspends(lab.hold("w")) == []
    assert suspends(lab.end("p")) == ["a"]


def test_the_headroom_of_a_resume_is_not_charged(make):
    lab = make(quotas={"ann": Quota(memory=16)})
    lab.parked("a", used=8, memory=8, owner="ann")
    lab.running("b", 8, owner="ann")
    assert got(lab.hold("a"), ev.Attach).slices[0].bytes == 9
    lab.done("a")
    assert lab.where("a")[0][1] == 8


# --------------------------------------------------------------------------- another size


def test_a_slice_grows_at_once_if_there_is_room(lab):
    lab.running("a", 4)
    actions = lab.change("a", 12)
    assert got(actions, ev.Resize).slices == (Slice("G0", 12),)
    assert got(actions, ev.Answer).note == "The slice is 12 B now."


def test_slice_grows_after_an_idle_neighbour_has_yielded(make):
    lab = make(device(0))
    lab.running("a", 4)
    lab.idle("b", 10)
    actions = lab.change("a", 12)
    assert suspends(actions) == ["b"]
    assert (
        got(actions, ev.Answer).note == "The slice stays at 4 B until idle kernels have made room."
    )
    assert got(lab.suspended("b", ("G0", 2)), ev.Resize).slices == (Slice("G0", 12),)


def test_slice_grows_when_memory_becomes_free(make):
    lab = make(device(0))
    lab.running("a", 4)
    lab.running("b", 10)
    actions = lab.change("a", 12)
    assert "It grows as soon as memory becomes free" in got(actions, ev.Answer).note
    assert lab.where("a") == [("G0", 4)]
    assert got(lab.end("b"), ev.Resize, session="a").slices == (Slice("G0", 12),)


def test_answer_names_the_quota_that_stops_growth(make):
    lab = make(device(0), quotas={"ann": Quota(memory=12)})
    lab.running("a", 4, owner="ann")
    lab.running("b", 6, owner="ann")
    assert got(lab.change("a", 8), ev.Answer).note == (
        "The slice stays at 4 B: your quota of 12 B is in use by your other kernel. "
        "It grows when the quota has room."
    )
    assert got(lab.end("b"), ev.Resize, session="a").slices == (Slice("G0", 8),)


def test_answer_has_the_limit_and_the_guarantee(lab):
    lab.running("a", 4)
    assert got(lab.change("a", 4, limit=8), ev.Answer).note == (
        "The slice is 4 B now. The slice may grow to 8 B while that much is free; 4 B is "
        "guaranteed."
    )


def test_waiting_growth_ends_with_the_lease(make):
    lab = make(device(0))
    lab.running("a", 4)
    lab.running("b", 10)
    lab.change("a", 12)
    lab.drop("a")
    lab.after(300)
    lab.suspended("a", ("G0", 2))
    none(lab.end("b"), ev.Resize)
    assert got(lab.hold("a"), ev.Attach).slices[0].bytes == 12


def test_slice_shrinks_when_a_sample_shows_its_use(lab):
    lab.running("a", 12)
    actions = lab.change("a", 6)
    none(actions, ev.Resize)
    assert "when the pool has measured the memory in use" in got(actions, ev.Answer).note
    assert got(lab.seen("G0", a=5), ev.Resize).slices == (Slice("G0", 6),)


def test_slice_does_not_shrink_below_its_use(lab):
    lab.running("a", 12)
    lab.seen("G0", a=9)
    refusal = got(lab.change("a", 6), ev.Answer).refusal
    assert refusal.code == "in-use"
    assert refusal.details["in_use"] == 9
    assert lab.record("a").request.memory == 12


def test_slice_does_not_shrink_below_suspended_state(lab):
    lab.parked("a", used=9)
    assert got(lab.change("a", 6), ev.Answer).refusal.code == "in-use"
    assert got(lab.change("a", 9), ev.Answer).refusal is None


def test_first_use_of_cuda_fixes_the_number_of_devices(lab):
    lab.parked("a", used=5)
    refusal = got(lab.change("a", 10, devices=2), ev.Answer).refusal
    assert refusal.code == "devices-bound"
    assert "Restart the kernel" in refusal.next_step


def test_number_of_devices_may_change_before_cuda_is_used(lab):
    lab.open("a", 10)
    assert got(lab.change("a", 10, devices=2), ev.Answer).refusal is None
    assert len(got(lab.hold("a"), ev.Attach).slices) == 2


def test_a_waiting_session_may_ask_for_less_and_be_served(make):
    lab = make(device(0))
    lab.running("a", 10)
    lab.open("w", 10)
    lab.hold("w")
    actions = lab.change("w", 6)
    assert attaches(actions) == ["w"]


def test_change_while_attaching_applies_after_the_attach(lab):
    lab.open("a", 4)
    lab.hold("a")
    none(lab.change("a", 9), ev.Resize)
    assert got(lab.done("a"), ev.Resize).slices == (Slice("G0", 9),)


# --------------------------------------------------------------------------- release and keep


def test_release_of_an_idle_slice_begins_at_once(lab):
    lab.idle("a")
    actions = lab.release("a")
    assert suspends(actions) == ["a"]
    assert got(actions, ev.Answer).note == "The slice goes back to the pool."


def test_release_of_a_busy_slice_waits_for_the_last_hold(lab):
    lab.running("a")
    lab.hold("a", "c2")
    assert "when the running cell is done" in got(lab.release("a"), ev.Answer).note
    assert suspends(lab.drop("a", "c")) == []
    assert suspends(lab.drop("a", "c2")) == ["a"]


def test_answer_to_a_release_says_that_there_is_no_slice(make):
    lab = make(device(0))
    lab.running("a", 16)
    lab.open("b", 16)
    assert got(lab.release("b"), ev.Answer).note == "The kernel has no slice."
    lab.hold("b")
    assert got(lab.release("b"), ev.Answer).refusal.code == "nothing-to-release"
    lab.drop("a")
    assert "already taking" in got(lab.release("a"), ev.Answer).note


def test_release_is_refused_on_a_device_without_suspend(make):
    lab = make(device(0, can_suspend=False))
    lab.idle("a")
    refusal = got(lab.release("a"), ev.Answer).refusal
    assert refusal.code == "cannot-suspend"
    lab.seen("G0", a=0)
    assert suspends(lab.release("a")) == ["a"]


def test_release_waits_for_host_memory(make):
    lab = make(host_memory=16)
    lab.parked("p", used=10)
    lab.idle("a", 10)
    assert "as soon as there is room" in got(lab.release("a"), ev.Answer).note
    assert suspends(lab.end("p")) == ["a"]


def test_keep_postpones_the_idle_time_out(lab):
    lab.idle("a")
    assert "stays for" in got(lab.keep("a", 1000), ev.Answer).note
    assert suspends(lab.after(999)) == []
    assert suspends(lab.after(1)) == ["a"]


def test_keep_needs_a_slice(lab):
    lab.open("a")
    assert got(lab.keep("a", 60), ev.Answer).refusal.code == "nothing-to-keep"
    assert got(lab.keep("a", 0), ev.Answer).refusal is None
    lab.hold("a")
    lab.done("a")
    lab.drop("a")
    assert suspends(lab.after(300)) == ["a"], "the refused keep changes nothing"


@pytest.mark.parametrize(("most", "asked"), [(3600.0, 3601), (0.0, 1)])
def test_keep_for_longer_than_allowed_is_refused(make, most, asked):
    lab = make(max_keep=most)
    lab.idle("a")
    refusal = got(lab.keep("a", asked), ev.Answer).refusal
    assert (refusal.code, refusal.details["most"]) == ("over-keep", most)
    assert got(lab.keep("a", most), ev.Answer).refusal is None


def test_refusal_of_a_too_small_request_names_the_minimum(make):
    small = device(0, 16 * GiB, context_bytes=300 << 20)
    other = dataclasses.replace(small, uuid="G1", index=1, context_bytes=400 << 20)
    lab = make(small, other, host_memory=100 * GiB)
    lab.open("a", GiB)
    refusal = got(lab.change("a", 1 << 20), ev.Answer).refusal
    assert refusal.code == "under-least"
    assert refusal.next_step == "Ask for at least 302 MiB."
    assert got(lab.change("a", 302 << 20), ev.Answer).refusal is None
    refusal = got(lab.open("b", 1 << 20, rid="1"), ev.Answer, rid="1").refusal
    assert (refusal.code, "b" in lab.pool) == ("under-least", False)


def test_keep_for_zero_seconds_ends_an_earlier_keep(lab):
    lab.idle("a")
    lab.keep("a", 1000)
    lab.after(400)
    assert suspends(lab.keep("a", 0)) == ["a"]


# --------------------------------------------------------------------------- restart


def test_restarted_broker_continues_from_the_journal(make):
    old = make(device(0))
    old.parked("p", used=6)
    old.idle("i", 8)
    records = old.pool.records()
    lab = make(device(0))
    lab.now = 1000.0
    lab.send(ev.Recovered, records=tuple(records))
    assert lab.state("p") == "detached"
    assert lab.state("i") == "idle"
    assert lab.free() == [8]
    assert lab.pool.view(lab.now).host_used == 6
    # For one second after the restart (GRACE), the pool preempts no restored session. In this time,
    # an agent with a running cell can reconnect.
    lab.open("w", 16)
    assert suspends(lab.hold("w")) == []
    assert suspends(lab.after(1)) == ["i"]
    assert attaches(lab.suspended("i", ("G0", 2))) == ["w"]
    lab.end("w")
    assert got(lab.hold("p"), ev.Attach).epoch == 2


def test_waiting_session_keeps_its_place_across_a_restart(make):
    old = make(device(0))
    old.running("a", 16)
    old.open("w", 16)
    old.now = 100.0
    old.hold("w")
    records = old.pool.records()
    lab = make(device(0))
    lab.now = 200.0
    detached = (
        dataclasses.replace(r, state="detached") if r.state == "queued" else r for r in records
    )
    lab.send(ev.Recovered, records=tuple(detached))
    lab.open("later", 16)
    lab.hold("later")
    lab.hold("w")
    positions = {v.record.id: v.queue_position for v in lab.pool.view(lab.now).sessions}
    assert (positions["w"], positions["later"]) == (1, 2)


def test_recovered_lease_on_a_lost_device_is_kept(make):
    old = make(device(0), device(1))
    old.idle("a", 10)
    (record,) = old.pool.records()
    lab = make(device(1))
    lab.send(ev.Recovered, records=(record,))
    assert lab.state("a") == "idle"
    lab.open("b", 16)
    assert got(lab.hold("b"), ev.Attach).slices[0].device == "G1"


def test_default_rules_are_valid():
    assert PoolSettings().default_priority in PoolSettings().priority_classes
