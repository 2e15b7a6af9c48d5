# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What people see of all machines, in the ledger's view and in ``status --cluster``."""

from __future__ import annotations

import asyncio
import json
import re
from types import SimpleNamespace
from typing import get_args

import pytest

from jupyter_gpupool.broker.cluster_views import of_user, visible
from jupyter_gpupool.cli import main
from jupyter_gpupool.cli.cluster_status import lines
from jupyter_gpupool.cluster import desk
from jupyter_gpupool.cluster.considering import considered, elsewhere, models, sentences
from jupyter_gpupool.cluster.ledger_nodes import NodeState
from jupyter_gpupool.cluster.mail import letter_in
from jupyter_gpupool.cluster.messages import (
    Epoch,
    Holding,
    Key,
    Report,
    Summary,
    report_from_json,
    report_to_json,
)
from jupyter_gpupool.cluster.placing import PlacementRequest

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


def test_a_report_still_has_its_summary_after_encoding():
    one = report("m0", summary=SUMMARY, looks=True)
    assert report_from_json(json.loads(text_of(one))) == one
    values = {**report_to_json(one), "summary": [2, 1, 30, 4, 11, 3]}  # from another version
    assert report_from_json(values).summary is None


def views(*texts):
    """Give the reports to a ledger of m0 and m1; return each view that it posts, with the node."""
    posted = []

    async def run():
        limits = {"user": {"*": {"leases": 2}}, "group": {}}
        found = desk.Desk(limits, ["m0", "m1"], lambda node, text: posted.append((node, text)))
        for text in texts:
            found.report(text)

    asyncio.run(run())
    return [(node, json.loads(text)["view"]) for node, text in posted if '"view"' in text]


def test_only_a_node_that_asks_for_the_view_gets_it():
    (first,) = views(text_of(report("m0", summary=SUMMARY)), text_of(report("m1", looks=True)))
    node, view = first
    assert node == "m1"
    summary = json.loads(json.dumps(SUMMARY._asdict()))
    assert [each["summary"] for each in view["nodes"]] == [summary, None]
    assert view["left_out"] == 0


def test_an_order_for_a_silent_node_is_answered_at_once(monkeypatch):
    now, posted = [100.0], []
    monkeypatch.setattr(desk, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def run():
        limits = {"user": {"*": {"leases": 2}}, "group": {}}
        found = desk.Desk(limits, ["m0", "m1"], lambda *letter: posted.append(letter), ttl=8.0)
        found.report(text_of(report("m0")))
        posted.clear()
        order = json.dumps({"letter": {"name": "o1", "from": "m0", "credential": "c"}})
        found.pass_on("m1", order)
        assert posted == [("m1", order)], "a ledger that has just started knows nothing yet"
        now[0] += 20
        found.report(text_of(report("m0", 2)))
        posted.clear()
        found.pass_on("m1", order)
        found.pass_on("m1", '{"letter":{"name":"o2","result":"{}"}}')
        found.pass_on("m0", order)

    asyncio.run(run())
    (back, *others) = posted
    assert others == [("m1", '{"letter":{"name":"o2","result":"{}"}}'),
                      ("m0", others[1][1])]  # fmt: skip
    assert back[0] == "m0"
    letter = letter_in(back[1])
    assert letter["name"] == "o1"
    error = json.loads(letter["result"])
    assert error["code"] == "unreachable"
    assert error["message"] == "m1 does not answer: its agent last reported 20 s ago."


def test_a_shortened_view_says_how_many_machines_it_lacks():
    nodes = [{"name": f"m{i}", "counted": [["user", "x" * 50, "leases", "", 1]] * 4}
             for i in range(1000)]  # fmt: skip
    text = desk.view_text({"serving": True, "nodes": nodes})
    assert len(text) <= desk.MOST_TEXT
    view = json.loads(text)["view"]
    assert 0 < len(view["nodes"]) == 1000 - view["left_out"] < 1000


def test_a_too_long_view_loses_gpu_details_but_no_machine():
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


def test_the_table_shows_the_age_of_a_silent_machines_figures():
    assert lines(found()) == [
        "MACHINE  STATE            GPUS                  MODEL        GRANTED  FREE    WAITING",
        "gpu1     present          2 (1 out of service)  NVIDIA A100  4 GiB    11 GiB  3",
        "gpu2     silent for 42 s  2                     NVIDIA A100  4 GiB    11 GiB  3",
        "gpu3     unheard          -                     -            -        -       -",
        "The ledger lends nothing until all machines have reported.",
        "gpu2: its figures are 42 s old.",
        "gpu1: user ada may use 1 lease",
        "gpu1: user ann may use 4 GiB",
        "gpu2: user ada may use 2 leases",
    ]


def test_without_a_view_only_this_machine_is_shown():
    told = lines(found(view=None))
    assert told[0] == (
        "The ledger of the cluster does not answer gpu1. Its last answer came 12 s ago."
    )
    assert told[-1].startswith("gpu1     here   2 (1 out of service)")
    assert lines(found(view=None, age=None))[0].endswith("does not answer gpu1.")


def test_why_names_what_the_user_may_use_on_other_machines():
    view = found()["view"]
    told = elsewhere(view, "gpu1", "ada", "")
    assert told == ["On gpu2 (last report 42 s ago) user ada may use 2 leases."]
    assert elsewhere(view, "gpu1", "ann", "") == []
    assert "is unknown" in elsewhere(None, "gpu1", "ada", "")[0]


def test_a_user_sees_no_limits_or_sessions_of_other_users():
    view = visible(found()["view"], "ann", {("user", "ann")})
    assert [node["counted"] for node in view["nodes"]] == [[[*ANN, 4 * GIB]], [], []]
    assert "ada" not in json.dumps(view)
    assert view["nodes"][1]["summary"]["sessions"] == [("ann", 1)]
    assert visible(view, "ann", None) is view
    assert visible(None, "ann", set()) is None
    assert of_user({"sessions": None}, "ann") == {"sessions": None}, "unknown stays unknown"


def of(memory, devices=1, **wanted):
    return PlacementRequest("ada", memory * GIB, devices, **wanted)


def told(memory, devices=1, *, wanted=None, **changes):
    """Return what ``why`` tells about another machine, gpu2, with these changes."""
    summary = {**SUMMARY._asdict(), "waiting": 0, "gpus": [["A", 8 * GIB], ["B", 3 * GIB]]}
    node = {"name": "gpu2", "state": "present", "age": 0.4, "summary": summary, "counted": []}
    node.update(changes)
    node["summary"] = node["summary"] and {**summary, **node["summary"]}
    here = found()["view"]["nodes"][0]
    view = {"nodes": [here, node]}
    (text,) = considered(view, "gpu1", of(memory, devices, **(wanted or {}))).values()
    return text


def test_why_says_whether_each_other_machine_has_room():
    assert told(8) == "yes, it has room (1x A, 1x B) and nobody waits"
    assert told(8, summary={"waiting": 1}) == "it has room (1x A, 1x B), but 1 kernel waits there"
    assert told(8, summary={"waiting": 3}) == "it has room (1x A, 1x B), but 3 kernels wait there"
    assert told(9) == "no, at most 8 GiB is free on a GPU (1x A, 1x B)"
    assert told(3, 2) == "yes, it has room (1x A, 1x B) and nobody waits"
    assert told(4, 2) == "no, at most 3 GiB is free on each of 2 GPUs (1x A, 1x B)"
    assert told(1, 3) == (
        "no, the kernel needs 3 GPUs, and the machine has 2 GPUs in service (1x A, 1x B)"
    )
    assert told(1, summary={"gpus": []}) == "no, it has no GPU in service"
    assert told(1, summary={"gpus": None}).startswith("unknown, ")
    assert told(1, summary=None).startswith("unknown, ")
    assert told(1, state="silent", age=42) == "unknown, it has not reported for 42 s"
    for state in set(get_args(NodeState)) - {"present", "silent"}:
        assert re.match("(no|unknown), ", told(1, state=state)), state
    assert considered(None, "gpu1", of(1)) == {}


def test_why_says_which_model_a_machine_lacks():
    only_a, b = {"gpus": [["A", 8 * GIB]]}, {"model": "b"}
    assert told(1, wanted=b) == "no, its pool may choose a GPU of another model (A)"
    assert told(1, wanted=b, summary=only_a) == (
        "no, the kernel needs the model b, and the machine has only A"
    )
    assert told(1, wanted={"model": "a"}, summary=only_a) == "yes, it has room (A) and nobody waits"
    assert models([["B", 1], ["A", 2], ["B", 3]]) == "1x A, 2x B"


def test_why_says_whether_the_data_is_on_a_machine():
    folders = {"data": ("/scratch/a", "/home/ada")}
    assert told(1, wanted=folders).endswith("nobody waits; /scratch/a is on a disk there")
    assert told(9, wanted={"data": ("/scratch", "/scratch/b")}).endswith(
        "; /scratch, /scratch/b are on a disk there"
    )
    many = {"data": tuple(f"/scratch/{i}" for i in range(5))}
    assert told(1, wanted=many).endswith("; /scratch/0, /scratch/1, /scratch/2 and 2 more are on "
                                         "a disk there")  # fmt: skip
    assert told(1, wanted={"data": ("/home",)}).endswith(
        "; none of the kernel's folders is on a disk there"
    )
    assert told(1, wanted=folders, summary={"data": []}).endswith("nobody waits")
    assert told(1, wanted=folders, summary={"data": None}).endswith("nobody waits")


def test_why_asks_a_question_and_lists_each_machines_answer():
    wanted = of(4, 2, model="A100")
    head, *rows = sentences("gpu1", wanted, {"gpu2": "yes", "gpu3": "no"})
    assert head == (
        "This kernel stays on gpu1. Could a new kernel that asks for 4 GiB on each of 2 GPUs of "
        "the model A100 start on another machine?"
    )
    assert rows == ["gpu2: yes.", "gpu3: no."]
    assert sentences("gpu1", wanted, {}) == []


@pytest.mark.parametrize("words", [["--watch"], ["--watch", "--json"]])
def test_status_of_a_cluster_refuses_the_option_watch(words, capsys):
    assert main(["status", "--cluster", *words]) == 1
    assert "status --cluster does not take --watch." in capsys.readouterr().err
