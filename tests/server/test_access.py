# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Access rights: clients without a token, users who may only read, and two users of one machine."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import websocket

from tests.broker import kit as brokers
from tests.broker.kit import wait_until

from .kit import Server

ROUTES = [
    ("GET", "/pool", None),
    ("GET", "/sessions", None),
    ("GET", "/sessions/KERNEL", None),
    ("PATCH", "/sessions/KERNEL", {"memory": "64MiB"}),
    ("POST", "/sessions/KERNEL/release", None),
    ("POST", "/sessions/KERNEL/keep", {"seconds": 60}),
    ("GET", "/sessions/KERNEL/why", None),
    ("GET", "/hour", None),
    ("GET", "/admin", None),
    ("POST", "/admin/sessions/KERNEL/end", {}),
    ("POST", "/admin/devices/GPU-12345678", {"action": "pause"}),
    ("GET", "/openapi.json", None),
    ("GET", "/nothing", None),
]

#: The configuration of a server with one of two authorizers. With ReadOnly, users may only read our
#: data. With Nothing, they have no access to our data.
READ_ONLY = """
from jupyter_server.auth import Authorizer

class ReadOnly(Authorizer):
    def is_authorized(self, handler, user, action, resource):
        return resource != "gpupool" or action == "read"

class Nothing(Authorizer):
    def is_authorized(self, handler, user, action, resource):
        return resource != "gpupool"

c.ServerApp.authorizer_class = %s
"""


@pytest.mark.parametrize("token", ["", "wrong"])
@pytest.mark.parametrize(("method", "path", "body"), ROUTES)
def test_client_without_a_token_gets_no_data(server, method, path, body, token):
    answer = server.request(method, f"/gpupool/api{path}", json=body, token=token)
    assert answer.status_code in (401, 403)
    assert {"code", "message", "next_step"} <= set(answer.json())
    assert "version" not in answer.text


@pytest.mark.parametrize("token", ["", "wrong"])
def test_client_without_a_token_gets_no_websocket(server, token):
    with pytest.raises(websocket.WebSocketBadStatusException) as caught:
        server.socket("/gpupool/api/events", token=token)
    assert caught.value.status_code in (401, 403)


def configured(start, folder, authorizer):
    path = folder / f"{authorizer}.py"
    path.write_text(READ_ONLY % authorizer)
    return start(f"--config={path}")


def test_reader_can_read_but_not_change(start, folder):
    server = configured(start, folder, "ReadOnly")
    kernel = server.start_kernel()
    for method, path, body in ROUTES[:-1]:
        answer = server.request(method, f"/gpupool/api{path.replace('KERNEL', kernel)}", json=body)
        assert answer.status_code == (200 if method == "GET" else 403), answer.text
    server.events().kind("snapshot")
    server.stop_kernel(kernel)


def test_user_without_rights_gets_no_data(start, folder):
    server = configured(start, folder, "Nothing")
    for method, path, body in ROUTES[:-1]:
        answer = server.request(method, f"/gpupool/api{path}", json=body)
        assert answer.status_code == 403
        assert answer.json()["code"] == "forbidden"
    with pytest.raises(websocket.WebSocketBadStatusException, match="403"):
        server.events()


# ---------------------------------------------------------------- two users of one machine

#: User ids without an account: the broker and Linux treat them like all other user ids.
ALICE, BOB = 21001, 21002


@pytest.fixture(scope="module")
def two_users():
    """A broker for the whole machine, and one server for each of two users."""
    if os.geteuid() != 0:
        pytest.fail("Only root can start servers of two users: run the tests as root.")
    folder = brokers.short_folder()
    folder.chmod(0o755)
    broker = brokers.Broker(folder)
    # Every user may use a socket in /run.
    broker.socket = Path("/run") / folder.name / "broker.sock"
    servers = []
    try:
        assert broker.start()["ok"]
        for user in (ALICE, BOB):
            home = folder / f"u{user}"
            home.mkdir(mode=0o700)
            servers.append(Server(folder, broker.socket, user=user, home=home))
        yield broker, *servers
    finally:
        for server in servers:
            server.end()
            print(server.tail())
        broker.close()
        print(broker.tail())
        brokers.remove(folder)
        brokers.remove(broker.socket.parent)


def test_users_do_not_see_kernels_of_each_other(two_users):
    broker, alices, bobs = two_users
    hers = alices.start_kernel()
    events = bobs.events()
    seen = events.kind("snapshot")["snapshot"]["sessions"]
    his = bobs.start_kernel()
    everything = [seen, bobs.api("/pool"), bobs.api("/sessions")]
    (anonymous,) = [s for s in everything[1]["sessions"] if not s["mine"]]
    assert anonymous["owner"] == "other"
    assert set(anonymous) <= {
        *("id", "owner", "state", "granted_bytes", "device", "devices", "slices"),
        *("queue_position", "priority", "mine", "here", "asks", "waits_for", "queued_at"),
    }
    # The test itself runs as root, so the broker shows the real owners to the test.
    owners = {s["kernel_id"]: s["owner"] for s in broker.status()["sessions"]}
    assert owners == {hers: f"uid-{ALICE}", his: f"uid-{BOB}"}
    # Bob cannot see or change Alice's kernel, even if he knows the id of the kernel or its session.
    for name in (hers, anonymous["id"]):
        for method, path, body in ROUTES[2:7]:
            path = path.replace("KERNEL", name)
            answer = bobs.request(method, f"/gpupool/api{path}", json=body)
            assert answer.status_code == 404, answer.text
    # Bob is no admin, even though his server knows the ids of Alice's session and of the GPUs.
    assert bobs.api("/pool")["admin"] is False
    assert bobs.api("/admin", status=403)["code"] == "not-allowed"
    order = f"/admin/sessions/{anonymous['id']}"
    uuid = bobs.api("/pool")["devices"][0]["uuid"]
    for path, body in (
        (f"{order}/recall", {"minutes": 1}),
        (f"{order}/priority", {"priority": "batch"}),
        (f"{order}/end", {"reason": "no"}),
        (f"/admin/devices/{uuid}", {"action": "pause"}),
    ):
        assert bobs.api(path, "POST", 403, **body)["code"] == "not-allowed"
    before = alices.api(f"/sessions/{hers}")["request"]

    # Bob gets no events about Alice's kernel.
    alices.api(f"/sessions/{hers}", "PATCH", memory="64MiB")
    cells = alices.cells(hers)
    cells.run("from cuda.core import Device; Device().set_current()")
    events.until(
        lambda m: (
            m["type"] == "delta"
            and any(s["granted_bytes"] for s in m["delta"].get("sessions", ()) if not s["mine"])
        )
    )
    bobs.cells(his).run("from cuda.core import Device; Device().set_current()")
    events.kind("lease", kernel_id=his, state="idle")
    everything.append(events.seen)
    text = json.dumps(everything)
    for secret in (hers, str(ALICE), "uid-"):
        assert secret not in text.replace(f"uid-{BOB}", ""), secret
    assert all(m["data"]["kernel_id"] == his for m in events.seen if "data" in m)
    assert alices.api(f"/sessions/{hers}")["request"] != before

    metrics = bobs.metrics()
    assert sum(v for k, v in metrics.items() if k.startswith("jupyter_gpupool_sessions")) == 1
    alices.stop_kernel(hers)
    bobs.stop_kernel(his)


# ---------------------------------------------------------------- the broker away and back


def test_server_reconnects_to_a_broker_that_was_stopped(start, broker):
    server = start()
    kernel = server.start_kernel()
    events = server.events()
    events.kind("snapshot")
    broker.stop()
    told = events.kind("broker", available=False)
    assert told["code"] in ("broker-unavailable", "no-broker")
    for method, path, body in ROUTES[:7]:
        answer = server.request(method, f"/gpupool/api{path.replace('KERNEL', kernel)}", json=body)
        assert answer.status_code == 503
        error = answer.json()
        assert error["code"] in ("broker-unavailable", "no-broker")
        assert str(broker.socket) in error["message"]
        assert error["next_step"]
    assert server.metrics()["jupyter_gpupool_broker_up"] == 0
    # The broker was stopped, not killed. So none of these requests has started it again.
    assert not broker.socket.exists() or not answers(broker)
    assert broker.started
    events.kind("broker", available=True)
    snapshot = events.kind("snapshot")["snapshot"]
    assert [s["kernel_id"] for s in snapshot["sessions"] if s["here"]] == [kernel]
    assert server.metrics()["jupyter_gpupool_broker_up"] == 1
    server.cells(kernel).run("1 + 1")
    server.stop_kernel(kernel)


def test_server_restarts_a_broker_that_was_killed(start, broker):
    server = start()
    events = server.events()
    events.kind("snapshot")
    old = broker.process.pid
    broker.kill()
    events.kind("broker", available=False)
    events.kind("broker", available=True)
    try:
        assert server.api("/pool")["devices"]
        assert broker.status()["pid"] != old
        wait_until(lambda: "was started again" in server.log.read_text(), "the line in the log")
    finally:
        os.kill(broker.status()["pid"], signal.SIGTERM)
        wait_until(lambda: not broker.socket.exists(), "its end")
        assert broker.started


def test_server_says_which_configuration_is_in_force(start, broker):
    config = f"from {broker.config_file}"
    server = start("--GPUPool.idle_timeout=5")
    text = server.api("/pool")["configuration_notice"]
    assert f"c.GPUPool.emulate is '2x512MiB,context=32MiB' ({config})" in text
    assert f"process {broker.process.pid}" in text
    wait_until(lambda: "another configuration" in server.log.read_text(), "the line in the log")


def answers(broker):
    try:
        broker.status()
    except Exception:
        return False
    return True


def test_a_broker_that_hangs_does_not_hang_the_server(start, broker):
    server = start()
    server.api("/pool")
    os.kill(broker.process.pid, signal.SIGSTOP)
    try:
        answer = server.request("GET", "/gpupool/api/pool")
        assert answer.status_code == 503
        assert "did not answer" in answer.json()["message"]
        assert server.request("GET", "/api/status").status_code == 200
    finally:
        os.kill(broker.process.pid, signal.SIGCONT)
    wait_until(lambda: server.request("GET", "/gpupool/api/pool").ok, "the broker to be back")
