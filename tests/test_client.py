# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The client, with a server that sends exactly the bytes that the test chooses."""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import signal
import socket
import threading
import time

import pytest

from jupyter_gpupool import client as client_module
from jupyter_gpupool import starting
from jupyter_gpupool.client import Client, ClientAgain
from jupyter_gpupool.endpoint import dial
from jupyter_gpupool.errors import BrokerUnavailable, RefusedError
from jupyter_gpupool.protocol import decode, encode


class Server:
    """A listening socket; the test reads the requests and writes any answer."""

    def __init__(self, path):
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.listener.settimeout(10)

    def accept(self):
        self.peer, _ = self.listener.accept()
        self.peer.settimeout(10)
        self.lines = self.peer.makefile("rb")

    def read(self):
        return decode(self.lines.readline())

    def write(self, **message):
        self.peer.sendall(encode(message))

    def close(self):
        self.lines.close()
        self.peer.close()
        self.listener.close()


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path / "s")
    yield server
    server.close()


@pytest.fixture
def pushes():
    return queue.Queue()


@pytest.fixture
def client(server, pushes):
    with Client(server.path, on_push=pushes.put, on_close=pushes.put) as client:
        server.accept()
        yield client


def test_answers_reach_their_calls_in_any_order(server, client):
    first, second = client.start("ping"), client.start("status")
    one, two = server.read(), server.read()
    server.write(type="ok", id=two["id"], n=2)
    server.write(type="ok", id=one["id"], n=1)
    assert (first.result(10)["n"], second.result(10)["n"]) == (1, 2)


def test_a_refusal_is_raised_with_its_code(server, client):
    future = client.start("release")
    server.write(
        type="error", id=server.read()["id"], code="unknown-session", message="M.", next_step="N."
    )
    with pytest.raises(RefusedError, match=r"M\. N\.") as caught:
        future.result(10)
    assert caught.value.code == "unknown-session"


def test_pushed_lines_that_arrive_in_pieces_are_joined(server, client, pushes):
    line = encode({"type": "queue", "position": 2})
    server.peer.sendall(line[:5])
    server.peer.sendall(line[5:] + line)
    assert [pushes.get(timeout=60)["position"] for _ in range(2)] == [2, 2]


def test_messages_without_an_answer_have_no_id(server, client):
    client.send("drop", hold="h")
    assert server.read() == {"v": 1, "type": "drop", "hold": "h"}


def test_waiting_calls_end_when_the_broker_goes_away(server, client, pushes):
    futures = [client.start("ping") for _ in range(3)]
    server.lines.close()
    server.peer.close()
    for future in futures:
        with pytest.raises(BrokerUnavailable):
            future.result(10)
    assert isinstance(pushes.get(timeout=60), BrokerUnavailable)
    assert client.closed
    with pytest.raises(BrokerUnavailable):
        client.call("ping")
    with pytest.raises(BrokerUnavailable):
        client.send("drop", hold="h")
    assert pushes.empty()


def test_malformed_input_closes_the_connection_with_a_reason(server, client, pushes):
    server.peer.sendall(b"SSH-2.0-OpenSSH\n")
    assert "does not follow the protocol" in str(pushes.get(timeout=60))


def test_call_without_an_answer_times_out_with_a_reason(server, client):
    with pytest.raises(BrokerUnavailable, match="did not answer 'ping'"):
        client.call("ping", timeout=0.01)


def test_a_late_answer_to_a_cancelled_call_is_ignored(server, client):
    late = client.start("ping")
    assert late.cancel()
    server.write(type="ok", id=server.read()["id"])
    again = client.start("ping")
    server.write(type="ok", id=server.read()["id"])
    assert again.result(10)["type"] == "ok"


def test_close_from_the_reader_thread_does_not_deadlock(server, pushes):
    done = threading.Event()

    def close_it(_):
        client.close()
        done.set()

    client = Client(server.path, on_push=close_it)
    server.accept()
    server.write(type="queue")
    assert done.wait(60)


def test_socket_file_without_a_broker_is_reported(tmp_path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead"))
    with pytest.raises(BrokerUnavailable, match="cannot be reached"):
        Client(tmp_path / "dead")


# ---------------------------------------------------------------- a busy broker


def test_client_waits_while_the_listen_queue_is_full(tmp_path):
    """Other clients have filled the listen queue. The client waits until a place in it is free."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        others = []
        with contextlib.suppress(BlockingIOError):
            while True:
                others.append(socket.socket(socket.AF_UNIX))
                others[-1].setblocking(False)
                others[-1].connect(str(path))
        made = []
        threads = [
            threading.Thread(target=lambda: made.append(Client(path)), daemon=True)
            for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        accepted = []
        listener.settimeout(0.1)
        while any(thread.is_alive() for thread in threads):
            with contextlib.suppress(TimeoutError):
                accepted.append(listener.accept()[0])
        assert len(made) == 5
        for one in (*accepted, *others, *made):
            one.close()


def test_signal_during_connect_does_not_count_as_connected(tmp_path):
    """If a signal interrupts ``connect``, Python reports success, but the call has failed."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        first = dial(path, 5)
        signals: list[int] = []
        before = signal.signal(signal.SIGALRM, lambda *_: signals.append(1))
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
            with pytest.raises(BlockingIOError):
                dial(path, 0.5)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert signals
        first.close()


def test_request_is_repeated_while_the_broker_is_busy(server, client):
    future = concurrent.futures.ThreadPoolExecutor(1).submit(client.call, "status")
    server.write(
        type="error", id=server.read()["id"], code="busy", message="M.",
        details={"retry_after": 0.01},
    )  # fmt: skip
    server.write(type="ok", id=server.read()["id"], n=3)
    assert future.result(30)["n"] == 3


def test_request_to_a_busy_broker_fails_after_the_time_out(server, client):
    future = concurrent.futures.ThreadPoolExecutor(1).submit(client.call, "status", timeout=1)
    server.write(
        type="error", id=server.read()["id"], code="busy", message="M.",
        details={"retry_after": 60},
    )  # fmt: skip
    with pytest.raises(RefusedError) as caught:
        future.result(30)
    assert caught.value.code == "busy"


def test_error_has_the_brokers_reason_for_closing(server, client):
    future = client.start("ping")
    server.read()
    server.write(type="error", id=None, code="too-many", message="Too many.", next_step="Fewer.")
    server.close()
    with pytest.raises(BrokerUnavailable, match=r"The broker's last message: Too many\. Fewer\."):
        future.result(30)


def test_call_waits_for_a_machine_wide_broker_that_starts(tmp_path, monkeypatch):
    """The service manager's socket accepts connections before the broker has started.

    So the client connects at once, and must wait for its answer.
    """
    monkeypatch.setattr(client_module, "is_machine_path", lambda _: True, raising=False)
    monkeypatch.setattr(client_module, "CALL_TIMEOUT", 0.001)
    # Python evaluated the default of the parameter ``timeout`` when it imported the module, so the
    # test must also change this default.
    monkeypatch.setitem(Client.call.__kwdefaults__, "timeout", 0.001)
    asks = (
        lambda path: ClientAgain(lambda: path, timeout=60).call("ping")["type"] == "ok",
        starting.answers,
    )
    for number, ask in enumerate(asks):
        server = Server(tmp_path / f"s{number}")
        with contextlib.closing(server), concurrent.futures.ThreadPoolExecutor() as pool:
            answer = pool.submit(ask, server.path)
            server.accept()
            request = server.read()
            time.sleep(0.05)  # longer than the time-out of a call, on any machine
            server.write(type="ok", id=request["id"])
            assert answer.result(60)
