# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""When and how often the agent reports the cells of an attached session to the broker."""

from __future__ import annotations

import threading

import pytest
from harness import Kernel
from scripted_broker import ScriptedBroker

from jupyter_gpupool.kernel import holds as module
from jupyter_gpupool.kernel.holds import LateReports


class Reported:
    """Collects the reports, and lets a test wait for them."""

    def __init__(self) -> None:
        self.lock = threading.Condition(threading.RLock())
        self.words: list[tuple[str, str]] = []
        self.reports = LateReports(self.lock, self._lasting, self._over)

    def _lasting(self, hold: str, kind: str) -> None:
        assert kind == "cell"
        self.words.append(("lasting", hold))
        self.lock.notify_all()

    def _over(self, hold: str, kind: str) -> None:
        assert kind == "cell"
        self.words.append(("over", hold))
        self.lock.notify_all()

    def cell(self, name: str) -> bool:
        self.reports.begin(name, "cell")
        return self.reports.end(name)

    def wait(self, *words: tuple[str, str]) -> None:
        with self.lock:
            assert self.lock.wait_for(lambda: len(self.words) >= len(words), 60), self.words
            assert self.words == [*words]


@pytest.fixture
def by_hand(monkeypatch):
    """Return a ``Reported`` that sends reports only when the test calls ``send``."""
    monkeypatch.setattr(module, "BRIEF", 3600)
    reported = Reported()
    with reported.lock:
        yield reported
    reported.reports.close()


def test_many_short_cells_cause_one_report(by_hand):
    assert all(by_hand.cell(f"c{n}") for n in range(20))
    assert by_hand.words == []
    by_hand.reports.send()
    assert by_hand.words == [("over", "c19")]
    by_hand.reports.send()
    assert len(by_hand.words) == 1


def test_caller_reports_the_end_of_a_reported_hold(by_hand):
    by_hand.reports.begin("c1", "cell")
    by_hand.reports.send()
    assert by_hand.words == [("lasting", "c1")]
    assert by_hand.reports.end("c1") is False
    assert by_hand.reports.end("never-there") is False
    by_hand.reports.send()
    assert by_hand.words == [("lasting", "c1")]


def test_long_cell_is_reported_once(by_hand):
    by_hand.cell("short")
    by_hand.reports.begin("long", "cell")
    by_hand.reports.begin("longer", "cell")
    by_hand.reports.send()
    assert by_hand.words == [("lasting", "long"), ("lasting", "longer")]


def test_hold_that_the_hello_contains_is_not_reported_again(by_hand):
    by_hand.cell("short")
    by_hand.reports.begin("long", "cell")
    by_hand.reports.forget()
    by_hand.reports.send()
    assert by_hand.words == []
    assert by_hand.reports.end("long") is False


def test_thread_sends_one_report_after_another():
    reported = Reported()
    with reported.lock:
        reported.cell("c1")
    reported.wait(("over", "c1"))
    with reported.lock:
        reported.reports.begin("c2", "cell")
    reported.wait(("over", "c1"), ("lasting", "c2"))
    reported.reports.close()
    thread = reported.reports._thread
    thread.join(20)
    assert not thread.is_alive()


NO_HOLD = {"tags": ["no-gpu"]}


def report_late(kernel: Kernel) -> None:
    """Make the kernel's agent report holds after an hour, in place of a moment.

    The cell takes no hold. A hold would start the thread that sends reports, and that thread could
    read either interval.
    """
    code = "import jupyter_gpupool.kernel.holds as u; u.BRIEF = 3600"
    assert kernel.run(code, metadata=NO_HOLD).status == "ok"


def test_earlier_cells_are_reported_before_a_request(
    broker: ScriptedBroker, kernel: Kernel
) -> None:
    """The agent first reports that the cell has ended. Otherwise the broker refuses the release."""
    kernel.run("pass")
    broker.wait_for("drop")
    report_late(kernel)
    kernel.run(
        "from jupyter_gpupool.kernel import _agents\n"
        "reported = next(iter(_agents.values())).link._reports",
        metadata=NO_HOLD,
    )
    kernel.run("pass")
    assert kernel.value("reported._over[0][:5]") == "'cell-'"
    before = len(broker.messages)
    kernel.run("%gpu release")
    broker.wait_for("release")
    kinds = [message["type"] for message in broker.messages[before:]]
    assert kinds[:2] == ["hold", "drop"]
    assert "release" in kinds[2:]


def test_finished_short_cell_is_reported_before_a_yield(
    broker: ScriptedBroker, kernel: Kernel
) -> None:
    """The agent reports finished cells before it answers a yield.

    Otherwise a series of short cells could keep another kernel waiting.
    """
    kernel.run("pass")
    broker.wait_for("drop")
    report_late(kernel)
    kernel.run("pass")
    before = len(broker.messages)
    assert broker.ask_back()["yielded"] is True
    assert [message["type"] for message in broker.messages[before:]] == ["hold", "drop", "yielded"]
