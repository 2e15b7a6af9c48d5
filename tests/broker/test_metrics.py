# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The broker's own /metrics, from a real broker on emulated devices."""

from __future__ import annotations

import getpass
import http.client
import json
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from jupyter_gpupool.broker.figures import DEADLINE, MAX_HEAD, MOST
from jupyter_gpupool.errors import RefusedError
from tests.ports import free_port

from .kit import BIG, SINGLE, Broker, MiB, remove, short_folder, wait_until

PREFIX = "jupyter_gpupool_"


def ask(port, path="/metrics", method="GET", **headers):
    """Send a request; return the status, the content type and the text of the answer."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type"), answer.read().decode()


def figures(port):
    """Return the value of each sample. Its key is the name without prefix, then the label values.

    The label values are in the order of the labels' names.
    """
    found = {}
    for family in read_text(ask(port)[2]):
        for name, labels, value, *_ in family.samples:
            found[(name.removeprefix(PREFIX), *(labels[k] for k in sorted(labels)))] = value
    return found


def listening(pid):
    """Return the addresses (as /proc/net writes them) on which a process listens for TCP."""
    inodes = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the process has closed the file meanwhile
            inodes.add(str(path.readlink()))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.append(fields[1])
    return found


def hangup(broker, port, **config):
    broker.configure(metrics_port=port, **config)
    broker.process.send_signal(signal.SIGHUP)


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def broker(make_broker, port, request):
    return make_broker(metrics_port=port, **getattr(request, "param", {})).started


def test_metrics_are_off_without_a_port(make_broker):
    broker = make_broker().started
    assert listening(broker.process.pid) == []
    code = (
        "import sys, jupyter_gpupool.broker.app\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('prometheus_client', 'tornado')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_metrics_with_a_port_listen_on_loopback_only(served):
    broker, port = served
    assert listening(broker.process.pid) == [f"0100007F:{port:04X}"]


def test_both_formats_are_valid_for_their_content_types(served):
    _, port = served
    # Figures of the devices appear with the first sample.
    wait_until(lambda: "device_used_bytes{" in ask(port)[2], "a sample of the devices", 60)
    status, kind, text = ask(port)
    assert (status, kind.split(";")[0]) == (200, "text/plain")
    plain = {f.name: f.type for f in read_text(text)}
    status, kind, text = ask(port, Accept="application/openmetrics-text;version=1.0.0,*/*;q=0.1")
    assert (status, kind.split(";")[0]) == (200, "application/openmetrics-text")
    strict = {f.name for f in read_openmetrics(text)}
    # The older format has no info metrics: each of them becomes a gauge whose name ends in _info.
    assert {name.removesuffix("_info") for name in plain} == strict
    assert all(name.startswith(PREFIX) for name in plain)
    assert "unknown" not in plain.values()
    # The broker also answers requests whose Accept header makes no sense.
    for odd in ("application/openmetrics-text;version=x", "text/plain;version=;;", ",;,", "\xe9"):
        assert ask(port, Accept=odd)[0] == 200


@pytest.fixture(scope="module")
def served():
    """Yield a broker and its metrics port. Only tests that change nothing use this broker."""
    folder = short_folder()
    broker = Broker(folder, metrics_port=free_port())
    yield broker.started, json.loads(broker.config_file.read_text())["GPUPool"]["metrics_port"]
    broker.close()
    print(broker.tail())
    remove(folder)


#: One device. The pool preempts no running work: on a slow machine, a preemption could end a wait
#: before the test has seen it.
ONE = {"emulate": "1x512MiB,context=32MiB", "preempt": []}


@pytest.mark.parametrize("broker", [ONE], indirect=True, ids=["one-device"])
def test_metrics_follow_a_session_from_wait_to_suspend(broker, port, kernel):
    (device,) = (d["uuid"] for d in broker.status()["devices"])

    def sees(seconds=30, **expected):
        """Wait until each named figure of the device or the pool has its expected value."""
        keys = {
            name: (name, device) if name.startswith("device_") else (name,) for name in expected
        }

        def found():
            now = figures(port)
            return all(expected[n] == now.get(key) for n, key in keys.items()) and now

        return wait_until(found, f"{expected}", seconds)

    def sessions(now):
        counts = {key[1:]: n for key, n in now.items() if key[0] == "pool_sessions"}
        return {(state, priority): n for (priority, state), n in counts.items() if n}

    first = sees(device_used_bytes=0)  # the broker takes a sample before the first session
    assert first["device_up", device] == 1
    assert first["device_capacity_bytes", device] == SINGLE
    assert first["device_granted_bytes", device] == first["device_suspend_seconds_count", device]
    assert first["device_attached_seconds_total", device] == 0
    assert first["pool_host_budget_bytes",] == 2 << 30
    assert first["pool_host_available_bytes",] > 0
    assert first["broker_process_resident_memory_bytes",] > 10 * MiB
    assert not sessions(first)

    one, two = kernel("one"), kernel("two", priority="interactive")
    one.attach()
    one.do("alloc", bytes=64 * MiB, byte=7)
    now = sees(device_granted_bytes=BIG, device_used_bytes=96 * MiB)
    assert sessions(now) == {("active", "notebook"): 1, ("detached", "interactive"): 1}
    assert now["device_free_bytes", device] == SINGLE - BIG
    assert now["device_foreign_bytes", device] == 0
    assert 0 <= now["device_utilisation_ratio", device] <= 1
    assert now["device_wait_seconds_count", device] == 1

    two.do("ask", hold="cell")
    now = sees(pool_queue_length=1)
    assert sessions(now)["queued", "interactive"] == 1
    waited = now["pool_oldest_wait_seconds",]
    wait_until(lambda: figures(port)["pool_oldest_wait_seconds",] > waited, "time to pass")

    one.do("drop", hold="cell")
    two.do("got", hold="cell")
    now = sees(pool_queue_length=0, pool_suspended_bytes=96 * MiB, pool_preemptions_total=1)
    assert now["device_suspends_total", "waiting", device] == 1
    assert now["device_suspends_total", "idle", device] == 0
    assert now["device_suspend_seconds_count", device] == 1
    assert now["device_wait_seconds_sum", device] >= waited
    assert now["pool_oldest_wait_seconds",] == 0

    two.do("drop", hold="cell")
    one.attach()
    sees(device_resumes_total=1, device_resume_seconds_count=1, device_wait_seconds_count=3)
    with pytest.raises(RefusedError):
        one.server.call("request", session=one.session, memory=1 << 50)
    now = wait_until(
        lambda: (
            (now := figures(port)).get(("pool_refusals_total", "over-device", "request")) and now
        ),
        "the refusal",
    )
    # The counter must be the sum of the attached seconds in the sessions' accounts.
    total = sum(s["attached_seconds_total"] for s in broker.status()["sessions"])
    assert now["device_attached_seconds_total", device] == pytest.approx(total, abs=30)
    one.close()
    two.close()
    sees(device_granted_bytes=0)
    ended = figures(port)["device_attached_seconds_total", device]
    kernel("later")  # if the metrics show this session, they are newer than the leases' end
    wait_until(lambda: figures(port)["pool_sessions", "notebook", "detached"] == 1, "a later page")
    assert figures(port)["device_attached_seconds_total", device] == ended > total


def test_metrics_contain_no_personal_data(broker, port, kernel):
    one = kernel("my-thesis")
    one.attach()
    wait_until(lambda: figures(port)["pool_sessions", "notebook", "active"] == 1, "the session")
    text = ask(port)[2]
    secret = (one.session, "my-thesis", "k-my-thesis", one.token, str(one.process.pid))
    labels = {v for f in read_text(text) for s in f.samples for v in s.labels.values()}
    assert not labels & {*secret, getpass.getuser()}
    assert not any(word in text for word in secret[:4])


def test_sighup_starts_moves_and_stops_the_metrics_port(make_broker, port):
    broker = make_broker().started
    hangup(broker, port)
    wait_until(lambda: listening(broker.process.pid), "on")
    assert ask(port)[0] == 200
    other = free_port()
    hangup(broker, other)
    wait_until(lambda: listening(broker.process.pid) == [f"0100007F:{other:04X}"], "over")
    assert ask(other)[0] == 200
    hangup(broker, 0)
    wait_until(lambda: not listening(broker.process.pid), "off")
    hangup(broker, port)
    wait_until(lambda: listening(broker.process.pid), "on again")
    assert ask(port)[0] == 200
    assert broker.stop() == 0
    assert "Traceback" not in broker.tail()


def test_port_in_use_is_logged_and_does_not_stop_the_pool(make_broker, port):
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        broker = make_broker(metrics_port=port).started
        assert f"port {port} of 127.0.0.1 cannot be used (Address already in use)" in broker.tail()
        assert "metrics are served nowhere" in broker.tail()
        assert len(broker.status()["devices"]) == 2
    hangup(broker, port)
    wait_until(lambda: listening(broker.process.pid), "the second try")
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        hangup(broker, taken.getsockname()[1])
        wait_until(lambda: f"at port {port} as before" in broker.tail(), "the complaint")
        assert ask(port)[0] == 200


def test_other_paths_and_methods_are_not_found(served):
    _, port = served
    paths = ("/", "/metrics/", "/metrics/x", "//metrics", "/%6detrics", "/../metrics")
    methods = ("POST", "HEAD", "PUT", "OPTIONS", "TRACE")
    for method, path in [*(("GET", p) for p in paths), *((m, "/metrics") for m in methods)]:
        status, _, text = ask(port, path, method)
        assert status == 404, (method, path)
        assert PREFIX not in text


RUBBISH = {
    "bytes": bytes(range(256)) * 8,
    "no-http": b"GET\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500) + b"\n\n",
    "version": b"GET /metrics HTTP/9.9\r\nHost: x\r\n\r\n",
    "header": b"GET /metrics HTTP/1.1\r\nno colon here\r\n\r\n",
    "long-head": b"GET /metrics HTTP/1.1\r\nX: " + b"x" * MAX_HEAD + b"\r\n\r\n",
    "body": b"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n123456789",
    "length": b"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    "chunks": b"GET /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12345",
}


def test_rubbish_is_refused_without_a_line_in_the_log(served):
    broker, port = served
    before = broker.tail()
    for name, data in RUBBISH.items():
        with closing(socket.create_connection(("127.0.0.1", port), 20)) as client:
            answer = b""
            # The broker may also refuse the data by a reset of the connection.
            with suppress(ConnectionResetError, BrokenPipeError):
                client.sendall(data)
                while part := client.recv(65536):
                    answer += part
        assert PREFIX.encode() not in answer, name
        assert not answer or answer.split()[1] == b"400", name
        assert ask(port)[0] == 200
    assert broker.tail() == before


def test_stalled_clients_are_closed_and_delay_no_other_client(served):
    broker, port = served
    with ExitStack() as stack:
        stalled = []
        for number in range(MOST + 8):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
            client.sendall((b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: x\r\n")[number % 3])
            stalled.append(client)
            assert ask(port)[0] == 200
        broker.status()
        # The broker sent the answers above although the last client still stalls.
        stalled[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            stalled[-1].recv(1)
        for client in stalled:  # a newer client or the deadline has closed its connection
            client.settimeout(DEADLINE + 10)
            try:
                assert client.recv(1) == b""
            except ConnectionResetError:
                pass
    assert ask(port)[0] == 200
    assert "Traceback" not in broker.tail()
