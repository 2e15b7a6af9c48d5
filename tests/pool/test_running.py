# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Preemption of sessions in use: guarantees, classes, bursts, turns, and each rule's limits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.facts import Facts
from jupyter_gpupool.pool.groups import Group, Portion
from jupyter_gpupool.pool.metering import Meter
from jupyter_gpupool.pool.model import PREEMPT_ALL, Owner, PoolSettings, Quota, Slice
from jupyter_gpupool.pool.residence import SLICE_LEAST
from jupyter_gpupool.pool.shares import Shares

from .builders import Lab, all_of, device, got, none
from .crowd import Crowd

#: A number is either 0, or so large that its addition to a sum is not lost by rounding.
USED = st.one_of(st.just(0.0), st.floats(1e-6, 1000))
RATE = st.sampled_from([0.0, 0.25, 1.0, 2.0])

HALF = Group(guarantee=Portion(percent=50))


def moved(lab: Lab, name: str, memory: int = 16, seconds: float = 1.0, **fields) -> None:
    """Open a session, suspend it, resume it, and let it run. Each move takes ``seconds``."""
    lab.idle(name, memory, **fields)
    lab.release(name)
    lab.suspended(name, *lab.where(name), seconds=seconds)
    lab.hold(name)
    lab.done(name, seconds=seconds)
    assert lab.state(name) == "active"


def ask(lab: Lab, name: str, memory: int = 16, **fields) -> list[ev.Action]:
    lab.open(name, memory, **fields)
    return lab.hold(name)


def preempted(lab: Lab) -> list[str]:
    return [a.session for a in lab.past if isinstance(a, ev.Suspend) and a.busy]


# --------------------------------------------------------------------------- classes


def test_lower_class_yields_after_its_minimum_residence(make):
    lab = make(device(0), preempt=PREEMPT_ALL)
    moved(lab, "low", seconds=3.0, priority="batch")
    began = lab.now
    none(ask(lab, "high", priority="notebook"), ev.Suspend)
    found = lab.pool.explain("high")
    assert found.changes_at == began + 6.0
    assert [(h.rule, h.rule_at) for h in found.holders] == [("class", began + 6.0)]
    assert lab.pool.explain("low").claims == (("class", began + 6.0, "high"),)
    suspend = got(lab.after(6.5), ev.Suspend, session="low")
    assert suspend.busy
    assert "higher priority class" in suspend.reason


def test_session_whose_calls_cannot_be_held_back_is_no_victim(make):
    lab = make(device(0), preempt=PREEMPT_ALL)
    lab.running("low", priority="batch", memory=16, gated=False)
    lab.after(5)
    none(ask(lab, "high"), ev.Suspend)
    none(lab.after(59), ev.Warn)
    assert "without the guard" in got(lab.after(2), ev.Warn, session="low").message
    none(lab.past, ev.Suspend)
    lab.drop("low")
    lab.after(60)
    assert [a.busy for a in lab.past if isinstance(a, ev.Suspend)] == [False]


def test_preempted_session_resumes_without_a_new_request(make):
    lab = make(device(0), preempt=PREEMPT_ALL)
    lab.running("low", priority="batch", memory=16)
    lab.after(5)
    got(ask(lab, "high"), ev.Suspend, session="low")
    got(lab.suspended("low", ("G0", 16)), ev.Attach, session="high")
    lab.done("high")
    assert lab.state("low") == "queued"
    assert lab.reason("low").startswith("it was preempted: a kernel of a higher priority class")
    attach = got(lab.drop("high"), ev.Suspend, session="high")
    assert not attach.busy
    got(lab.suspended("high"), ev.Attach, session="low")
    granted = got(lab.done("low"), ev.HoldGranted, session="low")
    assert granted.hold == "c"
    assert lab.record("low").preempted == ""


def test_hold_dropped_while_preempted_ends_the_wait(make):
    lab = make(device(0), preempt=PREEMPT_ALL)
    lab.running("low", 16, priority="batch")
    lab.after(5)
    ask(lab, "high")
    lab.suspended("low", ("G0", 16))
    lab.drop("low")
    assert lab.state("low") == "detached"
    assert lab.record("low").preempted == ""


def test_session_whose_hold_ends_during_a_suspend_is_detached(make):
    lab = make(device(0), preempt=PREEMPT_ALL)
    lab.running("low", 16, priority="batch")
    lab.after(5)
    ask(lab, "high")
    lab.drop("low")
    lab.suspended("low", ("G0", 16))
    assert lab.state("low") == "detached"


def test_refused_preemption_grants_the_session_its_holds_again(make):
    lab = make(device(0), preempt=PREEMPT_ALL)
    lab.running("low", 16, priority="batch")
    lab.after(5)
    got(ask(lab, "high"), ev.Suspend, session="low")
    actions = lab.refused("low", "busy")
    got(actions, ev.HoldGranted, session="low")
    none(actions, ev.Suspend)
    got(lab.after(1.5), ev.Suspend, session="low")


def test_session_that_the_driver_pins_is_not_preempted_again(make):
    lab = make(device(0), preempt=PREEMPT_ALL)
    lab.running("low", 16, priority="batch")
    lab.after(5)
    ask(lab, "high")
    lab.refused("low", "pinned", "the driver says no")
    lab.after(500)
    assert preempted(lab) == ["low"], "once, and not again"


def test_device_that_cannot_suspend_has_no_victims(make):
    lab = make(device(0, can_suspend=False), preempt=PREEMPT_ALL)
    lab.running("low", 16, priority="batch")
    lab.after(5)
    ask(lab, "high")
    lab.after(500)
    assert preempted(lab) == []


def test_max_wait_does_not_end_the_wait_of_a_preempted_session(make):
    lab = make(device(0), preempt=PREEMPT_ALL, max_wait=100.0)
    lab.running("low", 16, priority="batch")
    lab.after(150)
    ask(lab, "high")
    lab.suspended("low", ("G0", 16))
    lab.done("high")
    lab.after(500)
    assert lab.state("low") == "queued"


def test_preempt_setting_turns_each_rule_off(make):
    for rules in (frozenset(), PREEMPT_ALL - {"class"}):
        lab = make(device(0), preempt=rules)
        lab.running("low", 16, priority="batch")
        lab.after(5)
        ask(lab, "high")
        lab.after(100)
        assert preempted(lab) == []


def test_idle_lease_is_preempted_before_a_lease_in_use(make):
    lab = make(device(0), device(1), preempt=PREEMPT_ALL)
    lab.running("busy", 16, priority="batch")
    lab.idle("idle", 16)
    lab.after(5)
    suspend = got(ask(lab, "high"), ev.Suspend)
    assert (suspend.session, suspend.busy) == ("idle", False)


def test_kept_idle_lease_counts_as_a_lease_in_use(make):
    lab = make(device(0), preempt=PREEMPT_ALL)
    lab.idle("low", 16, priority="batch")
    lab.keep("low", 1000)
    lab.after(5)
    suspend = got(ask(lab, "high"), ev.Suspend, session="low")
    assert not suspend.busy
    lab.suspended("low", ("G0", 16))
    assert lab.state("low") == "detached"


# --------------------------------------------------------------------------- guarantees


def test_borrower_of_a_higher_class_gives_back_a_guarantee(make):
    lab = make(device(0), groups={"bio": HALF}, preempt=PREEMPT_ALL)
    lab.running("high", 16, priority="interactive")
    lab.after(5)
    got(ask(lab, "low", 8, owner=Owner("ann", "bio"), priority="batch"), ev.Suspend, session="high")


def test_session_within_a_guarantee_is_not_preempted(make):
    lab = make(device(0), groups={"bio": HALF}, preempt=PREEMPT_ALL)
    lab.running("a", 8, owner=Owner("ann", "bio"), priority="batch")
    lab.running("b", 8, owner=Owner("bob"), priority="batch")
    lab.after(5)
    got(ask(lab, "high", 8, priority="interactive"), ev.Suspend, session="b")
    lab.suspended("b", ("G0", 8))
    lab.done("high")
    ask(lab, "more", 8, priority="interactive")
    lab.after(1000)
    assert "a" not in preempted(lab)
    found = lab.pool.explain("more")
    assert [(h.session, h.covered) for h in found.holders if h.rule] == [("a", True)]


def test_reclaim_leaves_the_other_group_its_guarantee(make):
    """Group phy uses 4 x 8 bytes, and 16 bytes are guaranteed to the group.

    So the pool may preempt only two of its four sessions.
    """
    groups = {"bio": Group(guarantee=Portion(bytes=16)), "phy": Group(guarantee=Portion(bytes=16))}
    lab = make(groups=groups, preempt=PREEMPT_ALL)
    for name in ("p0", "p1", "p2", "p3"):
        lab.running(name, 8, owner=Owner("pia", "phy"))
    lab.after(5)
    ask(lab, "b0", 8, owner=Owner("ben", "bio"))
    ask(lab, "b1", 8, owner=Owner("ben", "bio"))
    ask(lab, "b2", 8, owner=Owner("ben", "bio"))
    lab.after(1)
    assert len(preempted(lab)) == 2
    lab.after(5)
    assert len(preempted(lab)) == 2


@pytest.mark.parametrize("why", ["quota", "cap"])
def test_request_blocked_by_a_limit_uses_no_guarantee(make, why):
    """A quota or a cap blocks one request of a group, so this request needs no guarantee.

    The next request of the group can use the whole guarantee.
    """
    lab = make(
        preempt=PREEMPT_ALL,
        quotas={"ann": Quota(leases=1)} if why == "quota" else {},
        groups={
            "lab": Group(guarantee=Portion(bytes=16)),
            "in": Group(parent="lab", cap=Portion(bytes=12) if why == "cap" else None),
        },
    )
    ann, bob = Owner("ann", "in"), Owner("bob", "lab")
    lab.running("one", 16, owner="cyd")
    lab.running("two", 12, owner="cyd")
    lab.running("held", 4, owner=ann)
    lab.after(5)
    none(ask(lab, "blocked", 12, owner=ann), ev.Suspend)
    got(ask(lab, "b", 12, owner=bob), ev.Suspend)
    assert preempted(lab)[0] in ("one", "two")


def test_pool_does_not_preempt_an_idle_lease_that_is_too_small(make):
    """A suspend of ``small`` would not free enough bytes for ``high``.

    After this suspend, the group would use less than its guarantee, so the guarantee would protect
    ``low``. Then ``high`` could not start at all.
    """
    lab = make(
        device(0, 9), preempt=PREEMPT_ALL, groups={"team": Group(guarantee=Portion(bytes=6))}
    )
    bob = Owner("bob", "team")
    lab.running("low", 5, owner=bob, priority="batch")
    lab.idle("small", 2, owner=bob)
    lab.running("other", 1)
    lab.after(20)
    got(ask(lab, "high", 6), ev.Suspend, session="low")
    assert lab.state("small") == "idle"


def test_guarantee_of_a_subgroup_preempts_its_parent_group(make):
    groups = {
        "lab": Group(guarantee=Portion(percent=100)),
        "bio": Group(parent="lab", guarantee=Portion(percent=50)),
        "phy": Group(parent="lab"),
    }
    lab = make(device(0), groups=groups, preempt=PREEMPT_ALL)
    lab.running("p", 16, owner=Owner("pia", "phy"))
    lab.after(5)
    got(ask(lab, "b", 8, owner=Owner("ben", "bio")), ev.Suspend, session="p")


def test_guarantee_does_not_preempt_sessions_of_the_same_group(make):
    lab = make(device(0), groups={"bio": Group(guarantee=Portion(percent=100))},
               preempt=frozenset({"guarantee"}))  # fmt: skip
    lab.running("a", 10, owner=Owner("ann", "bio"))
    lab.after(5)
    none(ask(lab, "b", 6, owner=Owner("ben", "bio")), ev.Suspend)
    assert lab.state("b") == "attaching"
    none(ask(lab, "c", 6, owner=Owner("cyd", "bio")), ev.Suspend)


# --------------------------------------------------------------------------- bursts


def test_grown_holder_is_preempted_for_a_guaranteed_request(make):
    lab = make(device(0), preempt=PREEMPT_ALL)
    lab.running("a", 4, limit=16)
    lab.grow("a", 12)
    assert lab.where("a") == [("G0", 16)]
    lab.after(5)
    suspend = got(ask(lab, "b", 4), ev.Suspend, session="a")
    assert suspend.busy
    assert "guaranteed" in suspend.reason
    actions = lab.suspended("a", ("G0", 11))
    got(actions, ev.Attach, session="b")
    got(actions, ev.Attach, session="a")  # a's state fits on the device beside b's slice


def test_grown_state_does_not_preempt_the_session_on_its_device(make):
    """The state of ``a`` (16 bytes) is larger than its guarantee (4 bytes).

    So ``a`` may not preempt ``b`` by its higher class, but only by a turn.
    """
    lab = make(device(0), preempt=PREEMPT_ALL)
    lab.running("a", 4, limit=16, priority="interactive")
    lab.grow("a", 12)
    lab.after(5)
    got(ask(lab, "b", 4, priority="batch"), ev.Suspend, session="a")
    lab.suspended("a", ("G0", 16))
    lab.done("b")
    lab.after(500)
    assert preempted(lab) == ["a"]
    assert lab.state("a") == "queued"


def test_burst_rule_preempts_only_holders_that_have_grown(make):
    lab = make(device(0), preempt=frozenset({"burst"}))
    lab.running("a", 16)
    lab.after(5)
    ask(lab, "b", 4)
    lab.after(100)
    assert preempted(lab) == []


# --------------------------------------------------------------------------- turns


@pytest.mark.parametrize("move", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("owners", [("ann", "bob"), ("ann", "ann"), ("ann", "bob", "cyd")])
def test_equal_sessions_get_equal_time_despite_moves(owners, move):
    crowd = Crowd(1, move=move, preempt=PREEMPT_ALL, max_swap_overhead=0.1)
    for i, owner in enumerate(owners):
        crowd.add(f"k{i}", owner, cell=1e9)
    crowd.run(4000)
    got = crowd.computed()
    assert sum(got) >= (1 - 0.1) * 4000 - 200
    for seconds in got:
        assert seconds == pytest.approx(sum(got) / len(got), abs=4 * 20 * move + 20)
    assert min(k.moves for k in crowd.kernels.values()) >= 2


def test_turns_of_large_state_stay_within_the_move_overhead():
    """Two moves take two minutes, at most 10 % of a time slice. So the slice lasts 20 minutes."""
    crowd = Crowd(1, move=60.0, preempt=PREEMPT_ALL, max_swap_overhead=0.1)
    for i in range(3):
        crowd.add(f"k{i}", f"user{i}", cell=1e9)
    crowd.run(100_000)
    assert sum(crowd.took) <= 0.1 * 100_000
    assert min(crowd.computed()) > 100_000 / 4


@pytest.mark.parametrize(("owners", "seconds"), [(1, 8000), (4, 4000), (16, 4000)])
def test_slow_copies_make_time_slices_longer(owners, seconds):
    """Eight devices share one path to host memory. All first turns end at the same time.

    So the first moves run at the same time, and are slow.
    """
    crowd = Crowd(8, move=2.0, crowded=True, preempt=PREEMPT_ALL, max_swap_overhead=0.1)
    for i in range(16):
        crowd.add(f"k{i}", f"user{i % owners}", cell=1e9)
    crowd.run(seconds)
    assert max(crowd.took) >= 6 * 2.0
    assert sum(crowd.took) <= 0.1 * 8 * seconds
    got = crowd.computed()
    assert min(got) > 0.8 * max(got)


def test_many_sessions_wait_longer_but_cause_no_more_moves():
    crowd = Crowd(1, move=2.0, preempt=PREEMPT_ALL, max_swap_overhead=0.1)
    for i in range(40):
        crowd.add(f"k{i}", f"user{i}", cell=1e9)
    crowd.run(40 * 200)
    assert sum(crowd.took) <= 0.1 * 40 * 200 + 40 * 2.0, "the first move of each had no cost"
    assert min(crowd.computed()) > 0


def test_sessions_that_fit_together_are_not_moved():
    crowd = Crowd(1, move=1.0, preempt=PREEMPT_ALL)
    for i in range(4):
        crowd.add(f"k{i}", f"user{i}", memory=4, cell=1e9)
    crowd.run(1000)
    assert sum(k.moves for k in crowd.kernels.values()) == 0


def test_gang_has_its_turn_on_all_its_devices_at_once():
    crowd = Crowd(2, move=1.0, preempt=PREEMPT_ALL)
    gang = crowd.add("gang", "ann", cell=1e9, devices=2)
    for i in range(2):
        crowd.add(f"k{i}", f"user{i}", cell=1e9)
    crowd.run(2000)
    assert gang.computed > 300
    assert all(k.computed > 300 for k in crowd.kernels.values())


def test_session_that_has_used_less_keeps_its_turn(make):
    lab = make(device(0), preempt=PREEMPT_ALL, half_life=1e6)
    lab.running("a", 16, owner="ann")
    lab.after(200)
    lab.drop("a")
    lab.end("a")
    lab.running("b", 16, owner="bob")
    ask(lab, "a2", owner="ann")
    lab.after(150)
    assert preempted(lab) == []
    lab.after(150)
    assert preempted(lab) == ["b"]


def test_session_that_lost_its_turn_does_not_return_at_once(make):
    """A turn of a session lasts two time slices.

    When the turn ends, the owner of the session has used one time slice more than the other owner.
    """
    crowd = Crowd(1, move=1.0, preempt=PREEMPT_ALL, max_swap_overhead=0.1)
    a, b = crowd.add("a", "ann", cell=1e9), crowd.add("b", "bob", cell=1e9)
    crowd.run(1000)
    assert a.moves + b.moves <= 1000 / 20


def test_explanation_of_a_later_turn_names_its_time(make):
    """The turn of ``a`` comes in 39 s. Until then, the explanation must name this time.

    It must not say that ``a`` has no right to the memory.
    """
    lab = make(device(0), preempt=PREEMPT_ALL, half_life=3600.0)
    lab.running("a", 16, owner="ann")
    lab.after(30)
    lab.drop("a")
    lab.open("b", 16, owner="bob")
    lab.hold("b")
    lab.suspended("a", ("G0", 16))
    lab.done("b")
    lab.after(1)
    none(lab.hold("a"), ev.Suspend)
    [holder] = lab.pool.explain("a").holders
    assert holder.rule == "turns"
    assert lab.now + 10 < holder.rule_at < lab.now + 60, "ann has used more until then"
    lines = " ".join(lab.pool.why("a").lines)
    words = "this kernel may take that memory in 39 s (when that kernel's time slice is over)"
    assert words in lines
    assert lab.pool.explain("b").claims == (("turns", holder.rule_at, "a"),)
    none(lab.after(holder.rule_at - lab.now - 0.01), ev.Suspend)
    assert lab.pool.explain("a").changes_at == pytest.approx(holder.rule_at, abs=0.01)
    got(lab.after(0.02), ev.Suspend, session="b", busy=True)


def test_time_of_a_turn_includes_usage_on_other_machines(make):
    lab = make(device(0), preempt=PREEMPT_ALL, half_life=3600.0)
    lab.running("b", 16, owner="bob")
    lab.send(ev.UsedElsewhere, users={"ann": 60.0})
    lab.after(20)
    none(ask(lab, "a", owner="ann"), ev.Suspend)
    [holder] = lab.pool.explain("a").holders
    assert holder.rule == "turns"
    assert lab.now + 30 < holder.rule_at < lab.now + 60, "ann has used more until then"
    none(lab.after(holder.rule_at - lab.now - 0.01), ev.Suspend)
    got(lab.after(0.02), ev.Suspend, session="b", busy=True)


def test_pool_wakes_up_for_a_turn_between_one_owners_sessions(make):
    """With a half-life of 0, usage does not count. Turns between sessions still change.

    So the pool must ask for a tick at the end of the time slice.
    """
    lab = make(device(0), preempt=PREEMPT_ALL, half_life=0.0, ageing=600.0)
    lab.running("a", 16, owner="ann")
    lab.seen("G0", a=1)
    lab.after(100)
    none(ask(lab, "b", owner="ann"), ev.Suspend)
    assert lab.pool.next_wakeup() == lab.now + SLICE_LEAST
    got(lab.after(SLICE_LEAST), ev.Suspend, session="a")


@pytest.mark.parametrize("start", [0.0, 1.7e9 + 0.1, 1.7e9 + 1 / 3, 1.7e9 + 0.77])
def test_session_preempts_as_soon_as_age_raises_its_class(make, start):
    lab = make(device(0), preempt=PREEMPT_ALL, half_life=0.0, ageing=60.333)
    lab.now = start
    lab.running("a", 16, owner="ann", priority="notebook")
    lab.seen("G0", a=1)
    ask(lab, "b", owner="bob", priority="batch")
    began, classes = lab.now, lab.pool.settings.priority_classes
    raised = 60.333 * (classes["notebook"] - classes["batch"])
    none(lab.after(raised - 0.01), ev.Suspend)
    change = got(lab.after(5), ev.StateChanged, session="a")
    assert change.new == "detaching"
    assert change.now - began - raised == pytest.approx(0, abs=0.001)


@given(
    mine=st.tuples(USED, USED, USED, RATE, RATE),
    its=st.tuples(USED, USED, USED, RATE, RATE),
    gain=st.floats(0, 100),
    since=st.floats(0, 500),
    weight=st.sampled_from([0.5, 1.0, 3.0]),
)
def test_turn_begins_at_the_first_possible_instant(mine, its, gain, since, weight):
    facts = Facts(PoolSettings(half_life=300.0, groups={"g": Group(weight=weight)}))
    facts.now = 1000.0
    for meters, name, (memory, compute, elsewhere, one, other) in (
        (facts.meters.users, "ann", mine),
        (facts.meters.groups, "g", its),
    ):
        meters[name] = Meter(1000.0, memory, compute, elsewhere=elsewhere)
        meters[name].memory_rate, meters[name].compute_rate = one, other
    ann, bob = Owner("ann"), Owner("bob", "g")
    at = Shares(facts).behind_from(ann, bob, gain, 1000.0 + since)

    def holds(seconds: float) -> bool:
        facts.now = seconds
        return Shares(facts).behind(ann, bob, gain)

    if at < math.inf:
        assert holds(at) or holds(at + 0.01)
    end = min(at - 0.01, 3000.0)
    assert not any(holds(1000.0 + since + n * (end - 1000 - since) / 50) for n in range(51)) or (
        end < 1000.0 + since
    )


def test_resume_after_a_turn_goes_behind_waiting_sessions():
    crowd = Crowd(1, move=0.5, preempt=PREEMPT_ALL)
    kernels = [crowd.add(f"k{i}", "ann", cell=1e9) for i in range(5)]
    crowd.run(1000)
    computed = sorted(k.computed for k in kernels)
    assert computed[0] > 0.6 * computed[-1] > 0


# --------------------------------------------------------------------------- growth


def test_growth_to_the_guarantee_preempts_a_lower_class(make):
    lab = make(device(0), preempt=PREEMPT_ALL)
    lab.running("a", 8)
    lab.running("low", 8, priority="batch")
    lab.after(5)
    actions = lab.change("a", 16)
    got(actions, ev.Suspend, session="low")
    actions = lab.suspended("low", ("G0", 8))
    assert lab.where("a") == [("G0", 16)], actions


def test_growth_of_an_idle_session_preempts_no_lease_in_use(make):
    lab = make(device(0), preempt=PREEMPT_ALL)
    lab.idle("a", 8)
    lab.running("low", 8, priority="batch")
    lab.after(5)
    none(lab.change("a", 16), ev.Suspend)
    lab.after(100)
    assert preempted(lab) == []


def test_plan_suspends_no_more_sessions_than_the_waiter_needs(make):
    lab = make(preempt=PREEMPT_ALL)
    for name in ("a", "b"):
        lab.running(name, 8, priority="batch")
        lab.running(f"{name}2", 8, priority="batch")
    lab.after(5)
    assert len(all_of(ask(lab, "high", 8), ev.Suspend)) == 1
    assert lab.pool.explain("high").promised == (Slice(lab.where(preempted(lab)[0])[0][0], 8),)


# --------------------------------------------------------------------------- failing suspends


def test_unsuspendable_session_is_warned_twice_and_then_ended(make):
    lab = make(
        device(0, can_suspend=False),
        preempt=PREEMPT_ALL,
        unsuspendable="end",
        unsuspendable_after=(60.0, 600.0, 3600.0),
    )
    lab.running("stuck", 16, priority="batch")
    lab.after(100)
    ask(lab, "high")
    began = lab.now
    none(lab.after(59), ev.Warn)
    warn = got(lab.after(2), ev.Warn, session="stuck")
    assert (warn.stage, warn.ends_at) == ("warn", began + 3600)
    assert "cannot be suspended" in warn.message
    asked = got(lab.after(540), ev.Warn, session="stuck")
    assert asked.stage == "ask"
    assert "Otherwise the pool ends this kernel in 50 min." in asked.message
    none(lab.after(2998), ev.EndSession)
    ended = got(lab.after(2), ev.EndSession, session="stuck")
    assert "c.GPUPool.unsuspendable" in ended.message
    got(lab.end("stuck"), ev.Attach, session="high")


def test_holder_is_warned_once_for_each_wait(make):
    lab = make(device(0, can_suspend=False), preempt=PREEMPT_ALL)
    lab.running("stuck", 16, priority="batch")
    lab.after(100)
    ask(lab, "high")
    lab.after(1000)
    assert len(all_of(lab.past, ev.Warn)) == 1
    lab.drop("high")
    lab.hold("high")
    lab.after(59)
    assert len(all_of(lab.past, ev.Warn)) == 1
    lab.after(2)
    assert len(all_of(lab.past, ev.Warn)) == 2


def test_only_holders_that_a_rule_may_preempt_get_warnings(make):
    lab = make(device(0, can_suspend=False), preempt=PREEMPT_ALL)
    lab.running("stuck", 16, priority="interactive")
    lab.after(100)
    ask(lab, "low", priority="batch")
    lab.after(1000)
    none(lab.past, ev.Warn)


@pytest.mark.parametrize("idle", [False, True])
def test_session_whose_suspends_keep_failing_is_warned_and_ended(make, idle):
    """Suspends keep failing if a process is stopped, or if its GPU work does not end.

    The pool first warns the session, and then ends it.
    """
    lab = make(device(0), preempt=PREEMPT_ALL, unsuspendable="end", half_life=3600.0)
    lab.running("stuck", 16, priority="batch")
    if idle:
        lab.drop("stuck")
    lab.after(100)
    ask(lab, "high")
    why = "Process 7 is stopped (SIGSTOP); continue it with: kill -CONT 7"
    began, tries = lab.now, 0
    while lab.state("stuck") != "ended" and lab.now < began + 4000:
        if lab.state("stuck") == "detaching":
            lab.refused("stuck", "drain", why)
            tries += 1
            if tries == 2:
                failed = "; the pool could not suspend it, and tries again in "
                assert failed in " ".join(lab.pool.why("high").lines)
            if tries == 2 and idle:
                assert why in lab.pool.why("stuck").lines[0]
                kept = "1 idle kernel that could not be suspended (the pool tries again)"
                assert kept in lab.reason("high")
        lab.after(1.0)
    stages = [(a.stage, a.message) for a in lab.past if isinstance(a, ev.Warn)]
    assert [stage for stage, _ in stages] == ["warn", "ask"]
    assert all(why in message for _, message in stages)
    ended = got(lab.past, ev.EndSession, session="stuck")
    assert why in ended.message
    assert began + 3600 < lab.now < began + 3800


def test_suspend_that_succeeds_ends_the_warnings(make):
    lab = make(device(0), preempt=PREEMPT_ALL)
    lab.running("stuck", 16, priority="batch")
    lab.after(100)
    ask(lab, "high")
    for _ in range(4):
        lab.refused("stuck", "drain", "its work does not end")
        while lab.state("stuck") != "detaching":
            lab.after(1.0)
    assert "its work does not end" in got(lab.past, ev.Warn, session="stuck").message
    got(lab.suspended("stuck", ("G0", 16)), ev.Attach, session="high")
    lab.done("high")
    lab.after(1000)
    assert len(all_of(lab.past, ev.Warn)) == 1


@pytest.mark.parametrize("idle", [False, True])
def test_holder_whose_state_exceeds_host_memory_is_warned(make, idle):
    lab = make(device(0), preempt=PREEMPT_ALL, half_life=3600.0)
    lab.running("stuck", 16, priority="batch")
    if idle:
        lab.drop("stuck")
    lab.after(100)
    ask(lab, "high")
    end = lab.now + 65
    while lab.now < end:
        if lab.state("stuck") == "detaching":
            lab.refused("stuck", "limit", "its control group may use 8 bytes")
        lab.after(1.0)
    warn = got(lab.past, ev.Warn, session="stuck")
    assert "cannot be suspended (its control group may use 8 bytes)" in warn.message
    assert idle == ("1 idle kernel that cannot be suspended" in lab.reason("high"))
    assert "tried again" not in lab.reason("high")


def test_temporary_lack_of_host_memory_gives_no_warning(make):
    lab = make(device(0), preempt=PREEMPT_ALL, half_life=3600.0)
    lab.running("large", 16, priority="batch")
    lab.after(100)
    ask(lab, "high")
    end = lab.now + 300
    while lab.now < end:
        if lab.state("large") == "detaching":
            lab.refused("large", "host", "no room now")
        lab.after(1.0)
    none(lab.past, ev.Warn)


def test_length_of_the_first_turn_depends_on_resident_bytes(make):
    """Before the first sample, the pool assumes that the session uses its whole slice of 64 GiB.

    When a sample shows fewer bytes, the expected move is shorter, and so is the turn.
    """
    gib = 1 << 30
    lab = make(
        device(0, 96 * gib), preempt=frozenset({"turns"}), half_life=0.0, host_memory=999 * gib
    )
    lab.running("first", 64 * gib)
    ask(lab, "second", 64 * gib)
    assert ends(lab, "first") == pytest.approx(128 / 0.1), "the worst, if nothing was measured"
    lab.seen("G0", first=gib // 2)
    assert ends(lab, "first") == pytest.approx(SLICE_LEAST)
    lab.seen("G0", first=2 * gib)
    assert ends(lab, "first") == pytest.approx(4 / 0.1)
    none(lab.after(39), ev.Suspend)
    got(lab.after(2), ev.Suspend, session="first")


def ends(lab: Lab, name: str) -> float:
    """Return the time from which a waiting session may take the slice of ``name``."""
    ((_, at, _),) = lab.pool.explain(name).claims
    return at


def test_session_that_fills_the_cap_of_its_group_is_warned(make):
    """The session uses up the cap of its group, and cannot be suspended.

    Without a warning, the session could keep all other members of the group waiting.
    """
    lab = make(
        device(0, can_suspend=False),
        device(1),
        preempt=PREEMPT_ALL,
        groups={"lab": Group(cap=Portion(bytes=16))},
    )
    lab.running("stuck", 16, owner=Owner("ann", "lab"), priority="batch")
    lab.seen("G0", stuck=3)
    assert lab.where("stuck") == [("G0", 16)]
    ask(lab, "other", 8, owner=Owner("cyd"))
    lab.after(10)
    ask(lab, "high", 8, owner=Owner("bob", "lab"))
    assert lab.pool.explain("high").reason.rule == "cap"
    message = got(lab.after(61), ev.Warn, session="stuck").message
    assert "for 8 B within the cap of the group lab, and this kernel cannot be susp" in message


def test_session_that_the_driver_cannot_suspend_is_warned(make):
    lab = make(device(0), preempt=PREEMPT_ALL)
    lab.running("stuck", 16, priority="batch")
    lab.after(100)
    ask(lab, "high")
    lab.refused("stuck", "pinned", "it uses CUDA IPC")
    warn = got(lab.after(61), ev.Warn, session="stuck")
    assert "it uses CUDA IPC" in warn.message
