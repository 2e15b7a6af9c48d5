# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What the ledger tells a node about usage on the other nodes."""

from __future__ import annotations

import pytest

from jupyter_gpupool.cluster import ledger_events as ev
from jupyter_gpupool.cluster.ledger import Ledger
from jupyter_gpupool.cluster.messages import (
    Epoch,
    Report,
    loan_from_json,
    loan_to_json,
    report_from_json,
    report_to_json,
)

ADA, BOB, LAB = ("user", "ada"), ("user", "bob"), ("group", "lab")
HALF = 3600.0


class Nodes:
    def __init__(self):
        self.ledger = Ledger("l", {}, ("a", "b", "c"), 0.0)
        self.now = 0.0
        self.numbers = dict.fromkeys("abc", 0)

    def tell(self, node, usage, *, life=1):
        """Report a node's usage to the ledger; return the answer: the usage on the other nodes."""
        self.numbers[node] += 1
        report = Report(
            node, life, self.numbers[node], Epoch(), 0, spent={}, usage=usage, half_life=HALF
        )
        report = report_from_json(report_to_json(report))
        (send,) = self.ledger.handle(ev.Reported(now=self.now, report=report))
        return loan_from_json(loan_to_json(send.answer)).elsewhere


@pytest.fixture
def nodes():
    return Nodes()


def test_a_node_learns_the_usage_of_its_users_on_other_nodes(nodes):
    assert nodes.tell("a", {ADA: 100, LAB: 100}) == {ADA: 0, LAB: 0}
    assert nodes.tell("b", {ADA: 7, BOB: 40, LAB: 47}) == {ADA: 100, BOB: 0, LAB: 100}
    assert nodes.tell("c", {ADA: 0}) == {ADA: 107}
    assert nodes.tell("a", {ADA: 120}) == {ADA: 7}
    assert nodes.tell("c", {LAB: 0}) == {LAB: 47}, "what a report leaves out is nothing"


def test_a_report_without_usage_gets_no_usage_in_the_answer(nodes):
    nodes.tell("a", {ADA: 100})
    assert nodes.tell("b", None) is None


def test_usage_decays_between_reports(nodes):
    nodes.tell("a", {ADA: 100})
    nodes.now = HALF
    assert nodes.tell("b", {ADA: 10}) == {ADA: 50}
    nodes.now = 2 * HALF
    assert nodes.tell("b", {ADA: 5}) == {ADA: 25}
    assert nodes.tell("a", {ADA: 25}) == {ADA: 5}


def test_reported_usage_of_a_lost_node_still_counts(nodes):
    nodes.tell("a", {ADA: 100})
    nodes.ledger.handle(ev.Fenced(now=0.0, node="a"))
    nodes.ledger.handle(ev.Tick(now=100.0))
    assert nodes.ledger.nodes["a"].gone
    assert nodes.tell("b", {ADA: 0}) == {ADA: pytest.approx(100, abs=3)}
    nodes.now = 100.0
    nodes.tell("a", {ADA: 98}, life=2)
    assert nodes.tell("b", {ADA: 0}) == {ADA: pytest.approx(98, abs=0.2)}
