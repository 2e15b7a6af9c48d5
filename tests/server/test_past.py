# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What a real server remembers after the death of the broker and the end of a kernel."""

from __future__ import annotations

import os
import signal

from tests.broker.kit import MiB, wait_until

from .kit import USE_GPU


def usage(server):
    found = server.api("/history")["usage"]
    return found["attached_seconds"], found["kernel_seconds"]


def test_history_survives_the_broker_and_ends_with_the_kernel(start, broker):
    server = start("--GPUPoolExtension.refresh_interval=300", "--Application.log_level=DEBUG")

    # A request for the history sends no message to the broker, and opens no connection to it.
    def messages():
        with broker.client() as client:
            return client.call("status")["broker"]["counters"]["messages"]

    before = messages()
    empty = server.api("/history")
    assert messages() == before + 1, "this test's own message"
    assert (empty["kernels"], "devices" in empty) == ({}, False)
    assert server.api("/history?devices=1")["devices"] == {}
    assert usage(server) == (0, 0)

    events = server.events()  # from now on, a client watches
    one = server.start_kernel()
    cells = server.cells(one)
    cells.run(USE_GPU)

    def used():
        return (server.api("/history")["kernels"].get(one, {}).get("used") or [0])[-1] or 0

    # The server may take the first point before the cell has allocated all its memory. So wait for
    # a later point.
    wait_until(lambda: used() >= 64 * MiB, "a point with the cell's memory")
    found = server.api("/history")
    ring = found["kernels"][one]
    assert ring["used"][-1] <= 300 * MiB
    assert len(ring["time"]) == len(ring["used"]) == len(ring["busy"])
    assert found["usage"]["since"] <= ring["time"][0] <= found["now"] + 0.1
    assert all(b - a >= 0.9 for a, b in zip(ring["time"], ring["time"][1:], strict=False))
    assert ring["busy"][0] is None
    assert all(share is not None for share in ring["busy"][1:]), "kernels run under the guard here"
    assert set(server.api("/history?devices=1")["devices"]) == {
        d["uuid"] for d in server.api("/pool")["devices"]
    }
    attached, opened = wait_until(lambda: (u := usage(server))[0] > 0 and u, "seconds with a slice")
    assert attached <= opened

    # The next regular sample comes only after minutes, but the history shows the release at once.
    server.api(f"/sessions/{one}/release", "POST")
    wait_until(lambda: used() == 0, "the slice has gone")
    cells.run("stream.sync()")

    assert server.api("/history?devices=yes", status=400)["code"] == "bad-request"

    broker.kill()
    wait_until(lambda: server.request("GET", "/gpupool/api/pool").status_code == 503, "503")
    away = usage(server)
    assert away[0] >= attached
    assert away[1] >= opened
    assert server.api("/history")["kernels"][one]["time"], "the server still remembers it"
    try:  # the server starts the broker again
        again = wait_until(lambda: (u := usage(server))[1] > away[1] and u, "the broker's return")
        assert again[0] >= away[0]
        assert again[0] <= again[1]

        seen = server.api(f"/sessions/{one}")["opened_at"]
        events.close()
        server.stop_kernel(one)
        wait_until(lambda: "nobody needs the pool" in server.log.read_text(), "the end of watching")
        last = server.api("/history")
        assert last["kernels"] == {}, "it has ended"
        (closed,) = [r["time"] for r in broker.rows("close")]
        # The server counts the seconds of a kernel until the end that the journal names. If it has
        # not read this row of the journal, it counts until its last sample of the kernel.
        assert again[1] <= last["usage"]["kernel_seconds"] <= closed - seen + 0.01
        assert usage(server) == usage(server), "and it stops counting"
    finally:
        os.kill(broker.status()["pid"], signal.SIGTERM)
        wait_until(lambda: not broker.socket.exists(), "the end of the one that was started")
        assert broker.started
