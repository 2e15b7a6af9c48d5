# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What a ledger counts for machines that left, were fenced, came back or lost their journal."""

from __future__ import annotations

import math

from jupyter_gpupool.cluster import ledger_events as ev
from jupyter_gpupool.cluster.messages import Epoch

from .world import BUCKET, REFILL, SECONDS


def test_a_node_leaves_before_its_gpu_seconds_have_refilled(world):
    world.use_bucket("n0", 2)
    world.settle(2)
    world.order("n0", True)
    world.settle(3)
    assert world.nodes["n0"].budgets.has_left
    assert world.ledger.counted(BUCKET) >= 2


def test_a_node_that_comes_back_counts_its_use_once(world):
    for _ in range(5):
        world.use_bucket("n0", 2)
        world.settle(1)
    used = math.ceil(world.nodes["n0"].level)
    world.order("n0", True)
    world.settle(3)
    assert world.nodes["n0"].budgets.has_left
    world.order("n0", False)
    world.settle(4)
    assert not world.nodes["n0"].budgets.drains
    assert world.ledger._counts.used[BUCKET] == math.ceil(world.nodes["n0"].level) <= used
    assert [*world.ledger._gone] == []


def test_the_use_of_a_day_counts_once_if_a_node_returns(world):
    world.settle(1)
    world.nodes["n0"].consume(5, world.clock(world.nodes["n0"]))
    world.settle(2)
    for _ in range(2):
        world.order("n0", True)
        world.settle(3)
        assert world.nodes["n0"].budgets.has_left
        world.order("n0", False)
        world.settle(4)
        assert world.ledger._gone.amount(SECONDS) == 0
    for _ in range(40):
        for node in world.nodes.values():
            node.consume(1, world.clock(node))
        world.settle(1)
    assert sum(node.consumed for node in world.nodes.values()) == 20


def test_use_before_a_lost_journal_is_added_to_later_use(world):
    node = world.nodes["n0"]
    for _ in range(3):
        world.use_bucket("n0", 2)
        node.consume(2, world.clock(node))
        world.settle(1)
    level, consumed = node.level, node.consumed
    assert level > 3
    assert consumed > 2
    for _ in range(3):
        node.lose_journal()
        world.settle(2)
        world.use_bucket("n0", 2)
        node.consume(2, world.clock(node))
        world.settle(1)
        node.begin(node.life + 1)
        world.settle(2)
        assert world.ledger.counted(SECONDS) >= node.forgotten + node.consumed
    assert world.ledger.counted(BUCKET) >= level + node.level - 2  # 2 have refilled
    world.use_all()
    world.audit()


def test_new_ledgers_count_the_use_of_a_gone_node_once(world):
    node = world.nodes["n0"]
    world.settle(1)
    node.consume(5, world.clock(node))
    world.settle(2)
    world.order("n0", True)
    world.settle(3)
    for _ in range(4):
        assert world.ledger.counted(SECONDS) < 5 + 3 * 2
        world.kill_ledger()
        world.settle(3)
    world.order("n0", False)
    world.settle(4)
    world.kill_ledger()
    world.settle(3)
    assert world.ledger._gone.amount(SECONDS) == 0
    assert world.use_all() == 20


def test_a_new_ledger_counts_the_use_of_both_gone_nodes(world):
    """A new ledger does not know the use of n1 when n0 leaves. It learns this use only later."""
    for name in ("n0", "n1"):
        world.settle(1)
        world.nodes[name].consume(5, world.clock(world.nodes[name]))
    world.settle(2)
    world.crash("n1")
    world.do(world.current, ev.Fenced(now=world.now, node="n1"))
    world.ask("n0", "ada", 1)
    world.settle(1)
    world.advance(11)
    world.settle(2)
    world.nodes["n0"].budgets.drain(True)
    world.settle(1)
    world.nodes["n0"].begin(5)  # the journal has no copy of n1's use
    world.ledgers.clear()
    world.start_ledger(members={"n0", "n2"})
    world.settle(2, silent={"n1", "n2"})
    world.end("n0")
    world.settle(2, silent={"n1", "n2"})
    world.settle(2, silent={"n1"})
    assert world.ledger.serving
    world.use_all()
    world.audit()


def test_a_node_that_left_uses_no_more_of_its_part(world):
    """After n0 has left, its admin puts a GPU back. A user without a limit of slices takes it."""
    for name in ("n0", "n1", "n2"):
        world.use_bucket(name, 1)
        world.settle(1)
    node = world.nodes["n0"]
    node.consume(1, world.clock(node))
    world.settle(2)
    world.order("n0", True)
    world.settle(3)
    assert node.budgets.has_left
    for _ in range(20):
        for name in ("n1", "n2"):
            world.nodes[name].consume(5, world.clock(world.nodes[name]))
            world.use_bucket(name, 2)
        world.settle(1, silent={"n0"})
    node.others = 1
    node.tell()
    node.consume(5, world.clock(node))
    world.use_bucket("n0", 5)
    world.audit()


def test_an_uncounted_report_frees_nothing(world):
    """A node without its fencing token comes back and reports once. Then its network fails."""
    node = world.nodes["n0"]
    for _ in range(5):
        world.settle(1)
        node.consume(2, world.clock(node))
    world.settle(2)
    world.order("n0", True)
    world.settle(3)
    used = node.consumed
    assert used > 5
    node.begin(node.budgets.life + 1)
    node.budgets.epoch = Epoch()
    world.report("n0")
    world.deliver()
    world.wires.clear()
    assert world.ledger.counted(SECONDS) >= used
    world.settle(5, silent={"n0"})
    world.use_all()
    world.audit()


def test_repeated_reports_of_a_lost_journal_count_use_once(world):
    node = world.nodes["n0"]
    world.settle(1)
    node.consume(5, world.clock(node))
    world.settle(2)
    node.lose_journal()
    for life in range(10, 14):
        node.begin(life)
        world.report("n0")
        world.deliver()
        world.wires.clear()
    world.settle(3)
    assert world.ledger._gone.amount(SECONDS) <= 7


def test_repeated_fencing_of_a_node_counts_its_use_only_once(world):
    node = world.nodes["n0"]
    world.settle(1)
    node.consume(3, world.clock(node))
    world.settle(2)
    for _ in range(4):
        world.crash("n0")
        world.do(world.current, ev.Fenced(now=world.now, node="n0"))
        world.advance(11)
        world.settle(1, silent={"n0"})
        node.alive = True
        node.begin(node.budgets.life + 1)
        world.settle(3)
        assert world.ledger._gone.amount(SECONDS) == 0
        world.nodes["n0"].budgets.drain(True)
        world.settle(1)
        world.nodes["n0"].budgets.drain(False)
        world.settle(3)
        assert world.ledger._gone.amount(SECONDS) == 0
    assert world.use_all() == 20


def test_gpu_seconds_of_a_dead_node_refill_completely(world):
    for name in ("n0", "n1"):
        for _ in range(3):
            world.use_bucket(name, 2)
            world.settle(1)
    world.settle(2)
    half = world.nodes["n0"].budgets.most(REFILL, world.now)
    assert 0 < half < 12
    world.crash("n0")
    world.do(world.current, ev.Fenced(now=world.now, node="n0"))
    for _ in range(30):
        world.advance(2.0)
        world.settle(1, silent=["n0"])
    # In these 60 s, the part of the refill that n0 had has covered all use of n0. So the ledger
    # forgets n0, and the other node gets either the whole refill or nothing.
    assert [*world.ledger._gone] == []
    assert world.ledger.counted(REFILL) in (0, 12)
