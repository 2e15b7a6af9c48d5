# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The broker dies at every stage, and nothing is lost."""

from __future__ import annotations

import json
import os

import pytest

from .kit import Kernel, MiB, wait_until

#: The speed of a slow copy, in bytes per second. 64 MiB take about two seconds, so the test can
#: kill the broker in the middle of a copy.
SLOW = 32 * MiB


@pytest.fixture
def kernels(broker):
    made = {}

    def make(*names, kind=Kernel, **kwargs):
        for name in names:
            made[name] = kind(broker, name, **kwargs)
        return [made[name] for name in names]

    yield make
    for one in made.values():
        one.close()


def restart(broker, *kernels):
    broker.kill()
    assert broker.started
    for one in kernels:
        wait_until(lambda one=one: one.link()["greeted"], f"{one.session} is back")


def test_running_cell_keeps_its_slice_over_a_restart(broker, kernels):
    (one,) = kernels("one")
    got = one.attach()
    one.do("alloc", bytes=16 * MiB, byte=5)
    restart(broker, one)
    found = broker.session(one.session)
    # The program has just used its device. So the session may still have the hold ``device`` for
    # this use; ignore that hold.
    holds = {h["id"] for h in found["holds"]} - {"device"}
    assert (found["state"], holds) == ("active", {"cell"})
    assert found["device"] == got["slices"][0][0]
    assert one.link()["attached"]
    one.do("drop", hold="cell")
    one.wait_state("idle")
    assert one.do("take", hold="next")
    assert one.do("check") == 16 * MiB


def test_answered_request_survives_an_immediate_broker_death(broker, kernels):
    (one,) = kernels("one")
    one.server.call("request", session=one.session, memory=64 * MiB, limit=96 * MiB)
    restart(broker, one)
    request = broker.session(one.session)["request"]
    assert (request["memory"], request["limit"]) == (64 * MiB, 96 * MiB)


def test_idle_kernel_stays_idle_over_a_restart(broker, kernels):
    (one,) = kernels("one")
    one.attach()
    one.do("drop", hold="cell")
    one.wait_state("idle")
    restart(broker, one)
    one.wait_state("idle")
    assert one.do("take", hold="next")


def test_next_broker_learns_which_cells_began_and_ended(broker, kernels):
    (one,) = kernels("one")
    one.attach()
    broker.kill()
    one.do("drop", hold="cell")
    assert one.do("take", hold="while-away")
    assert broker.started
    wait_until(lambda: one.link()["greeted"], "its return")
    found = broker.session(one.session)
    assert [h["id"] for h in found["holds"]] == ["while-away"]


def test_devices_are_not_tested_again_while_sessions_hold_them(broker, kernels):
    (one,) = kernels("one")
    one.attach()
    broker.faults.set("checkpoint-refused")  # a self-test would now fail and drain the device
    restart(broker, one)
    assert all(d["can_suspend"] for d in broker.status()["devices"])
    one.close()
    wait_until(lambda: not broker.status()["sessions"], "the end of the session")
    restart(broker)
    assert not any(d["can_suspend"] for d in broker.status()["devices"])


def test_memory_of_a_recovered_kernel_is_never_foreign(make_broker):
    broker = make_broker(foreign_processes="report").started
    one = Kernel(broker, "one")
    try:
        one.attach()
        one.do("alloc", bytes=64 * MiB, byte=5)
        wait_until(lambda: broker.session(one.session)["footprint_bytes"], "a first sample")
        broker.kill()
        assert broker.started
        shown = broker.status()["devices"]
        assert [d["memory_foreign"] for d in shown] == [0 for _ in shown]
        wait_until(lambda: broker.session(one.session)["footprint_bytes"], "a sample after it")
        assert broker.rows("foreign") == []
    finally:
        one.close()


def test_suspended_kernel_keeps_its_bytes_over_a_restart(broker, kernels):
    one, two, three = kernels("one", "two", "three", memory=400 * MiB)
    one.attach()
    one.do("alloc", bytes=16 * MiB, byte=5)
    one.do("drop", hold="cell")
    two.attach()
    three.attach()
    one.wait_state("detached")
    restart(broker, one, two, three)
    found = broker.session(one.session)
    assert found["state"] == "detached"
    assert found["suspended_bytes"] == (16 + 32) * MiB
    assert broker.status()["host"]["used_bytes"] == (16 + 32) * MiB
    two.do("drop", hold="cell")
    one.attach("again")
    assert one.do("check") == 16 * MiB


def with_state(kernels):
    """Return a kernel with data on a device, a suspended kernel, and a kernel without data."""
    one, two, three = kernels("one", "two", "three", memory=300 * MiB)
    one.attach()
    one.do("alloc", bytes=16 * MiB, byte=5)
    two.attach()
    two.do("alloc", bytes=8 * MiB, byte=6)
    two.do("drop", hold="cell")
    two.wait_state("idle")
    with two.broker.client() as client:
        client.call("release", session=two.session)
    two.wait_state("detached")
    return one, two, three


@pytest.mark.parametrize("emulate", ["", "1x1GiB"], ids=["no driver", "another machine"])
def test_broker_without_the_kernels_devices_ends_no_kernel(broker, kernels, emulate):
    """A user may start `jupyter gpupool broker` by hand, without the server's emulated devices."""
    one, two, three = with_state(kernels)
    broker.kill()
    right = json.loads(broker.config_file.read_text())["GPUPool"]["emulate"]
    broker.configure(emulate=emulate)
    answer = broker.start()
    assert (answer["ok"], answer["code"]) == (False, "out-of-reach")
    assert answer["message"].startswith(
        "This broker cannot reach the GPUs of 2 kernels of the previous broker, so they would be "
        "lost."
    )
    assert answer["message"].endswith(". Nothing was changed.")
    assert repr(right) in answer["next_step"]
    for kernel in (one, two):
        assert str(kernel.process.pid) in answer["next_step"]
    broker.configure(emulate=right)
    assert broker.started
    for kernel in (one, two, three):
        assert kernel.process.poll() is None
        wait_until(lambda kernel=kernel: kernel.link()["greeted"], "the kernel is back")
    assert broker.rows("lost") == []
    assert one.do("check") == 16 * MiB
    two.attach("again")
    assert two.do("check") == 8 * MiB


def test_stateless_kernel_continues_under_a_broker_without_gpus(broker, kernels):
    (one,) = kernels("one")
    broker.kill()
    broker.configure(emulate="")
    assert broker.started
    wait_until(lambda: one.link()["greeted"], "the kernel is back")
    assert broker.session(one.session)["state"] == "detached"
    assert one.process.poll() is None


def test_queued_kernel_is_served_after_a_restart(broker, kernels):
    one, two, three = kernels("one", "two", "three", memory=400 * MiB)
    one.attach()
    two.attach()
    three.do("ask", hold="cell")
    three.wait_state("queued")
    restart(broker, one, two, three)
    three.wait_state("queued")
    one.do("drop", hold="cell")
    three.do("got", hold="cell")
    assert one.state() == "detached"


def test_restart_during_a_suspend_loses_no_bytes(broker, kernels):
    one, two, three = kernels("one", "two", "three", memory=400 * MiB)
    one.attach()
    one.do("alloc", bytes=64 * MiB, byte=9)
    two.attach()
    broker.faults.set("slow-copies", bandwidth=SLOW)
    three.do("ask", hold="cell")
    one.do("drop", hold="cell")
    one.wait_state("detaching")
    broker.kill()
    broker.faults.clear()
    restart_all(broker, one, two, three)
    # The new broker completes or undoes the suspend. The waiting kernel gets its slice, and no
    # bytes are lost.
    three.do("got", hold="cell")
    three.do("drop", hold="cell")
    one.attach("again")
    assert one.do("check") == 64 * MiB


def test_restart_during_a_resume_loses_no_bytes(broker, kernels):
    one, two, three = kernels("one", "two", "three", memory=400 * MiB)
    one.attach()
    one.do("alloc", bytes=64 * MiB, byte=9)
    one.do("drop", hold="cell")
    two.attach()
    three.attach()
    one.wait_state("detached")
    broker.faults.set("slow-copies", bandwidth=SLOW)
    one.do("ask", hold="again")
    two.do("drop", hold="cell")
    one.wait_state("attaching")
    broker.kill()
    broker.faults.clear()
    restart_all(broker, one, two, three)
    one.do("got", hold="again")
    assert one.do("check") == 64 * MiB


def restart_all(broker, *kernels):
    assert broker.started
    for one in kernels:
        wait_until(lambda one=one: one.link()["greeted"], f"{one.session} is back")


def test_kernels_that_died_without_a_broker_are_closed(broker, kernels):
    one, two = kernels("one", "two")
    one.attach()
    two.attach()
    broker.kill()
    one.kill()
    assert broker.started
    assert broker.session(one.session) is None
    wait_until(lambda: two.link()["greeted"], "the other's return")
    assert sum(d["memory_granted"] for d in broker.status()["devices"]) == 300 * MiB
    closed = [r for r in broker.rows("close") if r["detail"].get("session") == one.session]
    assert "while there was no broker" in closed[0]["reason"]


class PerCell(Kernel):
    def open_fields(self):
        return {"attach": "cell"}


def test_agent_that_is_slow_to_return_keeps_its_slice(broker, kernels):
    """If a cell in a C library keeps the GIL, the agent is silent. The kernel keeps its slice."""
    one, two = kernels("one", "two", memory=400 * MiB, kind=PerCell)
    three = kernels("three", memory=400 * MiB)[0]
    one.attach()
    two.attach()
    one.tell("sleep_holding_gil", seconds=4)
    broker.kill()
    assert broker.started
    wait_until(lambda: two.link()["greeted"] and three.link()["greeted"], "the others")
    three.do("ask", hold="cell")
    three.wait_state("queued")
    assert one.state() == "active"
    one.answer()
    # Ask the broker for the holds. The kernel's own answer may be out of date, because its agent
    # notices the old broker's death only after the cell.
    holds = lambda: [hold["id"] for hold in broker.session(one.session)["holds"]]  # noqa: E731
    wait_until(lambda: holds() == ["cell"], "its return")
    one.do("drop", hold="cell")
    three.do("got", hold="cell")


def test_normal_end_of_a_broker_keeps_the_sessions(broker, kernels):
    one, two, three = kernels("one", "two", "three", memory=400 * MiB)
    one.attach()
    one.do("alloc", bytes=16 * MiB, byte=2)
    one.do("drop", hold="cell")
    two.attach()
    three.attach()
    one.wait_state("detached")
    assert broker.stop() == 0
    assert not broker.socket.exists()
    assert one.process.poll() is None
    restart_all(broker, one, two, three)
    assert broker.session(one.session)["suspended_bytes"] == (16 + 32) * MiB
    two.do("drop", hold="cell")
    one.attach("again")
    assert one.do("check") == 16 * MiB


def test_damaged_journal_is_logged_and_the_pool_continues(broker, kernels):
    (one,) = kernels("one")
    one.attach()
    broker.kill()
    (path,) = (broker.folder / "state").glob("journal-*.sqlite")
    for wal in (broker.folder / "state").glob("*.sqlite-*"):
        wal.unlink()
    path.write_bytes(b"rubbish" * 1000)
    broker.lost_its_journal()
    assert broker.started
    assert "was damaged" in broker.tail()
    assert broker.rows("journal-lost")
    assert broker.status()["sessions"] == []
    new = kernels("new")[0]
    new.attach()


def test_reboot_ends_all_sessions(broker, kernels):
    """A reboot changes the boot id, and start times of processes count from the new boot."""
    (one,) = kernels("one")
    one.attach()
    broker.kill()
    import sqlite3

    (path,) = (broker.folder / "state").glob("journal-*.sqlite")
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value = 'another' WHERE name = 'boot'")
    db.close()
    assert broker.started
    assert broker.status()["sessions"] == []
    assert os.path.exists(f"/proc/{one.process.pid}")


def test_repeated_kills_of_the_broker_lose_no_bytes(broker, kernels):
    one, two, three = kernels("one", "two", "three", memory=400 * MiB)
    for number, each in enumerate((one, two, three), 1):
        each.attach()
        each.do("alloc", bytes=16 * MiB, byte=number)
        each.do("drop", hold="cell")
    for each in (one, two, three):
        each.do("ask", hold="cell")
        restart(broker, one, two, three)
        each.do("got", hold="cell")
        assert each.do("check") == 16 * MiB
        each.do("drop", hold="cell")
    assert sum(d["memory_granted"] for d in broker.status()["devices"]) <= 2 * 512 * MiB


def test_queue_keeps_its_order_over_a_restart(broker, kernels):
    one, two = kernels("one", "two", memory=400 * MiB)
    one.attach()
    two.attach()
    first, second = kernels("first", "second", memory=400 * MiB)
    first.do("ask", hold="cell")
    first.wait_state("queued")
    second.do("ask", hold="cell")
    second.wait_state("queued")
    restart(broker, second, first)
    for each in (first, second):
        each.wait_state("queued")
    assert broker.session(first.session)["queue_position"] == 1
    assert broker.session(second.session)["queue_position"] == 2
