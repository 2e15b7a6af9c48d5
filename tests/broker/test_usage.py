# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The usage of users and groups survives the broker, and the status shows the usage."""

from __future__ import annotations

import getpass
import json

import pytest

from jupyter_gpupool.broker.store.usage import MOST, read_usage, usage_text
from jupyter_gpupool.pool.model import Usage

from . import kit
from .kit import wait_until

USER = getpass.getuser()

#: This machine's user is in one group, which may use a hundred GPU-seconds a day.
GROUPS = {
    "lab": {"weight": 2, "users": [USER], "gpu_seconds_per_day": 100},
    "others": {"users": ["nobody"]},
}


def used(kernel):
    status = kernel.broker.session(kernel.session)
    return status["usage"]["today"]


@pytest.mark.parametrize("end", ["killed", "asked to end"])
def test_usage_survives_the_end_of_a_broker(make_broker, end):
    broker = make_broker(groups=GROUPS).started
    kernel = kit.Kernel(broker, "first")
    try:
        kernel.attach()
        wait_until(lambda: used(kernel) > 1, "some use")
        kernel.do("drop", hold="cell")
        kernel.close()
        kernel = kit.Kernel(broker, "second")
        before = used(kernel)
        if end == "killed":
            wait_until(lambda: stored(broker) > before - 0.3, "the journal to have it")
            broker.kill()
        else:
            broker.stop()
        assert broker.start()["ok"]
        wait_until(lambda: broker.session(kernel.session), "the session")
        status = broker.session(kernel.session)
        assert before - 0.5 <= status["usage"]["today"] <= before + 0.5
        assert status["group_usage"]["today"] == pytest.approx(status["usage"]["today"], abs=0.2)
    finally:
        kernel.close()


@pytest.mark.parametrize("goes_on", [True, False], ids=["goes on", "ends with the broker"])
def test_killed_broker_loses_few_seconds_of_usage(make_broker, goes_on):
    broker = make_broker(groups=GROUPS).started
    kernel = kit.Kernel(broker, "first")
    try:
        kernel.attach()
        wait_until(lambda: used(kernel) > 5, "use during one lease")
        before = used(kernel)
        wait_until(lambda: stored(broker) > before - 2.5, "the journal to have most of it")
        broker.kill()
        if not goes_on:
            kernel.kill()
        assert broker.start()["ok"]
        if not goes_on:
            kernel.close()
            kernel = kit.Kernel(broker, "second")
        wait_until(lambda: broker.session(kernel.session), "the session")
        assert used(kernel) > before - 2.5
    finally:
        kernel.close()


def stored(broker):
    """Return today's usage of this user from the journal; -1 if the journal has none."""
    import sqlite3

    with broker.client() as client:
        path = client.call("status")["broker"]["journal"]
    found = {}
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
        for name in ("usage", "usage-recent"):
            row = db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
            found |= read_usage(row[0] if row is not None else "")[0]
    return found[USER].today if USER in found else -1


def test_status_shows_group_use_and_share(make_broker):
    broker = make_broker(groups=GROUPS).started
    kernel = kit.Kernel(broker, "first")
    try:
        kernel.attach()
        wait_until(lambda: used(kernel) > 0.2, "some use")
        status = broker.session(kernel.session)
        assert status["group"] == "lab"
        assert status["group_usage"]["daily"] == 100
        assert (status["usage"]["daily"], status["usage"]["spent"]) == (None, False)
        names = [level["of"] for level in status["share"]]
        assert names == ["group lab", USER]
        assert all(level["used"] == pytest.approx(1) for level in status["share"])
        assert status["preempted"] == ""
        rows = broker.rows("state")
        assert {row["detail"]["group"] for row in rows} == {"lab"}
    finally:
        kernel.close()


def test_usage_is_stored_only_for_the_users_with_the_most_usage():
    users = {f"u{n}": Usage(memory=float(n), at=5.0) for n in range(MOST + 50)}
    found, groups = read_usage(
        usage_text(users, {"lab": Usage(compute=2.0, today=1.5, spent=True)})
    )
    assert len(found) == MOST
    assert min(u.memory for u in found.values()) == 50.0
    assert groups == {"lab": Usage(compute=2.0, today=1.5, spent=True)}


def test_usage_of_zero_is_not_stored():
    assert json.loads(usage_text({"ann": Usage(at=9.0)}, {})) == {"users": {}, "groups": {}}


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"users": 3}', '{"users": {"ann": [1, 2]}}', '{"users": {"ann": "x"}}',
     '{"users": {"ann": [1, 2, -1, 0, 0]}}', '{"users": {"ann": [1, NaN, 1, 0, 0]}}'],
)  # fmt: skip
def test_damaged_text_of_usage_counts_as_no_usage(text):
    assert read_usage(text) == ({}, {})


def test_status_shows_the_budget_to_a_user_without_a_session(make_broker):
    broker = make_broker(groups=GROUPS).started
    assert broker.status()["standing"] == [
        "Your group is lab.",
        "Group lab has 100 of 100 GPU-seconds left today.",
    ]
