# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Named faults of the driver, the workers and the agent, and the pool's reactions."""

from __future__ import annotations

import os
import signal

import pytest

from jupyter_gpupool.devices import vendor

from .kit import Kernel, MiB, children, wait_until


@pytest.fixture
def three(broker, kernel):
    """Two sessions with data on the two devices, and a third that needs a device."""
    one, two, three = (kernel(name, memory=400 * MiB) for name in ("one", "two", "three"))
    for number, each in enumerate((one, two), 1):
        each.attach()
        each.do("alloc", bytes=64 * MiB, byte=number)
    return one, two, three


def test_killed_idle_workers_and_monitor_do_no_harm(broker, three):
    one, _two, heir = three
    for pid in children(broker, "worker") + children(broker, "monitor"):
        os.kill(pid, signal.SIGKILL)
    one.do("drop", hold="cell")
    heir.attach()
    assert broker.session(one.session)["suspended_bytes"] == (64 + 32) * MiB
    heir.do("drop", hold="cell")
    one.attach("again")
    assert one.do("check") == 64 * MiB


def test_worker_killed_during_a_suspend_loses_no_bytes(broker, three):
    one, _two, heir = three
    broker.faults.set("slow-copies", bandwidth=16 * MiB)
    heir.do("ask", hold="cell")
    one.do("drop", hold="cell")
    one.wait_state("detaching")
    for pid in children(broker, "worker"):
        os.kill(pid, signal.SIGKILL)
    broker.faults.clear()
    heir.do("got", hold="cell")
    heir.do("drop", hold="cell")
    one.attach("again")
    assert one.do("check") == 64 * MiB


def test_kernel_killed_during_a_suspend_frees_its_device(broker, three):
    one, two, heir = three
    broker.faults.set("slow-copies", bandwidth=16 * MiB)
    heir.do("ask", hold="cell")
    one.do("drop", hold="cell")
    one.wait_state("detaching")
    one.kill()
    broker.faults.clear()
    heir.do("got", hold="cell")
    assert broker.session(one.session) is None
    assert two.do("check") == 64 * MiB


def test_refused_checkpoint_pins_the_session_and_gives_a_reason(broker, three):
    one, two, heir = three
    broker.faults.set("checkpoint-refused", pid=one.process.pid)
    heir.do("ask", hold="cell")
    one.do("drop", hold="cell")
    wait_until(lambda: broker.session(one.session)["pinned_reason"], "the reason")
    assert one.state() == "idle"
    assert one.link()["attached"], "the agent has its lease again"
    assert one.do("take", hold="more")
    assert one.do("check") == 64 * MiB
    assert heir.state() == "queued"
    # The pool can suspend the other session.
    two.do("drop", hold="cell")
    heir.do("got", hold="cell")
    refused = [r for r in broker.rows("refuse") if r["detail"].get("kind") == "pinned"]
    assert refused[0]["session"] == one.session


def test_kernel_continues_if_its_work_does_not_drain(broker, three):
    one, two, heir = three
    broker.faults.set("lock-timeout", pid=one.process.pid, count=1)
    heir.do("ask", hold="cell")
    one.do("drop", hold="cell")
    wait_until(
        lambda: [r for r in broker.rows("refuse") if r["detail"].get("kind") == "drain"],
        "the refusal",
    )
    assert one.do("check") == 64 * MiB
    two.do("drop", hold="cell")
    heir.do("got", hold="cell")


def test_failed_resume_ends_only_that_session(broker, three):
    one, two, heir = three
    one.do("drop", hold="cell")
    heir.attach()
    one.wait_state("detached")
    broker.faults.set("restore-failed", pid=one.process.pid)
    one.do("ask", hold="again")
    two.do("drop", hold="cell")
    one.process.wait(30)
    wait_until(lambda: broker.session(one.session) is None, "its end")
    broker.faults.clear()
    (lost,) = broker.rows("lost")
    assert lost["session"] == one.session
    assert lost["reason"]
    assert broker.status()["host"]["used_bytes"] <= (64 + 32) * MiB
    heir.do("drop", hold="cell")
    two.attach("again")
    assert two.do("check") == 64 * MiB


def test_session_of_a_lost_device_resumes_on_another_device(broker, three):
    one, two, heir = three
    lost = broker.session(one.session)["device"]
    index = next(d["index"] for d in broker.status()["devices"] if d["uuid"] == lost)
    one.do("drop", hold="cell")
    heir.attach()
    one.wait_state("detached")
    broker.faults.set("device-lost", device=index)

    def drained():
        return next(d for d in broker.status()["devices"] if d["uuid"] == lost)["drained_reason"]

    wait_until(drained, "the drained device")
    assert broker.rows("device-lost")[0]["device"] == lost
    two.do("drop", hold="cell")
    one.attach("again")
    assert broker.session(one.session)["device"] != lost
    assert one.do("check") == 64 * MiB


def test_memory_counts_are_right_without_nvmls_process_list(broker, kernel):
    broker.faults.set("nvml-missing-pids")
    one, two = kernel("one", memory=400 * MiB), kernel("two", memory=400 * MiB)
    three = kernel("three", memory=400 * MiB)
    for number, each in enumerate((one, two), 1):
        each.attach()
        each.do("alloc", bytes=64 * MiB, byte=number)
    one.do("drop", hold="cell")
    three.attach()
    assert broker.session(one.session)["suspended_bytes"] == (64 + 32) * MiB
    assert all(d["memory_foreign"] == 0 for d in broker.status()["devices"])
    two.do("drop", hold="cell")
    one.attach("again")
    assert one.do("check") == 64 * MiB


def test_stopped_kernel_delays_no_other_kernel(broker, three):
    """After SIGSTOP, each checkpoint call for this kernel hangs."""
    one, two, heir = three
    one.do("drop", hold="cell")
    one.wait_state("idle")
    os.kill(one.process.pid, signal.SIGSTOP)
    heir.do("ask", hold="cell")
    wait_until(lambda: heir.link()["queue"], "its place in the queue")
    two.do("drop", hold="cell")
    heir.do("got", hold="cell")
    os.kill(one.process.pid, signal.SIGCONT)
    assert one.do("check") == 64 * MiB


def test_agent_that_sends_a_hold_keeps_its_lease(broker, kernel):
    """An agent that sends a hold before it reads the request to yield refuses to yield."""
    one, two = kernel("one", memory=400 * MiB, agent=False), kernel("two", memory=400 * MiB)
    three = kernel("three", memory=400 * MiB)
    two.attach()
    pushes = []
    with broker.client(on_push=pushes.append) as agent:
        # The test's process is not a descendant of the kernel, so the broker refuses its hello.
        code = None
        try:
            agent.call("hello", session=one.session, token=one.token)
        except Exception as error:
            code = error.code
    assert code == "not-yours"
    one.do("start")
    wait_until(lambda: one.link()["greeted"], "its hello")
    one.attach()
    three.do("ask", hold="cell")
    three.wait_state("queued")
    # The agent drops a hold and takes the next one at once, again and again. So the request to
    # yield may arrive while the agent has a hold, or between two holds.
    for number in range(20):
        one.do("drop", hold="cell" if number == 0 else f"c{number - 1}")
        if not one.do("take", hold=f"c{number}"):
            break
    else:
        one.do("drop", hold="c19")
    three.do("got", hold="cell")
    assert one.state() in ("detached", "detaching", "queued")


def test_agent_that_disconnects_keeps_its_hold_for_a_while(broker, kernel):
    one = kernel("one")
    one.attach()
    one.do("close")
    wait_until(lambda: not broker.session(one.session)["agent"], "the agent's leave")
    found = broker.session(one.session)
    assert (found["state"], len(found["holds"])) == ("active", 1)


def test_missing_driver_is_explained_in_one_sentence(make_broker, folder):
    broker = make_broker(emulate="")
    if vendor.driver_present():
        pytest.skip("this machine has an NVIDIA driver")
    assert broker.start()["ok"]
    from jupyter_gpupool.errors import RefusedError

    with pytest.raises(RefusedError) as caught:
        Kernel(broker, "x", launch=False)
    assert caught.value.code == "no-device"
    assert "driver" in caught.value.message
    assert "doctor" in caught.value.next_step


def test_device_that_fails_its_self_test_gets_no_session(broker, three):
    """After a failed resume, the self-test shows that the device is at fault, not the process."""
    one, two, heir = three
    one.do("drop", hold="cell")
    heir.attach()
    one.wait_state("detached")
    bad = broker.session(two.session)["device"]
    broker.faults.set("restore-failed")
    one.do("ask", hold="again")
    two.do("drop", hold="cell")
    one.process.wait(30)

    def drained():
        return {d["uuid"]: d["drained_reason"] for d in broker.status()["devices"]}[bad]

    wait_until(drained, "the quarantine")
    assert "self-test" in drained()
    broker.faults.clear()
    # The broker takes five samples a second, and each sample shows that it can read the device. It
    # must still not use the device.
    then = broker.status()["now"]
    wait_until(lambda: broker.status()["now"] > then + 1, "five samples")
    assert "self-test" in drained()
    assert broker.session(heir.session)["state"] == "active"
