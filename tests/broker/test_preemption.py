# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A session that is preempted in the middle of its work continues later, and nothing is lost.

The tests run broker, guard and emulated driver together. A test decides when the pool preempts (see
``preempting_broker.py``). The sessions are programs that know nothing of the pool.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from jupyter_gpupool.guard import page as layout

from . import kit
from .kit import ONE, MiB, children, wait_until
from .preempting_broker import REASON
from .test_guarded import NOT_READY, Program

#: Size that a session requests. A device has room for only one session of this size.
BIG = 300 * MiB

CLASSES = {"batch": 0, "interactive": 10}


class PreemptingBroker(kit.Broker):
    module = "tests.broker.preempting_broker"

    def preempt(self, program):
        """Let the pool preempt a program; return once the pool has decided."""
        file = self.folder / "preempt"
        part = self.folder / "preempt.part"
        part.write_text(program.session)
        part.replace(file)
        wait_until(lambda: not file.exists(), "the pool's decision")


class Worker(Program):
    """A program, and what its page says."""

    def page(self):
        page = layout.Page.open(Path(self.env["GPUPOOL_PAGE"]))
        try:
            return page.read()
        finally:
            page.close()

    def contended(self):
        return Path(self.env["GPUPOOL_PAGE"]).read_bytes()[layout.CONTENDED_AT] == 1

    def contend(self, contended):
        """Write into the program's page whether another session waits, as the broker does."""
        # The broker's first look also writes this: that no session waits. Let it write first.
        wait_until(lambda: self.page().gate == layout.UNUSED, "the broker's first look")
        page = layout.Page.open(Path(self.env["GPUPOOL_PAGE"]))
        page.set_contended(contended)
        page.close()


@pytest.fixture
def parts():
    config = {
        "emulate": ONE, "attach": "lazy", "quiet_after": 2.0, "lock_timeout": 20.0,
        "priority_classes": CLASSES, "default_priority": "batch",
    }  # fmt: skip
    return PreemptingBroker, Worker, config


@pytest.fixture
def program(broker):
    made = []

    def make(*args, **kwargs):
        made.append(Worker(broker, *args, **{"memory": BIG, **kwargs}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def at_work(program, **request):
    """Return a program in the middle of its work. It also has 64 MiB of bytes to check later."""
    p = program("worker", **request)
    p.do("on_interrupt")
    p.begin(64 * MiB, byte=7)
    p.do("toil")
    further(p)
    return p


def further(p, rounds=3):
    """Wait until the program has done ``rounds`` more rounds of its work."""
    before = p.do("rounds")["rounds"]

    def gone_on():
        state = p.do("rounds")
        assert not state["error"], state
        return state["rounds"] >= before + rounds

    wait_until(gone_on, "the work to go on")


def stands(p):
    """Return whether exactly one thread of the program waits at the gate."""
    return p.status()["waiting"] == 1


def whole(p):
    """End the program's work; check that every byte is right and no call has failed."""
    state = p.do("rest")
    assert not state["error"], state
    assert p.do("check") == 64 * MiB


def displaced(broker, program):
    """Return a preempted program that waits, and the program that got its GPU."""
    worker = at_work(program)
    urgent = program("urgent", priority="interactive")
    urgent.tell("context")
    urgent.wait_state("queued")
    broker.preempt(worker)
    assert urgent.answer() is None
    wait_until(lambda: worker.state() == "queued" and stands(worker), "the worker to wait")
    return worker, urgent


# ---------------------------------------------------------------------- nothing is lost


def test_preempted_program_continues_without_a_new_request(broker, program):
    worker, urgent = displaced(broker, program)
    status = worker.status()
    assert status["preempted"] == REASON
    assert status["suspended_bytes"] >= 64 * MiB
    assert [hold["kind"] for hold in status["holds"]] == ["device"]
    urgent.close()
    worker.wait_state("active")
    further(worker)
    status = worker.status()
    assert (status["preempted"], status["suspends"], status["resumes"]) == ("", 1, 1)
    whole(worker)
    assert [row["reason"] for row in broker.rows("preempt")] == [REASON]


def test_program_survives_several_preemptions(broker, program):
    worker = at_work(program)
    for count in range(1, 4):
        broker.preempt(worker)
        wait_until(lambda n=count: worker.status()["resumes"] == n, "the return")
        further(worker, 1)
    whole(worker)


def test_all_processes_of_a_session_are_preempted_together(broker, program):
    worker = at_work(program)
    for command in ({"do": "context"}, {"do": "toil"}):
        worker.do("sub", command=command)
    urgent = program("urgent", priority="interactive")
    urgent.tell("context")
    urgent.wait_state("queued")
    broker.preempt(worker)
    assert urgent.answer() is None
    wait_until(lambda: worker.status()["waiting"] == 2, "both to wait")
    urgent.close()
    further(worker)
    before = worker.do("sub", command={"do": "rounds"})["rounds"]

    def child_goes_on():
        state = worker.do("sub", command={"do": "rounds"})
        assert not state["error"], state
        return state["rounds"] > before

    wait_until(child_goes_on, "the child's work")
    assert not worker.do("sub", command={"do": "rest"})["error"]
    whole(worker)


def test_submitted_work_is_finished_before_the_suspend(broker, program):
    """The submitted work ends before the copy to host memory, so the copy has its results."""
    worker = at_work(program)
    worker.do("spin", seconds=0.5)
    broker.preempt(worker)
    wait_until(lambda: worker.status()["resumes"] == 1, "the return")
    further(worker)
    whole(worker)


def test_interrupt_ends_the_wait_and_loses_nothing(broker, program):
    """The state stays in host memory, and the next call resumes the session."""
    worker, urgent = displaced(broker, program)
    worker.process.send_signal(signal.SIGINT)
    wait_until(lambda: worker.do("rounds")["error"], "the interrupted call")
    assert f"CudaError({NOT_READY['cuda']})" in worker.do("rounds")["error"]
    worker.wait_state("detached")
    status = worker.status()
    assert (status["preempted"], status["queue_position"]) == ("", None)
    urgent.close()
    assert worker.do("check") == 64 * MiB


def test_preempted_program_without_calls_stays_suspended(broker, program):
    worker, urgent = program("worker"), program("urgent", priority="interactive")
    worker.begin(64 * MiB, byte=7)
    urgent.tell("context")
    urgent.wait_state("queued")
    broker.preempt(worker)
    assert urgent.answer() is None
    worker.wait_state("detached")
    status = worker.status()
    assert (status["suspends"], status["holds"], status["preempted"]) == (1, [], "")
    urgent.close()
    assert worker.do("check") == 64 * MiB


# ---------------------------------------------------------------------- refused


def refusals(broker):
    return [(row["detail"]["kind"], row["reason"]) for row in broker.rows("refuse")
            if row["detail"].get("what") == "suspend"]  # fmt: skip


def test_preemption_is_refused_if_a_call_does_not_return(make_broker):
    broker = make_broker(lock_timeout=0.5).started
    worker = Worker(broker, "worker", memory=BIG)
    try:
        worker.begin(64 * MiB, byte=7)
        worker.do("spin", seconds=4)
        worker.tell("sync")
        wait_until(lambda: worker.page().inflight, "the call")
        broker.preempt(worker)
        wait_until(lambda: refusals(broker), "the refusal")
        kind, why = refusals(broker)[0]
        assert kind == "drain"
        assert "did not return within 0.5 s" in why
        assert worker.answer() is None
        status = worker.status()
        assert status["state"] in ("active", "idle")
        assert (status["suspends"], status["preempted"]) == (0, "")
        assert worker.do("check") == 64 * MiB
    finally:
        worker.close()


def test_preemption_is_refused_if_work_does_not_drain(make_broker):
    """No call is inside the driver, but the submitted work takes longer than the lock waits."""
    broker = make_broker(lock_timeout=0.5).started
    worker = Worker(broker, "worker", memory=BIG)
    try:
        worker.begin(64 * MiB, byte=7)
        worker.do("spin", seconds=4)
        broker.preempt(worker)
        wait_until(lambda: refusals(broker), "the refusal")
        kind, why = refusals(broker)[0]
        assert kind == "drain"
        assert "did not finish in 0.5 s" in why
        assert worker.do("check") == 64 * MiB
        assert worker.status()["suspends"] == 0
    finally:
        worker.close()


#: GPU kernels that a test submits: 400 kernels of 0.01 s each, together 4 s of work.
QUEUE = {"count": 400, "seconds": 0.01}


@pytest.mark.parametrize("contended", [False, True])
def test_queue_drains_in_time_only_under_contention(make_broker, contended):
    broker = make_broker(lock_timeout=1.0).started
    worker = Worker(broker, "worker", memory=BIG)
    try:
        worker.begin(64 * MiB, byte=7)
        worker.contend(contended)
        worker.do("flood", **QUEUE)
        least = 20 if contended else QUEUE["count"]
        wait_until(lambda: worker.do("flooded")["submitted"] >= least, "work")
        broker.preempt(worker)
        wait_until(lambda: refusals(broker) or worker.status()["resumes"], "an end")
        assert bool(refusals(broker)) is not contended
        assert worker.status()["suspends"] == int(contended)
        wait_until(lambda: worker.do("flooded")["over"], "all work")
        assert not worker.do("flooded")["error"]
        assert worker.do("check") == 64 * MiB
    finally:
        worker.close()


def test_page_shows_contention_while_another_session_waits(make_broker):
    """The pool may preempt running work here, and the work must drain before a preemption.

    If the pool may not preempt running work, the page does not show contention.
    """
    broker = make_broker(preempt=["turns"], max_swap_overhead=0.001).started
    program = Maker(broker)
    try:
        worker = at_work(program)
        assert not worker.contended()
        other = program("other")
        other.tell("context")
        other.wait_state("queued")
        wait_until(worker.contended, "the page to say so")
        other.close()
        wait_until(lambda: not worker.contended(), "the page to say that nobody waits")
        whole(worker)
    finally:
        program.close()


def test_preemption_is_refused_while_a_graph_is_recorded(broker, program):
    worker = program("worker")
    worker.begin(64 * MiB, byte=7)
    worker.do("capture")
    broker.preempt(worker)
    wait_until(lambda: refusals(broker), "the refusal")
    assert refusals(broker)[0] == ("drain", "it records a CUDA graph")
    assert worker.do("captured") is None
    assert worker.do("check") == 64 * MiB


def test_running_cell_without_the_guard_is_not_preempted(make_broker):
    """Without the guard's gate, a CUDA call during the suspend would end the process."""
    broker = make_broker(guard=False, attach="cell").started
    kernel = kit.Kernel(broker, "cell", memory=BIG)
    try:
        kernel.attach()
        broker.preempt(kernel)
        wait_until(lambda: refusals(broker), "the refusal")
        kind, why = refusals(broker)[0]
        assert kind == "drain"
        assert "without the guard" in why
        assert kernel.state() == "active"
        assert kernel.link()["attached"]
    finally:
        kernel.close()


# ---------------------------------------------------------------------- the failure table


def slow(broker):
    """Make copies take seconds, so that a test can act in the middle of a copy."""
    broker.faults.set("slow-copies", bandwidth=24 * MiB)


@pytest.mark.parametrize("moment", ["calls drain", "work drains", "state is copied", "it waits"])
def test_program_survives_the_kill_of_a_broker_at_any_moment(make_broker, moment):
    """The broker is killed in the middle of a preemption, and the next broker finds this state.

    The program must continue, with every byte right.
    """
    broker = make_broker().started
    program = Maker(broker)
    try:
        worker = at_work(program)
        # ``spin`` submits work of 4 s. A suspend waits for this work, with the gate closed.
        if moment == "calls drain":
            worker.do("spin", seconds=4)
            worker.do("storm")
            wait_until(lambda: worker.page().inflight, "a call inside")
        elif moment == "work drains":
            worker.do("spin", seconds=4)
        elif moment == "state is copied":
            slow(broker)
        else:
            urgent = program("urgent", priority="interactive")
            urgent.tell("context")
            urgent.wait_state("queued")
        broker.preempt(worker)
        if moment == "it waits":
            assert urgent.answer() is None
            worker.wait_state("queued")
        else:
            wait_until(lambda: worker.page().gate == layout.CLOSED, "the gate to close")
        broker.kill()
        broker.faults.clear()
        assert broker.start()["ok"]
        if moment == "it waits":
            wait_until(lambda: worker.status() and worker.state() == "queued", "its place")
            urgent.close()
        further(worker)
        if moment == "calls drain":
            assert worker.do("calm")["error"] == 0
        whole(worker)
    finally:
        program.close()


def test_program_survives_the_kill_of_a_broker_during_a_resume(make_broker):
    broker = make_broker().started
    program = Maker(broker)
    try:
        worker, urgent = displaced(broker, program)
        slow(broker)
        urgent.close()
        worker.wait_state("attaching")
        broker.kill()
        broker.faults.clear()
        assert broker.start()["ok"]
        further(worker)
        whole(worker)
    finally:
        program.close()


@pytest.mark.parametrize("moment", ["its work drains", "its state is copied"])
def test_program_survives_the_kill_of_the_brokers_workers(make_broker, moment):
    """After its workers' death, the broker asks the driver, and undoes or refuses the suspend."""
    broker = make_broker().started
    program = Maker(broker)
    try:
        worker = at_work(program)
        if moment == "its work drains":
            worker.do("spin", seconds=4)
        else:
            slow(broker)
        broker.preempt(worker)
        wait_until(lambda: worker.page().gate == layout.CLOSED, "the gate to close")
        for pid in wait_until(lambda: children(broker, "worker"), "the broker's workers"):
            os.kill(pid, signal.SIGKILL)
        broker.faults.clear()
        further(worker)
        whole(worker)
    finally:
        program.close()


@pytest.mark.parametrize("moment", ["its work drains", "its state is copied", "it waits"])
def test_killed_program_frees_all_its_memory(make_broker, moment):
    """The memory of the program is free again, on the GPU and in the host."""
    broker = make_broker().started
    program = Maker(broker)
    try:
        if moment == "it waits":
            worker, urgent = displaced(broker, program)
        else:
            worker = at_work(program)
            if moment == "its work drains":
                worker.do("spin", seconds=20)
            else:
                slow(broker)
            broker.preempt(worker)
            wait_until(lambda: worker.page().gate == layout.CLOSED, "the gate to close")
        worker.kill()
        broker.faults.clear()
        wait_until(lambda: broker.session(worker.session) is None, "the session to end")
        if moment == "it waits":
            urgent.close()
        wait_until(lambda: not broker.status()["host"]["used_bytes"], "host memory")
        other = program("other")
        other.begin(MiB)
        assert other.served
    finally:
        program.close()


def test_program_continues_after_its_agent_disconnects(broker, program):
    """An agent's hold ends a while after its disconnection. The program still needs the GPU."""
    worker = at_work(program)
    worker.do("hold", hold="cell-1")
    wait_until(lambda: len(worker.status()["holds"]) == 2, "the cell's hold")
    urgent = program("urgent", priority="interactive")
    urgent.tell("context")
    urgent.wait_state("queued")
    broker.preempt(worker)
    assert urgent.answer() is None
    wait_until(lambda: worker.state() == "queued" and stands(worker), "the worker to wait")
    worker.do("hang_up")
    urgent.close()
    further(worker)
    whole(worker)


class Maker:
    """Starts programs that use the same broker, and ends all of them."""

    def __init__(self, broker):
        self.broker = broker
        self.made = []

    def __call__(self, *args, **kwargs):
        self.made.append(Worker(self.broker, *args, **{"memory": BIG, **kwargs}))
        return self.made[-1]

    def close(self):
        for one in self.made:
            one.close()
