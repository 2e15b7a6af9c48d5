# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter gpupool node`` and ``cluster``, without Ray."""

from __future__ import annotations

import stat

import pytest

from jupyter_gpupool.cli import main
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


def test_fence_needs_the_name_of_a_machine(monkeypatch, capsys):
    monkeypatch.setattr(node, "check_ray", lambda: None)
    for words in (["fence"], ["status", "m1"]):
        assert main(["cluster", *words, "--address", "x"]) == 1
        assert "fence needs the name of a machine" in capsys.readouterr().err


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
