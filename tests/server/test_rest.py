# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Every route, on a real server with a real broker."""

from __future__ import annotations

import pytest

from tests.broker.kit import BIG, CAPACITY, MiB, wait_until

from .kit import USE_GPU

#: A kernel in use has at least this much memory: a context of the emulated driver, and one block.
LEAST = 34 * MiB


def test_installation_enables_the_extension(server):
    log = server.log.read_text()
    assert "jupyter_gpupool.server | extension was successfully loaded" in log
    # If a route does not check the user, Jupyter Server writes its path to the log. All our routes
    # check the user.
    assert "/gpupool" not in log


def test_pool_route_shows_devices_without_internals(server):
    pool = server.api("/pool")
    assert pool["emulated"] is True
    assert [d["memory_capacity"] for d in pool["devices"]] == [CAPACITY, CAPACITY]
    assert pool["sessions"] == []
    assert not {"socket", "pid", "broker"} & set(pool)


def test_routes_follow_a_kernel_from_start_to_end(server, kernel):
    one = kernel()
    session = server.api(f"/sessions/{one}")
    assert (session["state"], session["here"], session["mine"]) == ("detached", True, True)
    assert session["request"]["memory"] == BIG
    assert server.api("/sessions")["sessions"][0]["kernel_id"] == one

    asked = server.api(f"/sessions/{one}", "PATCH", memory="128MiB")
    assert asked["request"]["memory"] == 128 * MiB
    assert asked["note"] == "The change applies when the kernel next gets its slice."
    asked = server.api(f"/sessions/{one}", "PATCH", memory=256 * MiB, limit=float(256 * MiB))
    assert asked["request"]["memory"] == asked["request"]["limit"] == 256 * MiB
    refused = server.api(f"/sessions/{one}", "PATCH", 409, memory="1MiB")
    assert (refused["code"], refused["details"]["least"]) == ("under-least", LEAST)
    refused = server.api(f"/sessions/{one}/keep", "POST", 409, seconds=60)
    assert refused["code"] == "nothing-to-keep"

    why = server.api(f"/sessions/{one}/why")
    assert (why["lines"], why["position"]) == (["It has no slice and waits for none."], None)
    cells = server.cells(one)
    cells.run(USE_GPU)
    wait_until(lambda: server.api(f"/sessions/{one}")["state"] == "idle", "an idle session")
    assert "even when idle" in server.api(f"/sessions/{one}/keep", "POST", seconds=600)["note"]
    most = server.api("/pool")["limits"]["max_keep"]
    refused = server.api(f"/sessions/{one}/keep", "POST", 409, seconds=most + 60)
    assert (refused["code"], refused["details"]["most"]) == ("over-keep", most)
    assert "at most 4 h at a time (c.GPUPool.max_keep)" in refused["message"]
    assert server.api(f"/sessions/{one}/release", "POST")["note"]
    wait_until(lambda: server.api(f"/sessions/{one}")["state"] == "detached", "no slice")
    assert server.api(f"/sessions/{one}")["suspended_bytes"] >= 64 * MiB
    cells.run("assert buffer.size == 64 << 20; stream.sync()")
    cells.close()
    server.stop_kernel(one)
    assert server.api(f"/sessions/{one}", status=404)["code"] == "unknown-session"


def test_refusal_names_the_rule_and_says_what_to_do(server, kernel):
    refused = server.api(f"/sessions/{kernel()}", "PATCH", 409, memory="900MiB")
    assert refused["code"] == "over-device"
    assert "900 MiB" in refused["message"]
    assert refused["next_step"]
    assert refused["details"]


@pytest.mark.parametrize(
    ("path", "method", "body"),
    [
        ("", "PATCH", "nonsense"),
        ("", "PATCH", "[]"),
        ("", "PATCH", "{}"),
        ("", "PATCH", '{"memory": 0}'),
        ("", "PATCH", '{"memory": true}'),
        ("", "PATCH", '{"memory": "12"}'),
        ("", "PATCH", '{"devices": "2"}'),
        ("", "PATCH", '{"devices": 1.5}'),
        ("", "PATCH", '{"compute": NaN}'),
        ("", "PATCH", '{"memroy": 1000}'),
        ("", "PATCH", '{"priority": 1}'),
        ("", "PATCH", '{"priority": "nobody"}'),
        ("", "PATCH", '{"memory": 1e30}'),
        ("/keep", "POST", "{}"),
        ("/keep", "POST", '{"seconds": -1}'),
        ("/keep", "POST", '{"seconds": Infinity}'),
        ("/keep", "POST", '{"seconds": 1, "for": 2}'),
    ],
)
def test_wrong_request_is_refused_with_the_reason(server, wrong_for, path, method, body):
    url = f"{server.url}/gpupool/api/sessions/{wrong_for}{path}?token=t"
    answer = server.request(method, url.removeprefix(server.url), data=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["code"] in ("bad-request", "unknown-priority")
    assert answer.json()["message"]


@pytest.fixture(scope="module")
def wrong_for(server):
    """A kernel whose request no test changes."""
    name = server.start_kernel()
    before = server.api(f"/sessions/{name}")["request"]
    yield name
    assert server.api(f"/sessions/{name}")["request"] == before
    server.stop_kernel(name)


def test_unknown_paths_and_methods_get_errors_of_the_same_form(server):
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", "", 404),
        ("POST", "/sessions/a/b/c", 404),
        ("DELETE", "/pool", 405),
    ):
        answer = server.request(method, f"/gpupool/api{path}")
        assert answer.status_code == status
        assert {"code", "message", "next_step"} <= set(answer.json())
    assert server.request("DELETE", "/gpupool/api/pool").headers["Allow"] == "GET, OPTIONS"


def test_a_kernel_without_a_gpu_has_no_session(server, kernel):
    found = server.api(f"/sessions/{kernel('python3')}", status=404)
    assert found["next_step"] == "Choose the kernel Pooled GPU, or restart this kernel."
