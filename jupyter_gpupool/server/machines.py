# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The machines of the cluster as this server shows them, from the broker's answer. Pure.

The figures of another machine are from its last report, so the result also has the age of that
report. The result does not contain the limits of users and groups.
"""

from __future__ import annotations

from typing import Any, Mapping

from .views import View

#: Maps the state of a machine in the ledger to the state that users see. A machine that does not
#: report to the ledger may still run kernels, so it is "unreachable" until an admin declares it
#: dead.
STATES = {
    "present": "reachable",
    "silent": "unreachable",
    "unheard": "unreachable",
    "draining": "draining",
    "left": "left",
    "fenced": "gone",
    "gone": "gone",
}

_FIGURES = ("devices", "out", "capacity", "granted", "free", "waiting")


def alone() -> View:
    """Return the answer of a server whose broker is in no cluster."""
    return {"name": None, "connected": None, "age": None, "left_out": 0, "machines": []}


def shown(answer: Mapping[str, Any], user: str) -> View:
    """Return the machines: this machine first, then the others by name.

    If the ledger does not answer, return only this machine.
    """
    view, here = answer["view"], answer["name"]
    nodes = [] if view is None else view["nodes"]
    own = {"name": here, "state": None, "age": 0.0, "summary": answer["own"]}
    # The figures of this machine come from its broker, because the ledger's figures are older.
    state = next((node["state"] for node in nodes if node["name"] == here), None)
    rows = [{**own, "state": state}, *(node for node in nodes if node["name"] != here)]
    return {
        "name": here,
        "connected": view is not None,
        "age": answer["age"],
        "left_out": 0 if view is None else view["left_out"],
        "machines": [_machine(row, here, user) for row in rows],
    }


def _machine(node: Mapping[str, Any], here: str, user: str) -> View:
    summary = node["summary"] or {}
    gpus, sessions = summary.get("gpus"), summary.get("sessions")
    is_here, state = node["name"] == here, node["state"]
    return {
        "name": node["name"],
        "here": is_here,
        # This server reaches its own machine, even if the machine's reports do not reach the
        # ledger.
        "state": "reachable"
        if is_here and STATES.get(state, "unreachable") == "unreachable"
        else STATES.get(state, state),
        "age": node["age"],
        **{name: summary.get(name) for name in _FIGURES},
        "gpus": None if gpus is None else [{"name": name, "free": free} for name, free in gpus],
        "mine": None if sessions is None else sum(n for name, n in sessions if name == user),
    }
