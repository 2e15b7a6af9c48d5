# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter gpupool node`` and ``cluster``, without Ray."""

from __future__ import annotations

import contextlib
import socket
import stat
import sys

import pytest

from jupyter_gpupool.cli import leaving, main
from jupyter_gpupool.cli.cluster_commands import picture
from jupyter_gpupool.cluster import ledger_calls, node
from jupyter_gpupool.cluster.ledger_calls import LedgerCalls
from jupyter_gpupool.errors import Code, RefusedError


@pytest.fixture
def no_ray(monkeypatch):
    monkeypatch.setattr(node.importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["node"], "This machine must either begin a cluster or join one. Use --head"),
        (["node", "--head"], "has no Ray, which carries the messages of a cluster. Install it"),
        (["cluster", "status", "--address", "x"], "This environment has no Ray"),
    ],
)
def test_a_machine_that_cannot_join_says_why(no_ray, words, message, capsys):
    assert main(words) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fence", "--address", "x"], "cluster fence needs the name of a machine"),
        (["drain", "--address", "x"], "cluster drain needs the name of a machine"),
        (["status", "m1", "--address", "x"], "cluster status does not take the name of a machine"),
        (["leave", "m1"], "cluster leave does not take the name of a machine"),
        (["status"], "Add --address with the address"),
    ],
)
def test_an_incomplete_or_wrong_order_is_explained(monkeypatch, words, message, capsys):
    monkeypatch.setattr(node, "check_ray", lambda: None)
    assert main(["cluster", *words]) == 1
    assert message in capsys.readouterr().err


class Orders:
    """A cluster with one machine, m1. Each look at the cluster shows the next state of m1."""

    def __init__(self, *states):
        self.states, self.given = [*states], 0

    def look(self):
        state = self.states.pop(0)
        if isinstance(state, BaseException):
            raise state
        counted = [["user", "ada", "leases", "", 2]] if state == "draining" else []
        return {"nodes": [{"name": "m1", "state": state, "counted": counted}]}

    def order(self):
        self.given += 1

    def carry_out(self, monkeypatch, do, goal, machine="m1"):
        monkeypatch.setattr(leaving, "LOOK", 0.0)
        return leaving.carry_out(do, machine, goal, look=self.look, order=self.order)


def test_drain_waits_until_the_machine_has_left(monkeypatch, capsys):
    # After the third look, the ledger restarts and does not know the order. The command repeats it.
    orders = Orders("present", "draining", "draining", "present", "draining", "left")
    assert orders.carry_out(monkeypatch, "drain", "left") == 0
    assert orders.given == 2
    out = capsys.readouterr().out
    assert out.count("user ada may use 2 leases") == 2
    assert "no kernel has a slice there" in out


def test_resume_waits_until_the_machine_is_present(monkeypatch, capsys):
    orders = Orders("left", "left", "present")
    assert orders.carry_out(monkeypatch, "resume", "present") == 0
    assert "m1 is back in the cluster." in capsys.readouterr().out


def test_an_interrupted_drain_says_that_the_order_stays_in_force(monkeypatch, capsys):
    orders = Orders("present", KeyboardInterrupt())
    assert orders.carry_out(monkeypatch, "drain", "left") == 130
    assert "The order stays in force." in capsys.readouterr().err


def test_an_order_for_an_unknown_machine_names_known_machines(monkeypatch):
    with pytest.raises(RefusedError, match=r"No machine of this cluster is called m9\. It has: m1"):
        Orders("present").carry_out(monkeypatch, "drain", "left", "m9")


class Ledger:
    """A stand-in for the process that calls the ledger of a cluster with one machine, m1."""

    def __init__(self, _address):
        self.asked = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        LEDGERS.append(self)

    def call(self, _what, *asked):
        self.asked.append(asked)
        nodes = [{"name": "m1", "life": 0, "state": "fenced", "age": 9.0, "counted": []}]
        return {"serving": True, "nodes": nodes}


LEDGERS = []


@pytest.mark.parametrize(
    ("machine", "code", "said", "asked"),
    [
        ("m9", 1, "No machine of this cluster is called m9. It has: m1.", [("view",)]),
        ("m1", 0, "m1: fenced", [("view",), ("fence", "m1"), ("view",)]),
    ],
)
def test_fence_refuses_a_name_that_no_machine_has(
    tmp_path, monkeypatch, capsys, machine, code, said, asked
):
    monkeypatch.setattr(node, "check_ray", lambda: None)
    monkeypatch.setattr(ledger_calls, "LedgerCalls", Ledger)
    token = tmp_path / "token"
    token.write_text("x")
    words = ["cluster", "fence", machine, "--address", "a:1", "--token", str(token)]
    assert main(words) == code
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
    assert LEDGERS.pop().asked == asked


def test_only_the_head_creates_the_token(tmp_path):
    token = tmp_path / "new" / "token"
    with pytest.raises(RefusedError, match="There is no file"):
        node.token_environment(token, create=False)
    found = node.token_environment(token, create=True)
    assert found == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    text = token.read_text()
    node.token_environment(token, create=True)
    assert token.read_text() == text


#: A stand-in for the process that calls Ray. It can answer, hang, end without an answer, or fail.
CALLS = """
import json, sys, time
for line in sys.stdin:
    method, *arguments = json.loads(line)
    if method == "sleep":
        time.sleep(600)
    if method == "end":
        break
    found = {"error": "no room"} if method == "fail" else {"answer": [method, *arguments]}
    print(json.dumps(found), flush=True)
"""


@pytest.fixture
def head():
    """Return the address of a head that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def calls(head):
    with LedgerCalls(head, program=(sys.executable, "-c", CALLS)) as found:
        yield found


def test_one_process_makes_all_calls_of_a_command(calls):
    assert calls.call("for it", "drain", "m1", True) == ["drain", "m1", True]
    child = calls._child
    assert calls.call("for it", "view") == ["view"]
    assert calls._child is child


@pytest.mark.parametrize(
    ("method", "how"),
    [
        ("sleep", "did not answer within 0.1 s."),
        ("end", "did not answer: its call ended without an answer."),
        ("fail", "did not answer: no room."),
    ],
)
def test_a_ledger_without_an_answer_is_an_error(monkeypatch, head, calls, method, how):
    if method == "sleep":
        monkeypatch.setattr(ledger_calls, "ANSWER", 0.1)
    calls.call("for it", "view")
    child = calls._child
    with pytest.raises(RefusedError) as caught:
        calls.call("to drain m1", method)
    assert caught.value.message == (
        f"The cluster's head at {head} {how} The request was to drain m1."
    )
    assert caught.value.code == Code.NO_HEAD
    assert child.returncode is not None  # the process has ended
    assert calls.call("for it", "view") == ["view"]


def test_a_command_says_that_the_head_cannot_be_reached(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(node, "check_ray", lambda: None)
    token = tmp_path / "token"
    token.write_text("x")
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))  # nothing listens on this port
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for words in (["status"], ["drain", "m1"], ["fence", "m1"]):
            where = ["--address", address, "--token", str(token)]
            assert main(["cluster", *words, *where]) == 1
            error = capsys.readouterr().err
            assert (
                f"The cluster's head at {address} cannot be reached: Connection refused." in error
            )


def test_an_address_without_a_port_is_refused(calls):
    for address in ("gpu1", "gpu1:", ":6379", "gpu1:x"):
        with pytest.raises(RefusedError, match="is not the address of a cluster's head"):
            LedgerCalls(address).call("for it", "view")


def test_the_picture_names_each_machine_and_what_it_may_use():
    found = {
        "serving": False,
        "nodes": [
            {"name": "m0", "life": 4, "state": "present", "age": 1.0,
             "counted": [["user", "ada", "memory", "", 4 << 30], ["user", "ada", "leases", "", 2]]},
            {"name": "m1", "life": 0, "state": "unheard", "age": 9.0, "counted": []},
        ],
    }  # fmt: skip
    assert picture(found).splitlines() == [
        "The ledger lends nothing until all machines have reported.",
        "m0: present, last report 1 s ago",
        "  user ada may use 4 GiB, 2 leases",
        "m1: unheard",
    ]
