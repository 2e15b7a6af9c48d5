# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""On which machine a kernel starts; and which rights its process gets there."""

from __future__ import annotations

import os
import pwd
import subprocess

import pytest

from jupyter_gpupool.broker.hosting import Account, switch_to
from jupyter_gpupool.cluster.placing import PlacementRequest, place
from tests.broker.test_lies import root_only

GiB = 1 << 30


def node(name, *, state="present", counted=(), **summary):
    found = {"devices": 2, "out": 0, "capacity": 20 * GiB, "granted": 0, "free": 20 * GiB,
             "waiting": 0, **summary}  # fmt: skip
    works = found["devices"] - found["out"]
    found.setdefault("gpus", [["A", found["free"] // works] for _ in range(works)])
    return {"name": name, "state": state, "counted": list(counted), "summary": found}


def chosen(*nodes, memory=4 * GiB, **wanted):
    return place(nodes, PlacementRequest("ada", memory, **wanted))


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
        (node("b"), node("a", free=8 * GiB), "it has more room"),
        (node("a"), node("b"), "its name comes first"),
        (node("b"), node("a", out=2), "its GPUs are in service"),
    ],
)  # fmt: skip
def test_the_better_machine_is_chosen(one, other, why):
    assert chosen(one, other).node == chosen(other, one).node == one["name"], why


def test_other_users_kernels_are_no_reason():
    theirs = node("b", free=8 * GiB, counted=[["user", "bob", "leases", "", 5]])
    assert chosen(theirs, node("a")).node == "a"


def test_each_machine_that_will_not_do_is_named_with_its_reason():
    found = chosen(
        node("a", state="silent"), node("b", out=1), {**node("c"), "summary": None},
        node("d", devices=0, capacity=0, free=0), node("e", capacity=6 * GiB), node("f"),
        devices=2,
    )  # fmt: skip
    assert found.node == "f"
    assert found.reasons == (
        "a: it is silent; b: it has 1 GPU in service, and 2 GPUs must be; "
        "c: its GPUs are not known yet; d: it has 0 GPUs in service, and 2 GPUs must be; "
        "e: its GPUs have 3 GiB and 4 GiB is needed"
    )


def test_no_machine_is_chosen_if_no_machine_can_take_the_kernel():
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
