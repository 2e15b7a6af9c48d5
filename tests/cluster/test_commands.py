# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter gpupool node`` and ``cluster``, without Ray."""

from __future__ import annotations

import stat

import pytest

from jupyter_gpupool.cli import leaving, main
from jupyter_gpupool.cli.cluster_commands import picture
from jupyter_gpupool.cluster import node
from jupyter_gpupool.errors import RefusedError


@pytest.fixture
def no_ray(monkeypatch):
    monkeypatch.setattr(node.importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["node"], "A machine begins a cluster or joins one. Give --head, or --join"),
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
        (["fence", "--address", "x"], "fence needs the name of a machine"),
        (["drain", "--address", "x"], "drain needs the name of a machine"),
        (["status", "m1", "--address", "x"], "status takes no name of a machine"),
        (["leave", "m1"], "leave takes no name of a machine"),
        (["status"], "Give it with --address"),
    ],
)
def test_an_order_that_lacks_something_says_what(monkeypatch, words, message, capsys):
    monkeypatch.setattr(node, "check_ray", lambda: None)
    assert main(["cluster", *words]) == 1
    assert message in capsys.readouterr().err


class Orders:
    """A cluster that shows these states of m1, one after the other."""

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
    # A ledger that began anew has forgotten the order.
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


def test_an_interrupted_drain_says_that_it_goes_on(monkeypatch, capsys):
    orders = Orders("present", KeyboardInterrupt())
    assert orders.carry_out(monkeypatch, "drain", "left") == 130
    assert "The order stays in force." in capsys.readouterr().err


def test_an_order_for_an_unknown_machine_names_the_others(monkeypatch):
    with pytest.raises(RefusedError, match="No machine of this cluster is called m9; it has: m1"):
        Orders("present").carry_out(monkeypatch, "drain", "left", "m9")


def test_only_the_head_makes_the_token(tmp_path):
    token = tmp_path / "new" / "token"
    with pytest.raises(RefusedError, match="There is no file"):
        node.token_environment(token, create=False)
    found = node.token_environment(token, create=True)
    assert found == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    text = token.read_text()
    node.token_environment(token, create=True)
    assert token.read_text() == text


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
        "The ledger lends nothing before it has heard all of them.",
        "m0: present, last heard 1 s ago",
        "  user ada may use 4 GiB, 2 leases",
        "m1: unheard",
    ]
