# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""How a broker starts kernels. Hostile programs replace the program that becomes a kernel."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from jupyter_gpupool.broker import hosting
from jupyter_gpupool.broker.hosting import Account, Hosting
from jupyter_gpupool.broker.messages.remote import MOST_HERE, RemoteMessages
from jupyter_gpupool.cluster.identity import CheckedCredential, order_text
from jupyter_gpupool.protocol import MOST_LOOKED
from tests.broker.kit import wait_until

from .kit import is_alive

#: The program answers, and then stops itself with SIGSTOP. So it never ends.
STOPS = """
import os, signal
os.write(1, b'{"v":1,"type":"%s","code":"no-curve","log":"%d"}\\n' % os.getpid())
os.kill(os.getpid(), signal.SIGSTOP)
"""
#: The program ends without an answer, and its child keeps the output open.
LEAVES_A_CHILD = """
import os, sys, time
child = os.fork()
if child == 0:
    time.sleep(600)
open(PATH, 'w').write(str(child))
"""
SILENT = "import time; time.sleep(600)"
BECOMES = 'import os; os.write(1, b\'{"v":1,"type":"ok"}\\n\'); import time; time.sleep(600)'
ENDS = 'import os; os.write(1, b\'{"v":1,"type":"ok"}\\n\')'


def a_session(kernel, owner="ada"):
    return {"id": f"s-{kernel}", "kernel_id": kernel, "owner": owner, "devices": [f"G-{kernel}"]}


#: Maps a user id to the pool's status that this user sees. User 1234 is ada, an admin.
STATUS = {
    1234: {
        "now": 5.0,
        "user": "ada",
        "sessions": [
            a_session("k"), a_session("of-another-server"), a_session("k2", owner="bob"),
            {"id": "s", "owner": "other", "devices": ["G-k2"]},
        ],
        "devices": [
            {"uuid": f"G-{name}", "index": 0, "name": "a GPU", "emulated": False, "more": 1}
            for name in ("k", "k2")
        ],
    }
}  # fmt: skip


class Anyone:
    """Accepts every credential. In these tests, a credential is only the text of its order."""

    def check(self, credential):
        return CheckedCredential(1234, credential)


@pytest.fixture
def broker(monkeypatch):
    """The part of a broker that carries out orders. Its programs run as this process's user."""
    monkeypatch.setattr(hosting, "switch_to", lambda account: ([], {}))
    monkeypatch.setattr(
        Hosting, "_account", lambda self, uid: Account(uid, uid, (), {"PATH": os.environ["PATH"]})
    )
    settings = SimpleNamespace(cluster_address="127.0.0.1")
    configuration = SimpleNamespace(socket=Path("/nowhere"), settings=settings)
    return Hosting(
        SimpleNamespace(sessions=()), configuration, "m1", Anyone(), lambda peer: STATUS[peer.uid]
    )


@pytest.fixture
def runs(monkeypatch):
    def set_program(text):
        monkeypatch.setattr(hosting, "PROGRAM", (sys.executable, "-I", "-S", "-c", text))

    return set_program


def order(do, kernel_id="k", **more):
    return order_text("m1", {"do": do, "kernel_id": kernel_id, **more})


async def perform(broker, *orders):
    return await asyncio.wait_for(asyncio.gather(*map(broker.perform, orders)), 60)


def test_a_program_that_hangs_after_its_answer_is_killed(broker, runs):
    for kind in ("ok", "error"):
        runs(STOPS.replace("%s", kind))
        (answer,) = asyncio.run(perform(broker, order("log")))
        assert answer["type"] == kind
        if kind == "ok":
            assert not is_alive(int(answer["log"]))


def test_a_child_that_keeps_the_output_open_delays_no_answer(broker, runs, monkeypatch, tmp_path):
    monkeypatch.setattr(hosting, "PATIENCE", 5.0)
    runs(LEAVES_A_CHILD.replace("PATH", repr(str(tmp_path / "child"))))
    (answer,) = asyncio.run(perform(broker, order("start")))
    assert answer["code"] == "start-failed"
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not is_alive(child), "the end of the child")


def test_orders_to_silent_programs_count_for_the_users_limit(broker, runs, monkeypatch):
    monkeypatch.setattr(hosting, "PATIENCE", 1.0)
    runs(SILENT)
    orders = [order("log", str(number)) for number in range(hosting.MOST_OF_USER + 1)]
    *answers, last = asyncio.run(perform(broker, *orders))
    assert {answer["code"] for answer in answers} == {"start-failed"}
    assert "did not answer on m1 in 1 s" in answers[0]["message"]
    assert last["code"] == "too-many"


def test_a_broker_can_end_while_a_program_is_silent(broker, runs, monkeypatch):
    runs(SILENT)
    began, goes_on = threading.Event(), threading.Event()

    def hang(link, line, deadline):
        began.set()
        assert goes_on.wait(60)
        return b""

    monkeypatch.setattr(hosting, "talk", hang)

    async def run():
        task = asyncio.ensure_future(broker.perform(order("log")))
        while not began.is_set():
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(run())  # this returns although the thread still runs
    threads = [thread for thread in threading.enumerate() if thread.name == "nss"]
    assert threads
    goes_on.set()
    for thread in threads:
        thread.join(60)


def test_a_starting_kernel_counts_as_running_and_can_be_ended(broker, runs, tmp_path):
    gate = tmp_path / "gate"  # the program waits for this file before it becomes the kernel
    runs(f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n{BECOMES}")

    async def run():
        start = asyncio.ensure_future(broker.perform(order("start")))
        while not broker._starting:
            await asyncio.sleep(0)
        rest = await perform(
            broker, order("poll"), order("signal", signal=2), order("signal", signal=9),
            order("start"),
        )  # fmt: skip
        gate.touch()
        found = [await start, *rest]
        return found, await perform(broker, order("poll"))

    (started, poll, interrupted, killed, again), (last,) = asyncio.run(run())
    assert (started["code"], again["code"]) == ("cancelled", "duplicate")
    assert interrupted["code"] == "again"
    assert poll["running"] is killed["running"] is True
    assert last == {"type": "ok", "running": False, "code": None}


def test_an_ended_kernel_does_not_stay_as_a_zombie(broker, runs):
    runs(ENDS)

    async def run():
        (answer,) = await perform(broker, order("start"))
        while Path(f"/proc/{answer['pid']}").exists():
            await asyncio.sleep(0.01)
        return await perform(broker, order("poll"))

    assert asyncio.run(run())[0]["code"] == 0


def test_a_server_sees_only_named_kernels_of_its_own_user(broker):
    (answer,) = asyncio.run(perform(broker, order("look", kernels=["k", "k2", 7])))
    assert answer == {
        "type": "ok", "now": 5.0, "sessions": [a_session("k")],
        "gpus": [{"uuid": "G-k", "index": 0, "name": "a GPU", "emulated": False}],
    }  # fmt: skip


def test_other_requests_of_a_server_are_refused(broker):
    answers = asyncio.run(perform(
        broker, order("look"), order("look", kernels=["k"] * (MOST_LOOKED + 1)),
        order("tell", request="shutdown", session="s", fields={}), order("tell"),
        order("tell", request=["release"]),
    ))  # fmt: skip
    assert [answer["code"] for answer in answers] == ["bad-request"] * 5


def test_malformed_orders_get_an_error_as_answer(broker):
    deep = "[" * 100_000
    orders = deep, '{"x":' + deep, order("signal", signal=[]), order("signal", signal=1 << 70)
    answers = asyncio.run(perform(broker, *orders))
    assert [answer["type"] for answer in answers] == ["error"] * len(orders)


@pytest.mark.parametrize(
    ("uid", "words"),
    [
        (0, "starts no kernel for user id 0"),
        (999, "starts no kernel for user id 999, because ids below 1000 belong to services"),
    ],
)
def test_accounts_of_system_services_get_no_kernel(uid, words, monkeypatch):
    """A JupyterHub user may have the same name as a service's account, for example backup."""
    monkeypatch.setattr(hosting.os, "geteuid", lambda: 0)
    configuration = SimpleNamespace(settings=SimpleNamespace(cluster_min_uid=1000))
    with pytest.raises(hosting.RefusedError, match=words) as error:
        Hosting(None, configuration, "m1", None, dict)._account(uid)
    assert error.value.code == "not-allowed"


def test_the_refusal_names_the_rights_that_the_service_lacks(monkeypatch, tmp_path):
    monkeypatch.setattr(hosting.os, "geteuid", lambda: 0)
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nCapEff:\t00000000000000c0\n")
    hosting.check_rights("m1", status)
    # The unit that install-service writes gives the broker only these capabilities.
    status.write_text("Name:\tpython\nCapEff:\t000000000008002b\n")
    with pytest.raises(
        hosting.RefusedError, match="give the broker CAP_SETGID and CAP_SETUID"
    ) as error:
        hosting.check_rights("m1", status)
    assert error.value.code == "not-there"


# ---------------------------------------------------------------------- the broker of the user


class Peer:
    """A user's connection."""

    def __init__(self, uid):
        self.peer = SimpleNamespace(uid=uid)
        self.answers, self.refusals = [], []

    def answer(self, request, fields=None):
        self.answers.append(fields)

    def refuse(self, request, error):
        self.refusals.append(error.code)


def messages(hosting=None):
    settings = SimpleNamespace(cluster_nodes=("m0", "m1"))
    return RemoteMessages(
        None, SimpleNamespace(settings=settings), hosting or SimpleNamespace(close=list), "m0",
        look=None, check_agent=lambda connection: None,
    )  # fmt: skip


def refused(messages, peer, node):
    try:
        messages.order(peer, {"id": 1, "node": node, "credential": "c"})
    except hosting.RefusedError as error:
        return error.code


def test_orders_of_closed_connections_still_count_for_their_user():
    async def run():
        found = messages()
        agent = Peer(0)
        codes = []
        for _ in range(70):
            found.orders(agent, {"wait": 1})
            peer = Peer(7)
            codes.append(refused(found, peer, "m1"))
            found.gone(peer)
        other = refused(found, Peer(8), "m1")
        found.close()
        return codes, other

    codes, other = asyncio.run(run())
    assert codes == [None] * 64 + ["too-many"] * 6
    assert other is None


def test_a_user_with_too_many_orders_in_progress_is_refused():
    class Slow:
        def close(self):
            pass

        async def perform(self, credential):
            await asyncio.sleep(0)
            return {"type": "ok"}

    async def run():
        found = messages(Slow())
        peer = Peer(7)
        codes = [refused(found, peer, "m0") for _ in range(MOST_HERE + 1)]
        while len(peer.answers) < MOST_HERE:
            await asyncio.sleep(0)
        codes.append(refused(found, peer, "m0"))
        found.close()
        return codes

    assert asyncio.run(run()) == [None] * MOST_HERE + ["too-many", None]


def test_many_long_orders_reach_the_agent_in_several_answers():
    async def run():
        found = messages()
        agent = Peer(0)
        found.orders(agent, {"wait": 60})
        found.order(Peer(1), {"id": 1, "node": "m1", "credential": "c"})
        for uid in range(50):
            found.order(Peer(uid), {"id": 1, "node": "m1", "credential": "c" * (1 << 16)})
        while sum(len(answer["orders"]) for answer in agent.answers) < 51:
            found.orders(agent, {"wait": 60})
        found.close()
        return [len(answer["orders"]) for answer in agent.answers]

    assert asyncio.run(run()) == [1, 16, 16, 16, 2]
