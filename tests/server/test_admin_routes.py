# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What an admin's server shows about every session, and the orders that it sends."""

from __future__ import annotations

import pytest

from jupyter_gpupool.errors import RefusedError
from jupyter_gpupool.server.admin_routes import table
from tests.broker.kit import wait_until


@pytest.fixture
def stranger(broker):
    """A session whose kernel does not belong to this server."""
    with broker.client() as client:
        yield client.call("open", kernel_id="elsewhere", label="fit.ipynb")["session"]


def test_admin_sees_and_changes_a_session_of_another_server(server, broker, stranger):
    shown = server.api("/admin")
    assert [(s["id"], s["label"]) for s in shown["sessions"]] == [(stranger, "fit.ipynb")]
    assert {"batch", "notebook"} <= {*shown["priorities"]}
    order = f"/admin/sessions/{stranger}"
    assert server.api(f"{order}/priority", "POST", priority="batch")["note"]
    assert broker.session(stranger)["priority"] == "batch"
    assert server.api(f"{order}/recall", "POST", 409, minutes=5)["code"] == "nothing-to-release"
    assert server.api(f"{order}/end", "POST", reason="done")["note"] == "The pool ends the kernel."
    wait_until(lambda: broker.session(stranger) is None, "the end of the session")


@pytest.mark.parametrize("body", [
    {}, {"minutes": None}, {"minutes": ""}, {"minutes": "5"}, {"minutes": 0}, {"minutes": -1},
    {"minutes": 10081}, {"minutes": True}, {"minutes": 5, "cancel": True}, {"cancel": False},
    {"minutes": 5, "other": 1}, {"minutes": 5, "reason": 7},
])  # fmt: skip
def test_body_without_valid_minutes_is_refused(server, stranger, body):
    answer = server.request("POST", f"/gpupool/api/admin/sessions/{stranger}/recall", json=body)
    assert (answer.status_code, answer.json()["code"]) == (400, "bad-request")


def test_gpu_is_drained_and_resumed(server, broker):
    uuid = server.api("/pool")["devices"][1]["uuid"]
    path = f"/admin/devices/{uuid}"
    assert server.api(path, "POST", action="drain", reason="dust")["note"]
    assert [order["device"] for order in server.api("/admin")["maintenance"]] == [uuid]
    assert server.api(path, "POST", action="resume")["note"]
    assert broker.status()["maintenance"] == []
    assert server.api("/admin/devices/1", "POST", 400, action="drain")["code"] == "bad-request"


def test_owner_gets_a_notice_by_the_websocket(server, kernel):
    events = server.events()
    one = kernel()
    session = wait_until(lambda: server.api(f"/sessions/{one}")["id"], "its session")
    server.api(f"/admin/sessions/{session}/priority", "POST", priority="batch", reason="night")
    told = events.kind("notice")["data"]
    assert told["kernel_id"] == one
    assert told["message"].endswith("has moved this kernel to the priority class batch: night.")
    events.close()


def test_the_last_hour_is_shown_to_everybody(server):
    hour = server.api("/hour")
    assert len(hour["queue"]) == 60
    assert set(hour["devices"]) == {device["uuid"] for device in server.api("/pool")["devices"]}


def test_status_without_admin_rights_gives_no_table():
    with pytest.raises(RefusedError, match="is not an admin"):
        table({"admin": False})
