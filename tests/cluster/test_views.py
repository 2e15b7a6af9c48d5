# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What people see of all machines: the ledger's view, and ``status --cluster``."""

from __future__ import annotations

import asyncio
import json
import re
from typing import get_args

import pytest

from jupyter_gpupool.broker.cluster_views import of_user, visible
from jupyter_gpupool.cli import main
from jupyter_gpupool.cli.cluster_status import considered, elsewhere, lines
from jupyter_gpupool.cluster import desk
from jupyter_gpupool.cluster.ledger_nodes import NodeState
from jupyter_gpupool.cluster.messages import (
    Epoch,
    Holding,
    Key,
    Report,
    Summary,
    report_from_json,
    report_to_json,
)

GIB = 1 << 30
ADA = Key("user", "ada", "leases")
ANN = Key("user", "ann", "memory")

SUMMARY = Summary(
    2, 1, 30 * GIB, 4 * GIB, 11 * GIB, 3,
    gpus=(("NVIDIA A100", 11 * GIB),), sessions=(("ada", 2), ("ann", 1)),
    data=("/scratch",),
)  # fmt: skip


def report(node, number=1, **fields):
    return Report(node, 1, number, Epoch(), 0, {ADA: Holding(2, 1, 1)}, spent={}, **fields)


def text_of(one):
    return json.dumps(report_to_json(one))


def test_a_report_keeps_its_summary_on_the_way():
    one = report("m0", summary=SUMMARY, looks=True)
    assert report_from_json(json.loads(text_of(one))) == one
    values = {**report_to_json(one), "summary": [2, 1, 30, 4, 11, 3]}  # of another version
    assert report_from_json(values).summary is None


def views(*texts):
    """Return the views that a ledger of two machines posts after these reports."""
    posted = []

    async def run():
        limits = {"user": {"*": {"leases": 2}}, "group": {}}
        found = desk.Desk(limits, ["m0", "m1"], lambda node, text: posted.append((node, text)))
        for text in texts:
            found.report(text)

    asyncio.run(run())
    return [(node, json.loads(text)["view"]) for node, text in posted if '"view"' in text]


def test_only_a_node_that_looks_gets_the_view():
    (first,) = views(text_of(report("m0", summary=SUMMARY)), text_of(report("m1", looks=True)))
    node, view = first
    assert node == "m1"
    summary = json.loads(json.dumps(SUMMARY._asdict()))
    assert [each["summary"] for each in view["nodes"]] == [summary, None]
    assert view["left_out"] == 0


def test_a_view_of_too_many_machines_says_how_many_it_lacks():
    nodes = [{"name": f"m{i}", "counted": [["user", "x" * 50, "leases", "", 1]] * 4}
             for i in range(1000)]  # fmt: skip
    text = desk.view_text({"serving": True, "nodes": nodes})
    assert len(text) <= desk.MOST_TEXT
    view = json.loads(text)["view"]
    assert 0 < len(view["nodes"]) == 1000 - view["left_out"] < 1000


def test_a_long_view_first_loses_the_details_of_summaries():
    summary = {**SUMMARY._asdict(), "gpus": [["NVIDIA A100 80GB PCIe", GIB]] * 16}
    nodes = [{"name": f"m{i}", "counted": [], "summary": summary} for i in range(300)]
    view = json.loads(desk.view_text({"serving": True, "nodes": nodes}))["view"]
    assert (len(view["nodes"]), view["left_out"]) == (300, 0)
    assert {str(node["summary"]["gpus"]) for node in view["nodes"]} == {"None"}
    assert {node["summary"]["free"] for node in view["nodes"]} == {11 * GIB}
    few = json.loads(desk.view_text({"serving": True, "nodes": nodes[:2]}))["view"]
    assert len(few["nodes"][0]["summary"]["gpus"]) == 16


def found(**fields):
    nodes = [
        {"name": "gpu1", "state": "present", "age": 0.4, "summary": SUMMARY._asdict(),
         "counted": [[*ADA, 1], [*ANN, 4 * GIB]]},
        {"name": "gpu2", "state": "silent", "age": 42.0,
         "summary": SUMMARY._replace(out=0)._asdict(), "counted": [[*ADA, 2]]},
        {"name": "gpu3", "state": "unheard", "age": 60.0, "summary": None, "counted": []},
    ]  # fmt: skip
    view = {"serving": False, "left_out": 0, "nodes": nodes}
    return {"name": "gpu1", "own": SUMMARY._asdict(), "age": 12.0, "view": view, **fields}


def test_the_table_shows_how_old_the_figures_of_a_machine_are():
    assert lines(found()) == [
        "MACHINE  STATE            GPUS                  GRANTED  FREE    WAITING",
        "gpu1     present          2 (1 out of service)  4 GiB    11 GiB  3",
        "gpu2     silent for 42 s  2                     4 GiB    11 GiB  3",
        "gpu3     unheard          -                     -        -       -",
        "The ledger lends nothing before it has heard all machines.",
        "gpu2: its figures are 42 s old.",
        "gpu1: user ada may use 1 lease",
        "gpu1: user ann may use 4 GiB",
        "gpu2: user ada may use 2 leases",
    ]


def test_without_a_view_only_this_machine_is_shown():
    told = lines(found(view=None))
    assert told[0] == "The ledger of the cluster does not answer gpu1. It answered 12 s ago."
    assert told[-1].startswith("gpu1     here   2 (1 out of service)")
    assert lines(found(view=None, age=None))[0].endswith("does not answer gpu1.")


def test_why_names_what_other_machines_have_of_a_limit():
    told = elsewhere(found(), "ada", "")
    assert told == ["On gpu2 (last heard 42 s ago) user ada may use 2 leases."]
    assert elsewhere(found(), "ann", "") == []
    assert "is unknown" in elsewhere(found(view=None), "ada", "")[0]


def test_a_user_sees_no_limits_and_no_sessions_of_others():
    view = visible(found()["view"], "ann", {("user", "ann")})
    assert [node["counted"] for node in view["nodes"]] == [[[*ANN, 4 * GIB]], [], []]
    assert "ada" not in json.dumps(view)
    assert view["nodes"][1]["summary"]["sessions"] == [("ann", 1)]
    assert visible(view, "ann", None) is view
    assert visible(None, "ann", set()) is None
    assert of_user({"sessions": None}, "ann") == {"sessions": None}, "unknown stays unknown"


def test_why_says_of_each_other_machine_whether_it_has_room():
    def told(memory, devices=1, **changes):
        summary = {**SUMMARY._asdict(), "waiting": 0, "gpus": [["A", 8 * GIB], ["B", 3 * GIB]]}
        node = {"name": "gpu2", "state": "present", "age": 0.4, "summary": summary, "counted": []}
        node.update(changes)
        node["summary"] = node["summary"] and {**summary, **node["summary"]}
        here = found()["view"]["nodes"][0]
        return considered(found(view={"nodes": [here, node]}), memory * GIB, devices)[-1]

    head, *_ = considered(found(), 4 * GIB, 2)
    assert head == (
        "It stays on gpu1. Could a new kernel of 4 GiB on each of 2 GPUs start on another machine?"
    )
    assert told(8) == "gpu2: yes, it has room and nobody waits."
    assert told(8, summary={"waiting": 1}) == "gpu2: it has room, but 1 kernel waits there."
    assert told(8, summary={"waiting": 3}) == "gpu2: it has room, but 3 kernels wait there."
    assert told(9) == "gpu2: no, at most 8 GiB is free on a GPU."
    assert told(3, 2) == "gpu2: yes, it has room and nobody waits."
    assert told(4, 2) == "gpu2: no, at most 3 GiB is free on each of 2 GPUs."
    assert told(1, 3) == "gpu2: no, 2 of the 3 GPUs that it asks for are in service."
    assert told(1, summary={"gpus": []}) == "gpu2: no, it has no GPU in service."
    assert told(1, summary={"gpus": None}).startswith("gpu2: unknown, ")
    assert told(1, summary=None).startswith("gpu2: unknown, ")
    assert told(1, state="silent", age=42) == "gpu2: unknown, it has been silent for 42 s."
    for state in set(get_args(NodeState)) - {"present", "silent"}:
        assert re.match("gpu2: (no|unknown), ", told(1, state=state)), state
    assert considered(found(view=None), GIB, 1) == []


@pytest.mark.parametrize("words", [["--watch"], ["--watch", "--json"]])
def test_status_of_a_cluster_draws_once(words, capsys):
    assert main(["status", "--cluster", *words]) == 1
    assert "status --cluster draws once." in capsys.readouterr().err
