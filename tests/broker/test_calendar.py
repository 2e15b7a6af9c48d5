# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A running broker applies each change of a schedule once and on time, even if the clock jumps."""

from __future__ import annotations

import signal
import time
from datetime import datetime, timezone

import pytest

from .kit import ONE, Broker, Kernel, MiB, wait_until
from .test_preemption import Worker, at_work, further, stands, whole

NIGHT = {"name": "night", "hours": "20:00-08:00", "time_zone": "UTC",
         "set": {"idle_timeout": "2h", "quotas": {"*": {"leases": 9}}}}  # fmt: skip

#: Monday evening, when the night begins, and the next morning, when the night ends.
EVENING = datetime(2026, 11, 23, 20, tzinfo=timezone.utc).timestamp()
MORNING = EVENING + 12 * 3600


class CalendarBroker(Broker):
    module = "tests.broker.calendar_broker"

    @property
    def variables(self):
        return {"TEST_FOLDER": str(self.folder)}

    def set_clock(self, now):
        """Set the broker's time of day."""
        new = self.folder / "clock.new"
        new.write_text(str(now - time.time()))
        new.replace(self.folder / "clock")

    def schedules(self):
        """Return what the journal says about schedules."""
        return [row["reason"] for row in self.rows("schedule")]

    def idle_timeout(self):
        return self.status()["settings"]["idle_timeout"]


@pytest.fixture
def parts():
    return CalendarBroker, None, {"emulate": ONE, "schedules": [NIGHT], "idle_timeout": 600}


@pytest.fixture
def at(make_broker):
    """Make a broker that starts at a time of day."""

    def make(now, **config):
        broker = make_broker(**config)
        broker.set_clock(now)
        return broker.started

    return make


def test_a_change_is_applied_once_when_it_is_due(at):
    broker = at(EVENING - 3600)
    status = broker.status()
    assert status["settings"]["idle_timeout"] == 600
    assert status["schedule"] == {"in_force": [], "next_change": EVENING, "next": ["night"]}
    assert broker.schedules() == []
    broker.set_clock(EVENING - 1)
    wait_until(lambda: broker.schedules(), "the night")
    assert time.time() + float((broker.folder / "clock").read_text()) >= EVENING
    status = broker.status()
    assert status["settings"]["idle_timeout"] == 7200
    assert status["schedule"] == {"in_force": ["night"], "next_change": MORNING, "next": []}
    # Meanwhile the broker reads the clock several times. It must not apply the change again.
    time.sleep(1)
    assert broker.schedules() == ["In force: night"]
    assert "In force: night" in broker.log.read_text()


def test_schedule_follows_a_clock_that_jumps_over_a_night(at):
    broker = at(EVENING - 60)
    assert broker.idle_timeout() == 600
    broker.set_clock(EVENING + 5)
    wait_until(lambda: broker.idle_timeout() == 7200, "the night")
    broker.set_clock(MORNING + 3600)
    wait_until(lambda: broker.idle_timeout() == 600, "the day")
    broker.set_clock(MORNING + 86400 + 3600)  # the machine slept through a whole night
    time.sleep(1)
    assert broker.schedules() == ["In force: night", "No schedule is in force"]


def test_schedule_follows_a_clock_that_is_set_back(at):
    broker = at(EVENING + 60)
    assert broker.idle_timeout() == 7200
    broker.set_clock(EVENING - 3600)
    wait_until(lambda: broker.idle_timeout() == 600, "the day")
    assert broker.schedules() == ["In force: night", "No schedule is in force"]


def test_restarted_broker_applies_the_schedule_and_notes_changes(at):
    broker = at(EVENING + 60)
    assert broker.schedules() == ["In force: night"]
    broker.kill()
    assert broker.started
    assert broker.idle_timeout() == 7200
    assert broker.schedules() == ["In force: night"]
    broker.kill()
    broker.set_clock(MORNING + 60)
    assert broker.started
    assert broker.idle_timeout() == 600
    assert broker.schedules() == ["In force: night", "No schedule is in force"]


def test_changed_schedule_applies_at_once_after_sighup(at):
    broker = at(EVENING + 60)
    late = {**NIGHT, "hours": "22:00-06:00"}
    broker.configure(schedules=[late], idle_timeout=600)
    broker.process.send_signal(signal.SIGHUP)
    wait_until(lambda: broker.idle_timeout() == 600, "the new schedule")
    assert broker.status()["schedule"]["next_change"] == EVENING + 2 * 3600
    broker.configure(schedules=[], idle_timeout=60)
    broker.process.send_signal(signal.SIGHUP)
    wait_until(lambda: broker.idle_timeout() == 60, "no schedule")
    assert broker.status()["schedule"] is None


def test_invalid_schedule_is_refused_and_the_old_one_remains(at):
    broker = at(EVENING + 60)
    broker.configure(schedules=[{**NIGHT, "set": {"idle_timout": 1}}], idle_timeout=600)
    broker.process.send_signal(signal.SIGHUP)
    wait_until(lambda: broker.rows("config"), "the refusal")
    (row,) = broker.rows("config")
    assert "There is no option 'idle_timout'. Did you mean 'idle_timeout'?" in row["reason"]
    assert broker.idle_timeout() == 7200
    broker.set_clock(MORNING + 1)
    wait_until(lambda: broker.idle_timeout() == 600, "the day")


def test_night_work_stops_by_day_and_continues_at_night(at):
    """The schedule preempts the running work on two days, and every byte is still right."""
    broker = at(
        EVENING + 3600, attach="lazy", quiet_after=2.0, lock_timeout=20.0,
        classes_allowed=["notebook"],
        schedules=[{**NIGHT, "set": {"classes_allowed": None}}],
    )  # fmt: skip
    why = "kernels of its priority class get no GPU at this time"
    wait = (
        f"it was preempted: {why}; it goes on by itself when the schedule lets its class run, in "
        "12 h, at 20:00 UTC"
    )
    made = []

    def program(*args, **request):
        made.append(Worker(broker, *args, **{"memory": 300 * MiB, "priority": "batch", **request}))
        return made[-1]

    try:
        worker = at_work(program)
        for day in (1, 2):
            broker.set_clock(EVENING + 12 * 3600 + (day - 1) * 86400 + 5)
            wait_until(lambda: worker.state() == "queued" and stands(worker), "the day")
            status = worker.status()
            assert status["preempted"] == why
            # The pool learns the new time of day a moment later, so the final reason comes later.
            wait_until(lambda: worker.status()["wait_reason"] == wait, wait)
            with broker.client() as client:
                told = client.call("why", session=worker.session)
            assert told["expected"] is None
            other = Worker(broker, "notebook", memory=300 * MiB)
            made.append(other)
            other.begin(16 * MiB)
            other.close()
            broker.set_clock(EVENING + day * 86400 + 5)
            wait_until(lambda: worker.state() == "active", "the night")
            further(worker)
        assert worker.status()["suspends"] == 2
        whole(worker)
    finally:
        for one in made:
            one.close()


def test_budgets_follow_a_changed_clock(at):
    """The test sets the clock past the renewal, restarts the broker, and sets the clock back."""
    daily = {"seconds": 3, "renews": "20:00", "then": "refuse"}
    broker = at(EVENING - 3600, schedules=[], quotas={"*": {"gpu_seconds_per_day": daily}})
    kernel = Kernel(broker, "first")

    def spent():
        return broker.session(kernel.session)["usage"]["spent"]

    def standing():
        return " ".join(broker.session(kernel.session)["standing"])

    try:
        kernel.attach()
        wait_until(spent, "the end of the budget")
        kernel.do("drop", hold="cell")
        kernel.close()
        kernel = Kernel(broker, "second")
        broker.set_clock(EVENING - 3000)
        wait_until(lambda: "there are more in 50 min." in standing(), "the renewal's time")
        broker.set_clock(EVENING - 600)
        wait_until(lambda: "more in 10 min" in standing(), "the new time of day")
        assert spent()
        broker.set_clock(EVENING + 5)
        wait_until(lambda: not spent(), "the next day's budget")
        broker.kill()
        assert broker.start()["ok"]
        wait_until(lambda: broker.session(kernel.session), "the session")
        assert not spent()
        told = len(broker.log.read_text())
        broker.set_clock(EVENING - 3600)
        wait_until(lambda: "jumped back by" in broker.log.read_text()[told:], "the step back")
        assert not spent()
    finally:
        kernel.close()


def test_request_after_a_machine_sleep_gets_the_new_budget(at, monkeypatch):
    """The broker must read the clock for the request; its next regular reading is an hour away."""
    monkeypatch.setenv("TEST_LOOK", "3600")
    daily = {"seconds": 1, "renews": "20:00", "then": "refuse"}
    broker = at(EVENING - 3600, schedules=[], quotas={"*": {"gpu_seconds_per_day": daily}})
    kernel = Kernel(broker, "first")
    try:
        kernel.attach()
        wait_until(lambda: broker.session(kernel.session)["usage"]["spent"], "the budget's end")
    finally:
        kernel.close()
    # Replace the broker by one without a lease. A broker with a lease reads the clock when it
    # writes the lease's usage, but here only the request may make the broker read the clock.
    broker.kill()
    assert broker.start()["ok"]
    kernel = Kernel(broker, "second")
    try:
        broker.set_clock(EVENING + 5)
        kernel.attach()
    finally:
        kernel.close()


def test_machine_sleep_before_a_restart_is_not_charged(at):
    daily = {"seconds": 100_000, "renews": "03:00"}
    broker = at(EVENING, schedules=[], quotas={"*": {"gpu_seconds_per_day": daily}})
    kernel = Kernel(broker, "first")

    def used():
        return broker.session(kernel.session)["usage"]["today"]

    try:
        kernel.attach()
        # Use more than 3 s. A killed broker loses the usage that it has not written yet, and the
        # next broker must still show more than 1 s.
        wait_until(lambda: used() > 3, "some use")
        broker.set_clock(EVENING + 5 * 3600)
        broker.kill()
        assert broker.start()["ok"]
        wait_until(lambda: broker.session(kernel.session), "the session")
        assert 1 < used() < 3600
    finally:
        kernel.close()
