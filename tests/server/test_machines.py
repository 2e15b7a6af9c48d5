# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The machines of a cluster over REST, made from the answers of a broker."""

from __future__ import annotations

import asyncio
import logging
from typing import get_args

import pytest
from jsonschema import Draft202012Validator

from jupyter_gpupool.cluster.ledger_nodes import NodeState
from jupyter_gpupool.cluster.messages import Summary
from jupyter_gpupool.server import machines, openapi
from jupyter_gpupool.server.watch import Watch

SUMMARY = Summary(
    2, 1, 30, 4, 11, 3, gpus=(("A100", 11),), sessions=(("ann", 1), ("me", 2))
)._asdict()  # fmt: skip


def node(name, state, **fields):
    return {"name": name, "state": state, "age": 42.0, "summary": SUMMARY, "counted": [], **fields}


def answer(*nodes, **fields):
    view = {"serving": True, "left_out": 0, "nodes": [*nodes]}
    return {"name": "gpu2", "own": {**SUMMARY, "free": 7}, "age": 1.0, "view": view, **fields}


def shown(found):
    """Return the machines that the server shows; fail if they do not match the server's schema."""
    document = openapi.document("/")
    schema = {"$ref": "#/components/schemas/Machines", "components": document["components"]}
    result = machines.shown(found, "me")
    Draft202012Validator(schema).validate(result)
    return result


def test_each_machine_shows_its_gpus_its_queue_and_my_sessions():
    found = shown(answer(node("gpu1", "silent"), node("gpu2", "present")))
    assert [one["name"] for one in found["machines"]] == ["gpu2", "gpu1"], "this one first"
    here, other = found["machines"]
    assert (here["here"], here["free"], here["age"]) == (True, 7, 0.0), "as it is now"
    assert other == {
        "name": "gpu1", "here": False, "state": "unreachable", "age": 42.0, "devices": 2,
        "out": 1, "capacity": 30, "granted": 4, "free": 11, "waiting": 3,
        "gpus": [{"name": "A100", "free": 11}], "mine": 2,
    }  # fmt: skip


@pytest.mark.parametrize("state", get_args(NodeState))
def test_rest_api_has_a_state_for_every_ledger_state(state):
    here, other = shown(answer(node("gpu1", state), node("gpu2", state)))["machines"]
    assert other["state"] == machines.STATES[state]
    assert here["state"] != "unreachable", "this server talks to its broker"


def test_unknown_figures_are_null():
    brief = {**SUMMARY, "gpus": None, "sessions": None, "data": None}
    nothing, some = shown(
        answer(node("gpu1", "unheard", summary=None), node("gpu3", "present", summary=brief))
    )["machines"][1:]
    assert {nothing[name] for name in ("devices", "free", "waiting", "gpus", "mine")} == {None}
    assert (some["free"], some["gpus"], some["mine"]) == (11, None, None)


def test_server_shows_only_this_machine_without_the_ledger():
    found = shown(answer(view=None))
    assert found["connected"] is False
    assert [one["name"] for one in found["machines"]] == ["gpu2"]


class Link:
    """A broker that counts the requests."""

    def __init__(self, *, clustered, state=""):
        self.clustered, self.state, self.asked = clustered, state, []

    async def call(self, kind, **_):
        self.asked.append(kind)
        if kind == "cluster":
            return answer(node("gpu2", "present"))
        if kind == "why":
            return {"id": 1, "lines": ["x"], "state": self.state, "clustered": self.clustered}
        if kind == "elsewhere":
            return {"id": 2, "machines": ["gpu2: yes."], "considered": [["gpu2", "yes"]]}
        status = {"now": 1.0, "devices": [], "sessions": [], "host": {}, "settings": {}}
        return {**status, "clustered": self.clustered}

    async def close(self):
        pass


def watch_of(link):
    return Watch(
        link, list, "me", lambda *_: None, lambda _: None, interval=9.0, idle_warning=1.0,
        slow_resume=1.0, log=logging.getLogger("test"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("clustered", "state", "told"),
    [(True, "queued", ["gpu2: yes."]), (True, "active", None), (False, "queued", None)],
)
def test_why_shows_other_machines_only_for_a_waiting_kernel(clustered, state, told):
    async def ask():
        return await watch_of(Link(clustered=clustered, state=state)).why("s")

    found = asyncio.run(ask())
    assert found.get("machines") == told
    assert "id" not in found


@pytest.mark.parametrize("clustered", [False, True])
def test_server_asks_for_other_machines_only_in_a_cluster(clustered):
    link = Link(clustered=clustered)

    async def ask():
        return await watch_of(link).machines()

    found = asyncio.run(ask())
    assert link.asked == ["status", "cluster"] if clustered else ["status"]
    assert len(found["machines"]) == clustered
    assert (found["connected"] is None) == (not clustered)
