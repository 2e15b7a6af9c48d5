# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Two notebooks compete for a device. The tests check what the websocket, the event bus and
/metrics show of this.
"""

from __future__ import annotations

import json

import pytest

from tests.broker.kit import BIG, Kernel, MiB, wait_until

from .kit import USE_GPU, Events

#: A machine with one device. While one kernel has the device, all other kernels wait.
MACHINE = "1x512MiB,context=32MiB"

PREFIX = "https://schema.jupyter.org/jupyter_gpupool/"


@pytest.fixture
def events(server):
    found = server.events()
    yield found
    found.close()


@pytest.fixture
def full(broker):
    """A kernel that uses the device. It is not a kernel of this server."""
    other = Kernel(broker, "other")
    other.attach()
    yield other
    other.close()


def test_waiting_and_idle_notebooks_cause_events(server, kernel, full, events):
    first = events.kind("snapshot")["snapshot"]
    assert [s["state"] for s in first["sessions"]] == ["active"]
    bus = Events(server.socket("/api/events/subscribe"))
    one, two = kernel(), kernel()
    cells = {name: server.cells(name) for name in (one, two)}

    running = cells[one].begin(USE_GPU)
    assert events.kind("queue", kernel_id=one)["data"]["position"] == 1
    second = cells[two].begin(USE_GPU)
    told = events.kind("queue", kernel_id=two)["data"]
    assert (told["position"], told["length"]) == (2, 2)
    assert "in use" in told["reason"] or "next kernel in the queue" in told["reason"]
    why = server.api(f"/sessions/{two}/why")
    assert (why["position"], len(why["ahead"])) == (2, 1)
    assert why["lines"][0].startswith("It is 2nd of 2 in the queue: ")
    assert "Ahead of it is 1 kernel of yours." in why["lines"]
    assert server.metrics()['jupyter_gpupool_sessions{state="queued"}'] == 2

    full.close()
    lease = events.until(
        lambda m: m["type"] == "lease" and m["data"]["kernel_id"] == one and m["data"]["devices"]
    )["data"]
    assert lease["granted_bytes"] == BIG
    assert cells[one].end(running)["status"] == "ok"
    # ``one`` is idle now. The pool moves its state to host memory and gives its slice to ``two``.
    assert cells[two].end(second)["status"] == "ok"
    gone = events.until(
        lambda m: (
            m["type"] == "lease"
            and m["data"]["kernel_id"] == one
            and m["data"]["suspended_bytes"] > 0
        )
    )["data"]
    assert gone["suspended_bytes"] >= 64 * MiB
    server.stop_kernel(two)
    ended = events.kind("lease", kernel_id=two, state="ended")["data"]
    assert ended["granted_bytes"] == 0
    cells[one].run("stream.sync()")
    events.until(lambda m: m["type"] == "lease" and m["data"]["devices"])

    found = wait_until(
        lambda: (m := server.metrics()).get('jupyter_gpupool_sessions{state="idle"}') == 1 and m,
        "an idle kernel in the metrics",
    )
    device = server.api(f"/sessions/{one}")["device"]
    assert found[f'jupyter_gpupool_granted_bytes{{device="{device}",state="idle"}}'] == BIG
    used = found[f'jupyter_gpupool_used_bytes{{device="{device}",state="idle"}}']
    assert 64 * MiB <= used <= BIG
    assert found["jupyter_gpupool_broker_up"] == 1
    for name in ("suspend", "resume", "wait"):
        counts = [
            v for k, v in found.items() if k.startswith(f"jupyter_gpupool_{name}_seconds_count")
        ]
        assert sum(counts) >= 1, (name, found)

    # The server's own event bus has the same events. Each event has a schema, and names no user.
    seen = []
    while {"lease", "queue"} - {m["schema_id"].removeprefix(PREFIX).split("/")[0] for m in seen}:
        message = json.loads(bus.socket.recv())
        if message["schema_id"].startswith(PREFIX):
            seen.append(message)
    assert all(m["kernel_id"] in (one, two) for m in seen)
    assert not {"owner", "user", "label"} & {key for m in seen for key in m}


def test_snapshot_plus_deltas_equals_a_new_snapshot(server, kernel, events):
    """A client that applies the deltas has the same data as a new snapshot."""
    state = events.kind("snapshot")["snapshot"]
    one = kernel()
    server.cells(one).run(USE_GPU)
    devices = {d["uuid"]: d for d in state["devices"]}
    sessions = {s["id"]: s for s in state["sessions"]}

    def apply(message):
        if message["type"] == "delta":
            devices.update({d["uuid"]: d for d in message["delta"].get("devices", ())})
            sessions.update({s["id"]: s for s in message["delta"].get("sessions", ())})
            for name in message["delta"].get("removed", ()):
                sessions.pop(name, None)
        return any(s.get("kernel_id") == one and s["state"] == "idle" for s in sessions.values())

    events.until(apply)
    now = {s["id"]: s["state"] for s in server.api("/pool")["sessions"]}
    assert {name: s["state"] for name, s in sessions.items()} == now


def test_idle_warning_comes_before_the_kernel_loses_its_slice(server, broker, kernel, events):
    one = kernel()
    server.cells(one).run(USE_GPU)
    events.kind("lease", kernel_id=one, state="idle")
    broker.configure(emulate=MACHINE, idle_timeout=15)  # a warning is due 20 s before the end
    broker.process.send_signal(1)
    warning = events.kind("idle", kernel_id=one)["data"]
    assert 0 < warning["seconds_left"] <= 20
    assert warning["bytes"] >= 64 * MiB
    # After ``keep`` the slice does not end soon, so the server no longer warns.
    server.api(f"/sessions/{one}/keep", "POST", seconds=3600)
    broker.configure(emulate=MACHINE)
    broker.process.send_signal(1)


def test_server_without_subscribers_sends_the_broker_nothing(server, broker, kernel):
    one = kernel()
    server.api("/pool")
    log = server.log
    told = len(log.read_text())
    server.stop_kernel(one)

    def connections():
        with broker.client() as client:
            counters = client.call("status")["broker"]["counters"]
        # Each call of this function makes one connection and sends one message. Subtract these.
        looks.append(1)
        return counters["messages"] - len(looks), counters["connections"] - len(looks)

    looks = []
    end = "GPU pool: nobody needs the pool"
    wait_until(lambda: end in log.read_text()[told:], "the end of watching")
    before = connections()
    server.request("GET", "/api/status")
    server.request("GET", "/metrics")
    assert connections() == before
