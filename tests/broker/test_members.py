# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Members of a session: programs that hold the session's slice and are not the session's agent.

An example is the parent process of the kernel.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from jupyter_gpupool.errors import Code, RefusedError

from . import forks, kit
from .kit import wait_until


@pytest.fixture(scope="module", autouse=True)
def ancestor():
    """Make this process an ancestor of the kernels, like a program that starts a kernel."""
    with forks.own():
        yield


@pytest.fixture
def member(broker):
    """Join a kernel's session as a member; return the connection and its list of pushes."""
    made = []

    def join(kernel, **fields):
        pushes = []
        client = broker.client(on_push=pushes.append)
        made.append(client)
        client.call(
            "hello", session=kernel.session, token=kernel.token, member=True, epoch=0, **fields
        )
        return client, pushes

    yield join
    for client in made:
        client.close()


def holds(broker, kernel):
    return {hold["id"] for hold in broker.session(kernel.session)["holds"]}


def test_slice_is_held_until_the_last_member_drops_its_hold(broker, kernel, member):
    one = kernel("one")
    first, pushes = member(one)
    second, _ = member(one)
    first.call("hold", hold="a", kind="manual", wait=True)
    wait_until(lambda: any(p["type"] == "lease" for p in pushes), "the news of the lease")
    second.call("hold", hold="b", kind="manual", wait=True)
    one.attach("cell")
    assert holds(broker, one) == {"a", "b", "cell"}
    one.do("drop", hold="cell")
    first.send("drop", hold="a")
    wait_until(lambda: holds(broker, one) == {"b"}, "the second's alone")
    assert one.state() == "active"
    second.send("drop", hold="b")
    one.wait_state("idle")


def test_hello_of_the_agent_keeps_the_holds_of_members(broker, kernel, member):
    one = kernel("one", agent=False)
    first, _ = member(one)
    first.call("hold", hold="a", kind="manual", wait=True)
    one.do("start")
    wait_until(lambda: broker.session(one.session)["agent"], "the agent")
    assert holds(broker, one) == {"a"}
    one.attach("cell")
    assert holds(broker, one) == {"a", "cell"}


def test_holds_end_with_the_connection(broker, kernel, member):
    one, two = kernel("one"), kernel("two", agent=False)
    first, _ = member(one)
    first.call("hold", hold="a", kind="manual", wait=True)
    third = kernel("three", agent=False)
    (waiting, _), (also, _) = member(two), member(third)
    waiting.call("hold", hold="b", kind="manual", wait=True)
    future = also.start("hold", hold="c", kind="manual", wait=True)
    third.wait_state("queued")
    also.close()
    third.wait_state("detached")
    assert future.exception(30) is not None
    first.close()
    one.wait_state("idle")
    assert two.state() == "active"


def test_a_hold_belongs_to_one_member(broker, kernel, member):
    one = kernel("one")
    first, _ = member(one)
    first.call("hold", hold="a", kind="manual", wait=True)
    with pytest.raises(RefusedError) as refused:
        member(one, holds=[{"id": "a", "kind": "manual"}])
    assert refused.value.code == Code.DUPLICATE


#: A program that says hello from a process that is neither the session's process nor its parent.
STRANGER = """
import sys
from jupyter_gpupool.client import Client
from jupyter_gpupool.errors import GPUPoolError
with Client(sys.argv[1]) as client:
    try:
        client.call("hello", session=sys.argv[2], token=sys.argv[3], member=True, epoch=0)
    except GPUPoolError as error:
        print(error.code)
"""


def test_only_relatives_of_the_process_can_be_members(broker, kernel):
    one = kernel("one")
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, str(broker.socket), one.session, one.token],
        env=kit.environment(broker.folder), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == "not-yours\n"
    with broker.client() as parent, pytest.raises(RefusedError) as refused:
        parent.call("hello", session=one.session, token=one.token, epoch=0)
    assert refused.value.code == Code.NOT_YOURS, "a parent is no agent"


def test_members_do_not_answer_for_the_agent(broker, kernel, member):
    """A session yields only if its agent answers. The answer of a member has no effect."""
    one, two = kernel("one"), kernel("two", agent=False)
    third = kernel("three", agent=False)
    first, _ = member(one)
    epoch = one.attach("cell")["epoch"]
    (other, _), (waiting, _) = member(two), member(third)
    other.call("hold", hold="b", kind="manual", wait=True)
    future = waiting.start("hold", hold="c", kind="manual", wait=True)
    third.wait_state("queued")
    first.send("yielded", epoch=epoch, yielded=True, cuda=False)
    first.call("ping")
    assert (one.state(), third.state()) == ("active", "queued")
    one.do("drop", hold="cell")
    assert future.result(60)["slices"]


def test_the_next_broker_knows_the_holds_of_members(make_broker):
    broker = make_broker().started
    one = kit.Kernel(broker, "one", agent=False)
    try:
        with broker.client() as first:
            first.call("hello", session=one.session, token=one.token, member=True, epoch=0)
            epoch = first.call("hold", hold="a", kind="manual", wait=True)["epoch"]
            broker.kill()
        assert broker.start()["ok"]
        with broker.client() as first:
            held = [{"id": "a", "kind": "manual"}]
            answer = first.call(
                "hello", session=one.session, token=one.token, member=True, epoch=epoch, holds=held
            )
            assert (answer["state"], answer["epoch"]) == ("active", epoch)
            wait_until(lambda: holds(broker, one) == {"a"}, "the end of the broker's patience")
            assert one.state() == "active"
        one.wait_state("idle")
    finally:
        one.close()
