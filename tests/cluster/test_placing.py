# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The choice of the machine on which a kernel starts, and the kernel's rights on that machine."""

from __future__ import annotations

import os
import pwd
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_gpupool.broker.hosting import Account, switch_to
from jupyter_gpupool.cluster.placing import PlacementRequest, has_room, is_model, place
from tests.broker.test_lies import root_only

GiB = 1 << 30


def node(name, *, state="present", counted=(), **summary):
    found = {"devices": 2, "out": 0, "capacity": 20 * GiB, "granted": 0, "free": 20 * GiB,
             "waiting": 0, "data": [], **summary}  # fmt: skip
    works = found["devices"] - found["out"]
    found.setdefault("gpus", [["A", found["free"] // works] for _ in range(works)])
    return {"name": name, "state": state, "counted": list(counted), "summary": found}


def chosen(*nodes, memory=4 * GiB, **wanted):
    return place(nodes, PlacementRequest("ada", memory, data=("/scratch/imagenet",), **wanted))


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        (node("b"), node("a", free=GiB), "it has room now"),
        (
            node("b", free=5 * GiB, gpus=[["A", 4 * GiB], ["A", GiB]]),
            node("a", free=6 * GiB, gpus=[["A", 3 * GiB]] * 2),
            "it has room on one GPU",
        ),
        (node("b", gpus=None), node("a", gpus=None, free=GiB), "its GPUs have room together"),
        (node("b", free=GiB), node("a", free=GiB, waiting=1), "nobody waits there"),
        (
            node("b", free=8 * GiB, counted=[["user", "ada", "leases", "", 1]]), node("a"),
            "the user's quota is there",
        ),
        (
            node("b", data=["/scratch"]),
            node("a", data=["/scrat"], counted=[["user", "ada", "leases", "", 1]]),
            "the data is there",
        ),
        (node("a", free=GiB), node("b", free=GiB, waiting=1, data=["/scratch"]), "nobody waits"),
        (node("b"), node("a", free=8 * GiB), "it has more room"),
        (node("a"), node("b"), "its name comes first"),
        (node("b"), node("a", out=2), "its GPUs are in service"),
    ],
)  # fmt: skip
def test_the_better_machine_is_chosen(one, other, why):
    assert chosen(one, other).node == chosen(other, one).node == one["name"], why


def test_other_users_kernels_do_not_influence_the_choice():
    theirs = node("b", free=8 * GiB, counted=[["user", "bob", "leases", "", 5]])
    assert chosen(theirs, node("a")).node == "a"


def test_each_unsuitable_machine_is_named_with_its_reason():
    found = chosen(
        node("a", state="silent"), node("b", out=1), {**node("c"), "summary": None},
        node("d", devices=0, capacity=0, free=0), node("e", capacity=6 * GiB), node("f"),
        devices=2,
    )  # fmt: skip
    assert found.node == "f"
    assert found.reasons == (
        "a: it is silent; "
        "b: the kernel needs 2 GPUs, and the machine has 1 GPU in service; "
        "c: its GPUs are not known yet; "
        "d: the kernel needs 2 GPUs, and the machine has 0 GPUs in service; "
        "e: the kernel needs 4 GiB on a GPU, and the machine's GPUs have 3 GiB each"
    )


@pytest.mark.parametrize(
    ("name", "model", "is_it"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100", True),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB", True),
        ("NVIDIA A100-SXM4-80GB", "A10", False),
        ("NVIDIA A100-SXM4-80GB", "A100 40GB", False),
        ("NVIDIA H100", "NVIDIA H100 ", True),
    ],
)
def test_a_model_matches_whole_words_of_a_gpu_name(name, model, is_it):
    assert is_model(name, model) is is_it


def test_reason_names_the_gpu_models_of_an_unsuitable_machine():
    found = chosen(
        node("a", gpus=[["A10", 10 * GiB]] * 2), node("b", gpus=[["A100", GiB], ["A10", GiB]]),
        node("c", gpus=None), node("d", free=0, gpus=[["NVIDIA A100", 0]] * 2), model="a100",
    )  # fmt: skip
    assert found.node == "d", "a full machine of the model, not a free one of another"
    assert found.reasons == (
        "a: the kernel needs the model a100, and the machine has only A10; "
        "b: its pool may choose a GPU of another model (A10); "
        "c: the models of its GPUs are not known: the cluster is too large to list them"
    )


FOLDERS = ["/scratch", "/scratch/imagenet", "/data", "/"]


@st.composite
def machines(draw):
    size, count = draw(st.integers(1, 4)) * GiB, draw(st.integers(0, 3))
    gpus = [
        [draw(st.sampled_from(["NVIDIA A10", "NVIDIA A100", "NVIDIA A100 80GB"])),
         draw(st.integers(0, size))]
        for _ in range(count)
    ]  # fmt: skip
    out = draw(st.integers(0, 2))
    return {
        "state": draw(st.sampled_from(["present"] * 3 + ["silent", "draining", "fenced"])),
        "counted": [["user", user, "leases", "", draw(st.integers(0, 3))] for user in ("ada", "b")],
        "summary": draw(st.sampled_from([None] + [{
            "devices": count + out, "out": out, "capacity": (count + out) * size, "granted": 0,
            "free": sum(free for _, free in gpus), "waiting": draw(st.integers(0, 2)),
            "gpus": draw(st.sampled_from([gpus, gpus, None])),
            "data": draw(st.lists(st.sampled_from(FOLDERS), max_size=2)),
        }] * 5)),
    }  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    st.lists(machines(), max_size=5),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from(["", "A10", "A100", "80gb a100"]),
    st.randoms(),
)
def test_no_machine_is_better_than_the_chosen_one(rows, memory, devices, model, chance):
    nodes = [{"name": f"m{number}", **row} for number, row in enumerate(rows)]
    wanted = PlacementRequest("ada", memory * GiB, devices, model, ("/scratch/imagenet/train",))
    found = place(nodes, wanted)
    chance.shuffle(nodes)
    assert place(nodes, wanted).node == found.node, "the order of the list is no reason"
    lacks = dict(found.considered)
    assert lacks.keys() == {one["name"] for one in nodes}
    fit = {one["name"]: one["summary"] for one in nodes if not lacks[one["name"]]}
    assert bool(found.node) == bool(fit)
    for name, summary in fit.items():
        (state,) = [one["state"] for one in nodes if one["name"] == name]
        assert state == "present"
        assert summary["devices"] - summary["out"] >= devices
        assert summary["capacity"] >= summary["devices"] * memory * GiB
        assert not model or all(is_model(gpu, model) for gpu, _ in summary["gpus"])
    if found.node:
        best = fit[found.node]
        alike = [
            other
            for other in fit.values()
            if has_room(other, wanted.memory, devices) or not has_room(best, wanted.memory, devices)
        ]
        assert all(best["waiting"] <= other["waiting"] for other in alike)


def test_the_choice_is_empty_if_no_machine_can_take_the_kernel():
    assert chosen(node("a", state="fenced")).node == ""
    assert chosen().node == ""


@root_only
def test_a_kernel_has_the_rights_of_its_user_and_no_others():
    nobody = pwd.getpwnam("nobody")
    prefix, switch = switch_to(Account(nobody.pw_uid, nobody.pw_gid, (nobody.pw_gid, 100), {}))
    shown = subprocess.run(
        [*prefix, "/bin/cat", "/proc/self/status"], capture_output=True, text=True, check=True,
        cwd="/", **switch,
    ).stdout  # fmt: skip
    status = dict(line.split(":\t", 1) for line in shown.splitlines())
    assert status["Uid"].split() == [str(nobody.pw_uid)] * 4
    assert status["Gid"].split() == [str(nobody.pw_gid)] * 4
    assert sorted(map(int, status["Groups"].split())) == sorted({nobody.pw_gid, 100})
    assert {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapAmb")} == {0}
    assert os.geteuid() == 0
