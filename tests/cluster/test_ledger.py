# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
from __future__ import annotations

import dataclasses
import json
import logging
import math
import random
import re
import sys
import time
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jupyter_gpupool.broker.shared import LentLimits, token_from
from jupyter_gpupool.broker.store.journal import Journal
from jupyter_gpupool.cluster import ledger_events as ev
from jupyter_gpupool.cluster.budgets import Budgets, Demand
from jupyter_gpupool.cluster.ledger import Ledger
from jupyter_gpupool.cluster.messages import (
    Epoch,
    Holding,
    Key,
    Loan,
    Report,
    Spent,
    epoch_from_json,
    recent,
    report_from_json,
    report_to_json,
)

from .world import (
    BUCKET,
    DAY,
    GUARANTEE,
    LIMITS,
    REFILL,
    SECONDS,
    USERS,
    Node,
    World,
    keys_of,
)

ADA, LAB = keys_of("ada")


def sizes(world):
    return {name: sum(s.size for s in node.running) for name, node in world.nodes.items()}


# --------------------------------------------------------------------------- lending


def test_a_node_gets_the_memory_that_its_sessions_wait_for(world):
    world.ask("n0", "ada", 6)
    world.settle(1)
    assert sizes(world) == {"n0": 6, "n1": 0, "n2": 0}


def test_a_lease_within_the_ceiling_sends_no_message(world):
    world.nodes["n0"].spare = 6
    world.ask("n0", "ada", 2)
    world.settle(2)
    sent = world.sent
    world.nodes["n0"].running.clear()
    world.ask("n0", "ada", 6)
    assert sizes(world)["n0"] == 6
    assert world.sent == sent


def test_memory_in_use_on_another_node_is_not_lent(world):
    world.ask("n0", "ada", 6)
    world.settle(1)
    world.ask("n1", "ada", 3)
    world.settle(3)
    assert sizes(world) == {"n0": 6, "n1": 0, "n2": 0}
    world.end("n0")
    world.settle(1)
    assert sizes(world) == {"n0": 0, "n1": 3, "n2": 0}


def test_the_limit_of_a_group_holds_for_all_its_users(world):
    world.ask("n0", "ada", 8)
    world.ask("n1", "bob", 3)
    world.settle(3)
    assert sum(sizes(world).values()) in (3, 8)
    assert world.ledger.counted(LAB) <= LIMITS["group"]["lab"]["memory"]


def test_a_waiting_node_gets_the_unused_part_of_another_node(world):
    node = world.nodes["n0"]
    node.spare = 8
    world.ask("n0", "ada", 1)
    world.settle(2)
    assert node.budgets.ceilings[ADA] == 8
    world.ask("n1", "ada", 5)
    world.settle(1)
    assert sizes(world)["n1"] == 5


def test_the_longest_wait_is_served_first(world):
    world.ask("n0", "ada", 8)
    world.settle(1)
    for name, size in (("n1", 6), ("n2", 4)):
        world.ask(name, "ada", size)
        world.settle(1)
    world.end("n0")
    world.settle(3)
    assert sizes(world) == {"n0": 0, "n1": 6, "n2": 0}
    world.end("n1")
    world.settle(3)
    assert sizes(world)["n2"] == 4


def test_a_node_that_stops_waiting_does_not_block_the_others(world):
    world.ask("n0", "ada", 6)
    world.settle(1)
    world.ask("n1", "ada", 6)
    world.settle(1)
    world.ask("n2", "ada", 2)
    world.settle(1)
    assert sizes(world)["n2"] == 0
    world.nodes["n1"].waiting.clear()
    world.nodes["n1"].tell()
    world.settle(1)
    assert sizes(world)["n2"] == 2


def test_all_nodes_together_use_exactly_one_daily_budget(world):
    assert world.use_all(3) == 20


def test_nodes_learn_that_the_daily_budget_is_used_up(world):
    while sum(node.consumed for node in world.nodes.values()) < 20:
        assert not any(node.budgets.used_up for node in world.nodes.values())
        for node in world.nodes.values():
            node.consume(1, world.clock(node))
            world.settle(1)
    world.settle(2)
    assert all(node.budgets.used_up == {SECONDS} for node in world.nodes.values())
    world.do(world.current, ev.LimitsChanged(now=world.now, limits={"user": {}, "group": {}}))
    world.settle(2)
    assert not any(node.budgets.used_up for node in world.nodes.values())


def test_a_node_without_the_ledger_uses_only_its_daily_part(world):
    node = world.nodes["n0"]
    world.settle(2)
    part = node.budgets.ceilings[SECONDS]
    world.advance(3600)
    assert not node.budgets.is_connected(world.clock(node))
    node.consume(20, world.clock(node))
    assert node.consumed == part > 0


def test_the_last_two_windows_of_each_holder_are_remembered():
    keys = [
        Spent("n0", "j", Key("user", "ada", "gpu-seconds", f"2026-11-{day}"))
        for day in (21, 22, 23)
    ]
    bob = Spent("n1", "j", Key("user", "bob", "gpu-seconds", "2026-11-01"))
    assert recent({**dict.fromkeys(keys, 5), bob: 7}) == {keys[1]: 5, keys[2]: 5, bob: 7}


# --------------------------------------------------------------------------- loss


def test_a_new_ledger_lends_nothing_until_all_nodes_report(world):
    world.ask("n0", "ada", 6)
    world.settle(1)
    world.kill_ledger()
    world.ask("n1", "ada", 6)
    world.settle(silent={"n0"})
    assert not world.ledger.serving
    assert sizes(world)["n1"] == 0
    world.settle()
    assert world.ledger.serving
    assert world.ledger.counted(ADA) == 6


def test_slices_of_a_silent_node_stay_counted(world):
    world.ask("n0", "ada", 8)
    world.settle(1)
    world.advance(3600)
    world.ask("n1", "ada", 1)
    world.settle(silent={"n0"})
    assert sizes(world)["n1"] == 0


def test_a_fenced_node_is_freed_after_its_time_out(world):
    world.ask("n0", "ada", 8)
    world.settle(1)
    world.crash("n0")
    world.do(world.current, ev.Fenced(now=world.now, node="n0"))
    world.ask("n1", "ada", 8)
    world.settle(1, silent={"n0"})
    assert sizes(world)["n1"] == 0
    world.advance(11)
    world.settle(1, silent={"n0"})
    assert sizes(world)["n1"] == 8


def test_a_draining_node_that_is_fenced_has_not_left(world):
    world.ask("n0", "ada", 8)
    world.settle(1)
    world.order("n0", True)
    world.settle(1)
    assert state(world, "n0") == "draining"
    world.crash("n0")
    world.do(world.current, ev.Fenced(now=world.now, node="n0"))
    world.advance(11)
    world.settle(1, silent={"n0"})
    assert state(world, "n0") == "gone"


def test_a_fenced_node_that_still_runs_gets_a_new_life_number(world):
    world.ask("n0", "ada", 4)
    world.settle(1)
    world.do(world.current, ev.Fenced(now=world.now, node="n0"))
    world.advance(11)
    life = world.nodes["n0"].budgets.life
    world.settle()
    assert world.nodes["n0"].budgets.life == life + 1
    assert world.ledger.counted(ADA) == 4


@pytest.mark.parametrize(("on_loss", "most"), [("closed", 0), ("min_share", 1)])
def test_a_node_without_the_ledger_follows_the_admins_setting(on_loss, most):
    world = World()
    for node in world.nodes.values():
        node.on_loss = on_loss
        node.begin(2)
    world.settle()
    world.advance(9)
    node = world.nodes["n0"]
    assert node.budgets.most(ADA, world.clock(node)) == most


def test_sessions_keep_their_slices_without_the_ledger(world):
    world.ask("n0", "ada", 4)
    world.settle(1)
    world.advance(9)
    assert sizes(world)["n0"] == 4
    world.end("n0")
    world.ask("n0", "ada", 4)
    assert sizes(world)["n0"] == 0


def test_an_older_ledger_stops_when_it_hears_of_a_newer_one(world):
    old = world.current
    world.start_ledger()
    world.settle()
    assert world.ledger.serving
    world.report("n0", to=old)
    world.settle(1)
    assert old not in world.ledgers


def state(world, name):
    return next(node.state for node in world.ledger.views() if node.name == name)


@pytest.mark.parametrize("by", ["the ledger", "the node"])
def test_a_draining_node_leaves_after_its_sessions_have_ended(world, by):
    world.ask("n0", "ada", 4)
    world.settle(1)
    node = world.nodes["n0"]
    if by == "the ledger":
        world.order("n0", True)
    else:
        node.budgets.drain(True)
    world.settle(1)
    world.ask("n0", "bob", 1)
    world.settle(1)
    assert (state(world, "n0"), sizes(world)["n0"]) == ("draining", 4)
    world.ask("n1", "ada", 6)
    world.settle(1)
    assert sizes(world)["n1"] == 0
    world.end("n0")
    world.settle(1)
    assert (state(world, "n0"), node.budgets.has_left) == ("left", True)
    assert sizes(world) == {"n0": 0, "n1": 6, "n2": 0}


def test_the_unused_part_of_a_draining_node_is_free_at_once(world):
    world.nodes["n0"].spare = 7
    world.ask("n0", "ada", 1)
    world.settle(2)
    world.order("n0", True)
    world.settle(1)
    assert world.ledger.counted(ADA) == 1


def test_a_node_that_has_left_and_gets_slices_drains_again(world):
    """After the node has left, its admin lets users without a limit have slices there again."""
    node = world.nodes["n0"]
    world.order("n0", True)
    world.settle(1)
    assert node.budgets.has_left
    node.others = 1
    node.tell()
    world.settle(1)
    assert (state(world, "n0"), node.budgets.has_left) == ("draining", False)


def test_a_node_that_returns_does_not_use_its_old_ceiling(world):
    node = world.nodes["n0"]
    node.spare = 8
    world.ask("n0", "ada", 1)
    world.settle(2)
    world.end("n0")
    node.spare = 0
    world.order("n0", True)
    world.settle(1)
    world.ask("n1", "ada", 8)
    world.settle(1)
    world.ask("n0", "ada", 1)
    world.order("n0", False)
    world.settle(1)
    assert (state(world, "n0"), sizes(world)) == ("present", {"n0": 0, "n1": 8, "n2": 0})
    world.end("n1")
    world.settle(1)
    assert sizes(world)["n0"] == 1


def test_a_later_order_to_return_replaces_an_order_to_drain(world):
    world.order("n0", True)
    world.report("n0")
    world.order("n0", False)
    world.deliver(1)
    world.settle(2)
    assert (state(world, "n0"), world.nodes["n0"].budgets.drains) == ("present", False)


def test_an_order_is_kept_for_a_node_that_has_not_reported_yet(world):
    world.order("n0", True)
    world.settle(2)
    world.kill_ledger()
    world.order("n0", False)
    world.settle(3)
    assert state(world, "n0") == "present"


def test_a_dropped_fence_is_reported(world):
    world.settle(1)
    world.do(world.current, ev.Fenced(now=world.now, node="n0"))
    assert not world.dropped
    world.settle(1)
    assert world.dropped == [ev.FenceDropped("n0", reported=True)]
    world.dropped.clear()
    world.kill_ledger()
    world.do(world.current, ev.Fenced(now=world.now, node="n0"))
    world.settle(1, silent={"n0"})
    assert world.dropped == [ev.FenceDropped("n0", reported=False)]


def test_a_ledger_that_takes_over_waits_for_a_fenced_node(world):
    """Before the takeover, the fenced node comes back and obeys the other ledger."""
    first, second = world.start_ledger(), world.start_ledger()
    world.settle(1)
    world.crash("n0")
    for ledger in (first, second):
        world.do(ledger, ev.Fenced(now=world.now, node="n0"))
    world.advance(20)
    world.nodes["n0"].alive = True
    world.nodes["n0"].begin(2)
    world.ask("n0", "bob", 5)
    world.settle(3)
    assert sizes(world)["n0"] == 5
    world.current = first
    world.ask("n2", "bob", 5)
    world.settle(3, silent={"n0"})
    world.audit()
    assert world.ledger.epoch.number == 2
    world.settle(3)
    world.audit()
    assert world.ledger.serving


def test_a_node_still_drains_after_ledger_and_broker_restart(world):
    world.ask("n0", "ada", 4)
    world.settle(1)
    world.order("n0", True)
    world.settle(1)
    world.kill_ledger()
    world.nodes["n0"].begin(5)
    world.settle(3)
    assert (state(world, "n0"), world.ledger.counted(ADA)) == ("draining", 4)


def test_only_members_of_the_cluster_get_memory(world):
    world.nodes["n9"] = Node("n9")
    world.ask("n9", "ada", 1)
    world.settle(2)
    assert sizes(world)["n9"] == 0
    world.do(world.current, ev.MembersChanged(now=world.now, names=frozenset(world.nodes)))
    world.settle(2)
    assert sizes(world)["n9"] == 1


# --------------------------------------------------------------------------- late messages


@pytest.fixture
def budgets():
    """The budgets of a node that has applied the third answer of the ledger with epoch (2, a)."""
    found = Budgets("n0", 7)
    found.answered(Loan("n0", 7, 0, Epoch(2, "a"), 3, {ADA: 4}))
    assert found.ceilings == {ADA: 4}
    return found


@pytest.mark.parametrize(
    "change", [{"serial": 2}, {"life": 6}, {"epoch": Epoch(1, "z")}, {"serial": 3}]
)
def test_an_older_answer_is_ignored_after_a_newer_one(budgets, change):
    late = Loan("n0", 7, 0, Epoch(2, "a"), 4, {ADA: 8})
    budgets.answered(dataclasses.replace(late, **change))
    assert budgets.ceilings == {ADA: 4}
    budgets.answered(late)
    assert budgets.ceilings == {ADA: 8}


def test_a_ceiling_does_not_fall_below_the_use(budgets):
    budgets.use({ADA: Demand(3)})
    budgets.answered(Loan("n0", 7, 0, Epoch(2, "a"), 4, {ADA: 1}))
    assert budgets.ceilings == {ADA: 3}


def test_memory_in_use_counts_even_without_a_ceiling():
    ledger = Ledger("a", LIMITS, ["n0"], 0.0)
    for number, epoch in ((1, Epoch()), (2, Epoch(1, "a"))):
        report = Report("n0", 7, number, epoch, 0, {ADA: Holding(0, 5)}, (), -1, {})
        ledger.handle(ev.Reported(now=0.0, report=report))
    assert ledger.counted(ADA) == 5


def test_sessions_that_need_two_limits_do_not_block_each_other(world):
    """If the ledger lent limits one by one, each session could get one and wait for the other."""
    world.ask("n0", "ada", 5)
    world.ask("n1", "ada", 5)
    world.ask("n1", "bob", 5)
    world.ask("n0", "bob", 5)
    for _ in range(4):
        world.settle(2)
        for node in world.nodes.values():
            node.running.clear()
            node.tell()
    assert [session for node in world.nodes.values() for session in node.waiting] == []


# --------------------------------------------------------------------------- what it costs


def lines_of(work):
    """Return how many lines of the cluster's modules Python executes during ``work``.

    Unlike a time, this number does not depend on the speed of the machine.
    """
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if "/cluster/" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(old)
    return count


def queue(nodes):
    """Return a world in which n0 has the whole limit, and all other nodes wait for a part."""
    names = [f"n{number}" for number in range(nodes)]
    world = World(names, [1.0] * nodes)
    world.settle(2)
    world.ask("n0", "ada", 8)
    world.settle(1)
    for name in names[1:]:
        world.ask(name, "ada", 2)
    world.settle(1)
    return world


def handle(world):
    """Let the ledger handle the only message; return the count of lines and the answered nodes."""
    (report,) = (message for _, message in world.wires)
    actions = []
    found = lines_of(
        lambda: actions.extend(world.ledger.handle(ev.Reported(now=world.now, report=report)))
    )
    return found, [action.answer.node for action in actions]


def free(nodes):
    world = queue(nodes)
    world.end("n0")
    world.report("n0")
    world.deliver()  # the answer of the ledger asks n0 to give back its free memory
    world.deliver()
    world.report("n0")  # n0 reports that it gives the memory back
    return handle(world)


def wait(nodes):
    world = queue(nodes)
    world.report(f"n{nodes - 1}")
    return handle(world)[0]


def test_work_per_report_does_not_grow_with_the_queue():
    assert free(60) == free(8)
    assert free(8)[1] == ["n0", "n1", "n2", "n3", "n4"]
    assert wait(60) == wait(8)


# --------------------------------------------------------------------------- budgets that refill


def levels(world):
    return {name: node.level for name, node in world.nodes.items()}


def test_a_budget_that_refills_is_used_up_by_all_nodes_together(world):
    world.settle(1)
    for name in ("n0", "n1", "n2"):
        for _ in range(7):
            world.use_bucket(name, 2)
            world.settle(1)
    assert 10 <= sum(levels(world).values()) <= 12
    # The GPU-seconds that the nodes have used refill, and any node may use them again.
    world.advance(DAY / 2)
    world.settle(4)
    assert sum(levels(world).values()) == pytest.approx(6, abs=1.5)
    before = levels(world)["n2"]
    for _ in range(4):
        world.use_bucket("n2", 1)
        world.settle(1)
    assert levels(world)["n2"] > before + 2


def test_the_only_node_that_used_a_budget_gets_its_whole_refill(world):
    for _ in range(8):
        world.use_bucket("n1", 1)
        world.settle(1)
    level = world.nodes["n1"].level
    assert level > 7
    assert world.nodes["n1"].budgets.most(REFILL, world.now) == 12
    world.settle(1)
    for _ in range(20):
        world.advance(1.0)
        world.settle(1)
    # The budget refills 12 GPU-seconds in 40 s. The loop took at least 20 s, so it has refilled at
    # least 6 GPU-seconds.
    assert world.nodes["n1"].level < level - 5.9


def test_gpu_seconds_of_a_dead_node_refill_as_fast_as_before(world):
    for _ in range(7):
        world.use_bucket("n0", 2)
        world.settle(1)
    used = world.nodes["n0"].level
    assert used > 7  # each of the other nodes keeps 2
    world.crash("n0")
    world.do(world.current, ev.Fenced(now=world.now, node="n0"))
    world.settle(1)
    world.advance(11)
    world.settle(3, silent=["n0"])
    assert world.ledger.nodes["n0"].gone
    for _ in range(12):
        world.use_bucket("n1", 1)
        world.settle(1, silent=["n0"])
    assert 0 < world.nodes["n1"].level <= 12 - int(used)
    world.advance(DAY)
    world.settle(3, silent=["n0"])
    for _ in range(12):
        world.use_bucket("n1", 1)
        world.settle(1, silent=["n0"])
    assert world.nodes["n1"].level > 8


# --------------------------------------------------------------------------- what a broker keeps


def lent_limits(path):
    journal = Journal(path, logging.getLogger("test"))
    settings = SimpleNamespace(cluster_node="n0", cluster_min_share=0, on_ledger_loss="closed")
    clock = SimpleNamespace(time_of_day=time.time)
    found = LentLimits(SimpleNamespace(settings=settings), journal, (), clock)
    journal.commit()
    return found, journal


def test_a_report_names_the_journal_of_its_broker(tmp_path):
    names = []
    for _ in range(2):
        found, journal = lent_limits(tmp_path / "journal.sqlite")
        names.append(report_from_json(report_to_json(found.budgets.report(0.0))).journal)
        journal.close()
    other, journal = lent_limits(tmp_path / "other.sqlite")
    journal.close()
    assert names[0] == names[1] != other.budgets.journal != ""


@pytest.mark.parametrize(
    "values", [None, [], [1], ["1", "l1"], [1, 2], [-1, "l1"], [1 << 60, "l1"], [float("inf"), ""]]
)
def test_a_wrong_fencing_token_is_refused_and_forgotten(values):
    with pytest.raises(ValueError, match="is not a fencing token"):
        epoch_from_json(values)
    assert token_from(json.dumps(values)) == token_from("rubbish") == token_from("") == Epoch()
    assert token_from('[3, "l1"]') == Epoch(3, "l1")


@pytest.mark.parametrize("amount", [math.nan, math.inf, -1, 1.5, "5", None, True, 1 << 63])
def test_a_wrong_amount_is_refused(amount):
    """A wrong amount would spoil the sum of its key in this ledger and in each later ledger."""
    spent = {Spent("n1", "j", SECONDS): 7}
    report = Report("n0", 1, 1, Epoch(), 0, {ADA: Holding(7, 7, 7)}, ({ADA: 7},), spent=spent)
    text = json.dumps(report_to_json(report))
    assert report_from_json(json.loads(text)).holdings == {ADA: Holding(7, 7, 7)}
    for place in re.finditer(r"\b7\b", text):
        spoilt = f"{text[: place.start()]}{json.dumps(amount)}{text[place.end() :]}"
        with pytest.raises(ValueError, match="is not an amount"):
            report_from_json(json.loads(spoilt))


# --------------------------------------------------------------------------- guarantees


def claims(world):
    return {n: node.budgets.most(GUARANTEE, world.now) for n, node in world.nodes.items()}


def test_a_guarantee_goes_to_the_node_of_the_groups_sessions(world):
    world.ask("n1", "ada", 4)
    world.settle(2)
    assert claims(world) == {"n0": 0, "n1": 4, "n2": 0}
    world.ask("n2", "bob", 5)
    world.settle(3)
    # n1 keeps the part of the guarantee that it uses, and n2 gets the rest.
    assert claims(world) == {"n0": 0, "n1": 4, "n2": 2}
    world.ask("n0", "bob", 5)
    world.settle(3)
    # n0 takes nothing from n1 and n2. If three nodes shared the guarantee, each part would be too
    # small for a session.
    assert claims(world) == {"n0": 0, "n1": 4, "n2": 2}
    world.nodes["n0"].waiting.clear()
    world.nodes["n0"].tell()
    world.end("n1")
    world.settle(3)
    assert claims(world) == {"n0": 0, "n1": 0, "n2": 5}


def test_a_guarantee_lasts_while_the_ledger_is_silent(world):
    world.ask("n1", "ada", 4)
    world.settle(2)
    world.advance(60)
    assert not world.nodes["n1"].budgets.is_connected(world.clock(world.nodes["n1"]))
    assert claims(world)["n1"] == 4


def test_an_unneeded_guarantee_delays_no_session():
    """A session gets its slice even if its node cannot get a larger part of the guarantee."""
    world = World()
    world.settle()
    for name in ("n0", "n1", "n2"):
        world.ask(name, "ada", 2)
        world.settle(2)
    assert sum(claims(world).values()) == 6
    world.ask("n0", "bob", 4)
    world.settle(3)
    assert sizes(world)["n0"] == 6


# --------------------------------------------------------------------------- everything at once


def test_random_use_exceeds_no_quota_when_a_ledger_dies():
    """Most steps are leases and messages, so the nodes grant more slices than with Hypothesis."""
    granted = 0
    for seed in range(60):
        chance = random.Random(seed)
        world = World(margin=2.0)
        world.settle(2)
        for step in range(4):
            world.churn(chance, 60)
            if step == 1:
                world.kill_ledger()
        world.settle(3)
        granted += sum(node.granted for node in world.nodes.values())
    assert granted > 500


class Cluster(RuleBasedStateMachine):
    """Leases, messages and failures in any order; the auditor checks after each step."""

    NAMES = ("n0", "n1", "n2")
    names = st.sampled_from(NAMES)
    only_ledger = False

    @initialize(rates=st.tuples(*[st.sampled_from([0.95, 1.0, 1.05])] * 3))
    def begin(self, rates):
        self.world = World(self.NAMES, rates, margin=2.0)
        self.world.settle(3)

    @rule(seed=st.integers(0, 1 << 20), steps=st.integers(20, 60))
    def churn(self, seed, steps):
        self.world.churn(random.Random(seed), steps)

    @rule(name=names, user=st.sampled_from(USERS), size=st.integers(1, 5))
    def ask(self, name, user, size):
        self.world.ask(name, user, size)

    @rule(name=names, at=st.integers(0, 3))
    def end(self, name, at):
        self.world.end(name, at)

    @rule(name=names, amount=st.integers(1, 9))
    def consume(self, name, amount):
        node = self.world.nodes[name]
        if node.alive:
            node.consume(amount, self.world.clock(node))

    @rule(name=names, amount=st.integers(1, 9))
    def use_bucket(self, name, amount):
        if self.world.nodes[name].alive:
            self.world.use_bucket(name, amount)

    @rule(name=names)
    def stop_waiting(self, name):
        self.world.nodes[name].waiting.clear()
        self.world.nodes[name].tell()

    @rule(name=names, data=st.data())
    def report(self, name, data):
        self.world.report(name, data.draw(st.sampled_from(sorted(self.world.ledgers))))

    @rule(silent=st.sets(names, max_size=2))
    def settle(self, silent):
        self.world.settle(1, silent=silent)

    @precondition(lambda self: self.world.wires)
    @rule(at=st.integers(0, 30), keep=st.booleans())
    def deliver(self, at, keep):
        self.world.deliver(at % len(self.world.wires), keep=keep)

    @precondition(lambda self: self.world.wires)
    @rule(at=st.integers(0, 30))
    def lose(self, at):
        self.world.wires.pop(at % len(self.world.wires))

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 12.0]))
    def advance(self, seconds):
        self.world.advance(seconds)
        for node in self.world.nodes.values():
            node.serve(self.world.clock(node))

    @precondition(lambda self: not self.only_ledger)
    @rule(ends=st.booleans())
    def start_ledger(self, ends):
        # The new ledger does not know the use of the nodes that are gone. Tell the auditor about
        # this use.
        leaks = [leak for ledger in self.world.ledgers.values() for leak in ledger._gone]
        self.world.forgotten += sum(leak.amount for leak in leaks)
        if ends:
            self.world.kill_ledger()
        elif len(self.world.ledgers) < 3:
            self.world.start_ledger()

    @rule(name=names, drains=st.booleans(), by_ledger=st.booleans())
    def drain(self, name, drains, by_ledger):
        if by_ledger:
            self.world.order(name, drains)
        else:
            self.world.nodes[name].budgets.drain(drains)

    @rule(name=names, keeps=st.booleans())
    def restart_broker(self, name, keeps):
        node = self.world.nodes[name]
        if not node.alive:
            # Until the ledger answers, the node uses its old parts. By now, other nodes may have
            # these parts, too.
            self.world.claims_of_fenced += node.budgets.ceilings.get(GUARANTEE, 0)
            self.world.forgotten += node.budgets.ceilings.get(BUCKET, 0)
        node.begin(max(node.life, node.budgets.life) + 1, keeps=keeps)
        node.alive = True

    @precondition(lambda self: len(self.world.ledgers) == 1 and self.world.ledger.serving)
    @rule(name=names)
    def lose_journal(self, name):
        node = self.world.nodes[name]
        if node.alive:
            # Only this ledger still knows the earlier use of the node. So the test starts no other
            # ledger after this step.
            self.only_ledger = True
            node.lose_journal()

    @rule(name=names, others=st.integers(0, 1))
    def use_without_limits(self, name, others):
        """Set the number of slices that users without a limit have on a node.

        An admin may allow such slices even on a node that has left the cluster.
        """
        self.world.nodes[name].others = others
        self.world.nodes[name].tell()

    @rule(name=names)
    def lose_power(self, name):
        """End a node and its kernels at once. An admin then fences the node in every ledger."""
        self.world.crash(name)
        node = self.world.nodes[name]
        for ledger in [*self.world.ledgers]:
            if not self.world.ledgers[ledger].nodes[name].heard:
                self.world.lost += max(node.consumed, node.budgets.ceilings.get(SECONDS, 0))
                self.world.forgotten += max(node.level, node.budgets.ceilings.get(BUCKET, 0))
            self.world.do(ledger, ev.Fenced(now=self.world.now, node=name))

    @invariant()
    def no_quota_is_exceeded(self):
        if hasattr(self, "world"):
            self.world.audit(lost=self.world.lost)

    @invariant()
    def the_ledgers_sums_are_right(self):
        for ledger in self.world.ledgers.values() if hasattr(self, "world") else ():
            for key in (ADA, LAB, SECONDS, BUCKET, REFILL, GUARANTEE):
                parts = [node.counted.get(key, 0) for node in ledger.nodes.values()]
                gone = sum(n for what, n in ledger._gone.spent.items() if what.key == key)
                leaks = {BUCKET: "amount", REFILL: "part"}.get(key)
                gone += sum(math.ceil(getattr(leak, leaks)) for leak in ledger._gone if leaks)
                assert ledger.counted(key) == sum(parts) + gone
            for key in (SECONDS, BUCKET):
                used = sum(node.used(key) for node in ledger.nodes.values())
                assert ledger._counts.used.get(key, 0) == used

    def teardown(self):
        """After the network works again, every waiting session gets a slice in the end."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for name, node in world.nodes.items():
            if not node.alive:
                self.restart_broker(name, keeps=True)
        world.advance(20)
        for _ in range(2):
            for name in world.nodes:
                world.order(name, False)  # repeat the order, as the command does for a new ledger
            world.settle(4)
        assert not any(node.budgets.drains for node in world.nodes.values())
        for _ in range(1 + sum(len(node.waiting) for node in world.nodes.values())):
            world.settle(4)
            self.no_quota_is_exceeded()
            for node in world.nodes.values():
                node.running.clear()
                node.tell()
        assert world.ledger.serving
        assert [session for node in world.nodes.values() for session in node.waiting] == []


QUIET = {"suppress_health_check": list(HealthCheck), "deadline": None, "database": None}
#: The short form does not shrink a failing case, because that takes minutes. The long form shrinks
#: a failing case.
SHORT = {**QUIET, "phases": [Phase.generate]}


def test_failures_in_any_order_exceed_no_quota():
    options = settings(max_examples=40, stateful_step_count=30, derandomize=True, **SHORT)
    run_state_machine_as_test(Cluster, settings=options)


@pytest.mark.long
def test_failures_in_any_order_exceed_no_quota_long():
    options = settings(max_examples=5_000, stateful_step_count=80, **QUIET)
    run_state_machine_as_test(Cluster, settings=options)
