# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Groups in a running broker: which group's share a session uses, and what is refused."""

from __future__ import annotations

import asyncio
import grp
import json
import logging
import os
import pwd
import signal
import threading
from types import SimpleNamespace

import pytest

from jupyter_gpupool.broker import membership
from jupyter_gpupool.broker.membership import Memberships
from jupyter_gpupool.config.grouping import read_groups
from jupyter_gpupool.errors import Code, RefusedError

from .kit import MiB, wait_until

ME = pwd.getpwuid(os.getuid()).pw_name
MY_GROUP = grp.getgrgid(os.getgid()).gr_name

GROUPS = {
    "lab": {"unix_groups": [MY_GROUP], "guarantee": "50%", "gpu_seconds_per_day": 3600},
    "thesis": {"parent": "lab", "users": [ME], "guarantee": "1 device"},
    "others": {"users": ["nobody"]},
    "rest": {"users": "*"},
}


def opened(broker, **fields):
    with broker.client() as client:
        answer = client.call("open", kernel_id="k", request={"memory": 64 * MiB}, **fields)
        shown = client.call("status")
    (session,) = [one for one in shown["sessions"] if one["id"] == answer["session"]]
    assert session["group"] == answer["group"]
    return answer["group"]


@pytest.fixture
def parts():
    from .kit import Broker

    return Broker, None, {"groups": GROUPS}


def test_session_uses_the_first_group_of_its_user(broker):
    assert opened(broker) == "thesis"
    assert broker.status()["groups"] == ["thesis", "lab", "rest"]


def test_why_shows_the_owners_groups_and_budgets(broker):
    with broker.client() as client:
        session = client.call("open", kernel_id="k", request={"memory": 64 * MiB})["session"]
        why = client.call("why", session=session)
        (shown,) = client.call("status")["sessions"]
    assert why["lines"] == ["It has no slice and waits for none."]
    assert why["groups"] == ["lab", "thesis"]
    assert [g["group"] for g in why["guarantees"]] == ["lab", "thesis"]
    assert why["standing"][0] == "Your group is thesis, a part of lab."
    assert why["standing"][1].startswith("Group lab has 0 B, below its guaranteed ")
    (budget,) = why["budgets"]
    assert (budget["group"], budget["seconds"], budget["left"]) == ("lab", 3600, 3600)
    assert why["standing"][-1] == "Group lab has 3600 of 3600 GPU-seconds left today."
    assert shown["budgets"] == why["budgets"]
    assert shown["standing"] == why["standing"]


def test_status_shows_the_groups_of_its_reader(make_broker):
    broker = make_broker().started
    wait_until(lambda: broker.status()["groups"] == ["thesis", "lab", "rest"], "the Unix groups")


@pytest.mark.parametrize("group", ["lab", "rest", "thesis"])
def test_a_session_may_choose_a_group_of_its_user(broker, group):
    assert opened(broker, group=group) == group


@pytest.mark.parametrize("group", ["others", "no such"])
def test_a_session_may_not_choose_another_group(broker, group):
    with broker.client() as client, pytest.raises(RefusedError) as caught:
        client.call("open", kernel_id="k", group=group)
    assert caught.value.code == Code.NOT_IN_GROUP
    assert str(caught.value) == (
        f"You are not in a group {group!r} of this pool. Choose 'thesis', 'lab' or 'rest'; the "
        "default is 'thesis'."
    )


def test_session_keeps_its_group_after_a_broker_restart(make_broker):
    broker = make_broker().started
    with broker.client() as client:
        # A restart keeps only sessions with a process.
        answer = client.call("open", kernel_id="k", request={"memory": 64 * MiB}, group="rest")
        client.call("launched", session=answer["session"], pid=os.getpid())
        broker.kill()
    assert broker.started
    assert broker.session(answer["session"])["group"] == "rest"


def test_new_groups_apply_after_sighup(make_broker):
    broker = make_broker().started
    assert opened(broker) == "thesis"
    broker.configure(groups={"new": {"users": "*"}})
    broker.process.send_signal(signal.SIGHUP)
    wait_until(lambda: broker.status()["groups"] == ["new"], "the new groups")
    assert opened(broker) == "new"


def test_sessions_leave_a_group_that_their_user_has_left(make_broker):
    broker = make_broker().started
    with broker.client() as client:
        names = [
            client.call("open", kernel_id="k", request={"memory": 64 * MiB}, group=group)["session"]
            for group in ("thesis", "lab", "rest")
        ]

        def groups():
            return [broker.session(name)["group"] for name in names]

        broker.configure(groups={"lab": GROUPS["lab"], "rest": GROUPS["rest"]})
        broker.process.send_signal(signal.SIGHUP)
        wait_until(lambda: groups() == ["lab", "lab", "rest"], "the groups after SIGHUP")
        (row,) = broker.rows("group")
        assert row["reason"] == "The kernel now uses the share of the group 'lab'."
        broker.configure(groups={})
        broker.process.send_signal(signal.SIGHUP)
        wait_until(lambda: groups() == ["", "", ""], "no groups")


def test_a_restart_with_other_groups_moves_sessions(make_broker):
    broker = make_broker().started
    with broker.client() as client:
        answer = client.call("open", kernel_id="k", request={"memory": 64 * MiB}, group="thesis")
        client.call("launched", session=answer["session"], pid=os.getpid())
        broker.kill()
    broker.configure(groups={"lab": GROUPS["lab"], "rest": GROUPS["rest"]})
    assert broker.started
    wait_until(lambda: broker.session(answer["session"])["group"] == "lab", "the other group")


# ------------------------------------------------------------------ more than the machine has


def test_start_is_refused_if_groups_exceed_the_machine(make_broker):
    broker = make_broker(groups={"a": {"guarantee": "3 devices"}})
    answer = broker.start()
    assert not answer["ok"]
    assert answer["code"] == Code.CONFIG
    assert answer["message"] == (
        f"c.GPUPool.groups['a']['guarantee'] in {broker.config_file}, line 1: 'a' is guaranteed "
        "1.4 GiB, but the GPUs of this machine have 960 MiB."
    )


def test_sighup_is_refused_if_groups_exceed_the_machine(make_broker):
    broker = make_broker().started
    night = {"name": "night", "set": {"groups": {"lab": {"guarantee": None, "cap": "9 devices"}}}}
    broker.configure(groups=GROUPS, schedules=[night], idle_timeout=5)
    broker.process.send_signal(signal.SIGHUP)
    wait_until(lambda: broker.rows("config"), "the refusal")
    (row,) = broker.rows("config")
    assert "With 'night' in force: The cap 9 devices (4.2 GiB) cannot be reached" in row["reason"]
    assert broker.status()["settings"]["idle_timeout"] == 3600


def test_broker_starts_with_a_warning_if_a_device_is_missing(make_broker):
    groups = {"a": {"guarantee": "600MiB", "users": "*"}}
    broker = make_broker(groups=groups).started
    broker.stop()
    broker.configure(groups=groups, emulate="1x512MiB,context=32MiB")
    assert broker.started.status()["devices"]
    assert (
        "The GPUs that are here now cannot satisfy the whole configuration: c.GPUPool"
        in broker.tail()
    )
    broker.stop()
    groups = {"a": {"guarantee": "601MiB", "users": "*"}}
    broker.configure(groups=groups, emulate="1x512MiB,context=32MiB")
    assert not broker.start()["ok"]


def test_broker_warns_of_unknown_users_and_unix_groups(make_broker):
    groups = {"a": {"users": [ME, "no-such-user"], "unix_groups": ["no-such-group"]}}
    broker = make_broker(groups=groups).started
    wait_until(lambda: "no-such-group" in broker.tail(), "the warnings")
    text = broker.tail()
    place = f"in {broker.config_file}, line 1"
    assert f"groups['a']['users'] {place}: This machine has no user 'no-such-user'." in text
    assert f"groups['a']['unix_groups'] {place}: This machine has no Unix group" in text


# ------------------------------------------------------------------ a slow NSS


class Nss:
    """Stands in for NSS; each query of a user's groups waits until the test sets ``go``."""

    def __init__(self, *groups):
        self.groups = frozenset(groups)
        self.go = threading.Event()
        self.asked = 0

    def __call__(self, uid):
        self.asked += 1
        assert self.go.wait(60)
        if not self.groups:
            raise RuntimeError("a module of NSS failed")
        return self.groups


def memberships(nss, groups=None, hub=None):
    members = read_groups(groups or {"x": {"unix_groups": ["x"]}, "all": {"users": "*"}}).members
    settings = SimpleNamespace(members=members, hub_groups=hub)
    configuration = SimpleNamespace(settings=settings)
    return Memberships(configuration, logging.getLogger("test"), unix_groups=nss)


def test_nss_is_asked_once_for_many_sessions():
    nss = Nss("x")

    async def run():
        found = memberships(nss)
        assert not found.is_known(0)
        waiting = [asyncio.ensure_future(found.learn(0)) for _ in range(50)]
        await asyncio.sleep(0)
        nss.go.set()
        await asyncio.gather(*waiting)
        assert found.is_known(0)
        assert found.owner(0).group == "x"
        assert found.is_sure(0)
        found.forget()
        assert not found.is_known(0)
        assert found.owner(0).group == "x"

    asyncio.run(run())
    assert nss.asked == 1


def test_a_session_is_opened_while_nss_hangs(monkeypatch, caplog):
    monkeypatch.setattr(membership, "PATIENCE", 0.05)
    nss = Nss("x")

    async def run():
        found = memberships(nss)
        await found.learn(0)
        assert found.owner(0).group == "all"
        assert not found.is_sure(0)
        assert "were not found within 0.05 s; no rule about Unix groups applies" in caplog.text
        nss.go.set()
        while found.owner(0).group != "x":  # NSS answers at last
            await asyncio.sleep(0.01)

    asyncio.run(run())


def test_failure_of_an_nss_module_is_logged(caplog):
    nss = Nss()
    nss.go.set()

    async def run():
        found = memberships(nss)
        await found.learn(0)
        assert found.owner(0).group == "all"

    asyncio.run(run())
    assert "The Unix groups of user id 0 cannot be read" in caplog.text


def test_nss_is_asked_only_if_a_rule_names_a_unix_group():
    nss = Nss("x")

    async def run():
        found = memberships(nss, {"a": {"users": ["root"]}})
        assert found.is_known(0)
        assert found.owner(0).group == "a"
        with pytest.raises(RefusedError, match="You are in no group"):
            found.owner(4_000_000, "a")

    asyncio.run(run())


# ------------------------------------------------------------------ groups of a Hub


def test_last_known_hub_groups_apply_while_the_hub_is_down(caplog):
    nss, hub = Nss("x"), {"root": ["night"]}
    nss.go.set()
    groups = {"night": {"hub_groups": ["night"]}, "all": {"users": "*"}}

    async def run():
        found = memberships(nss, groups, lambda user: hub[user])
        assert not found.is_known(0)
        await found.learn(0)
        assert (found.owner(0).group, found.is_sure(0)) == ("night", True)
        del hub["root"]
        found.forget()
        await found.learn(0)
        assert (found.owner(0).group, found.is_sure(0)) == ("night", False)
        assert "The Hub groups of root cannot be read" in caplog.text
        hub["root"] = []
        found.forget()
        await found.learn(0)
        assert (found.owner(0).group, found.is_sure(0)) == ("all", True)

    asyncio.run(run())


@pytest.mark.parametrize("wrong", ["night", [1], None])
def test_hub_answer_that_is_no_list_of_names_is_ignored(wrong, caplog):
    nss = Nss("x")
    nss.go.set()

    async def run():
        found = memberships(nss, {"night": {"hub_groups": ["night", "n"]}}, lambda _: wrong)
        await found.learn(0)
        assert found.owner(0).group == ""
        assert "The Hub groups of root cannot be read" in caplog.text

    asyncio.run(run())


def test_answer_of_hub_groups_decides_the_group_of_a_session(make_broker):
    broker = make_broker()
    values = json.loads(broker.config_file.read_text())["GPUPool"]
    groups = {"night": {"hub_groups": ["night-shift"]}, "rest": {"users": "*"}}
    broker.config_file = broker.folder / "config.py"

    def write(names):
        broker.config_file.write_text(
            f"for name, value in { ({**values, 'groups': groups})!r}.items():\n"
            "    setattr(c.GPUPool, name, value)\n"
            f"c.GPUPool.hub_groups = lambda user: {names} if user == {ME!r} else None\n"
        )

    write(["night-shift"])
    assert opened(broker.started) == "night"
    with broker.client() as client:
        session = client.call("open", kernel_id="k", request={"memory": 64 * MiB})["session"]
        write([])
        broker.process.send_signal(signal.SIGHUP)
        wait_until(lambda: broker.session(session)["group"] == "rest", "the Hub's new answer")
