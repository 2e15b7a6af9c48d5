# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Tests of the link without a kernel, in situations that are rare with a real kernel."""

from __future__ import annotations

import socket
import threading

import pytest
from scripted_broker import ScriptedBroker

from jupyter_gpupool import client as client_module
from jupyter_gpupool.client import Client
from jupyter_gpupool.errors import BrokerUnavailable
from jupyter_gpupool.kernel import link as link_module
from jupyter_gpupool.kernel import revive
from jupyter_gpupool.kernel.link import SessionLink
from jupyter_gpupool.protocol import decode, encode


@pytest.fixture
def link_threads():
    """Return a function that lists the threads of this package that the test has started."""
    before = set(threading.enumerate())

    def started() -> list[threading.Thread]:
        new = set(threading.enumerate()) - before
        return [t for t in new if t.name.startswith("gpupool-")]

    return started


def test_closing_a_link_ends_its_threads(broker: ScriptedBroker, link_threads) -> None:
    link = SessionLink(broker.path, "s1", "token")
    link.start()
    broker.wait_for("hello")
    link.close()
    assert link_threads() == []


def test_closing_a_link_without_a_broker_ends_its_threads(
    broker: ScriptedBroker, link_threads
) -> None:
    broker.die()
    link = SessionLink(broker.path, "s1", "token")
    link.start()
    link.close()
    assert link_threads() == []


def quick_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay the return of the call that sends a hold until the broker's answer has arrived."""
    start = Client.start

    def started(self, kind, /, **fields):
        future = start(self, kind, **fields)
        if kind == "hold":
            future.exception(20)
        return future

    monkeypatch.setattr(Client, "start", started)


def test_link_repeats_all_waiting_requests_after_a_reconnect(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick_answers(monkeypatch)
    broker.die()
    link = SessionLink(broker.path, "s1", "token")
    link.start()
    try:
        changed = threading.Event()
        waits = [link.wait(f"h{n}", "cell", changed.set) for n in range(3)]
        broker.start()
        while any(wait.answer is None for wait in waits):
            assert changed.wait(60)
            changed.clear()
        assert link.attached
    finally:
        link.close()


def test_late_end_of_an_old_connection_keeps_the_new_connection(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread may notice the end of an old connection only after the link has a new connection."""
    ends = []

    def connect(path, *, on_push, on_close):
        ends.append(on_close)
        return Client(path, on_push=on_push, on_close=on_close)

    monkeypatch.setattr("jupyter_gpupool.kernel.link.Client", connect)
    link = SessionLink(broker.path, "s1", "token")
    link.start()
    try:
        broker.wait_for("hello")
        link.call("status")
        broker.die()
        broker.start()
        broker.wait_for("hello", count=2)
        link.call("status")
        ends[0](BrokerUnavailable("The broker closed the connection."))
        assert link.down is None
        assert link.unreachable_for() == 0.0
        link.call("status")
        assert len(broker.seen("hello")) == 2
    finally:
        link.close()


def test_exception_in_the_agent_does_not_end_the_connection(
    broker: ScriptedBroker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    link_threads,
) -> None:
    greeted = threading.Event()
    welcome = SessionLink._welcome
    faults = iter([RuntimeError("a fault of ours")])

    def failing(self, answer):
        for fault in faults:
            raise fault
        welcome(self, answer)
        greeted.set()

    monkeypatch.setattr(SessionLink, "_welcome", failing)
    link = SessionLink(broker.path, "s1", "token")
    link.start()
    try:
        assert greeted.wait(60)
        broker.wait_for("hello", count=2)
        assert link.down is None
        assert "a fault of ours" in caplog.text
    finally:
        link.close()
    assert link_threads() == []


def test_link_keeps_its_connection_while_the_broker_starts(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the broker starts, the service manager listens on the socket.

    The link must not connect again, because each connection takes a place in the socket's queue.
    """
    broker.die()
    monkeypatch.setattr(revive, "is_machine_path", lambda _: True)
    monkeypatch.setattr(client_module, "is_machine_path", lambda _: True, raising=False)
    for module in (client_module, link_module):
        monkeypatch.setattr(module, "CALL_TIMEOUT", 0.01)
    with socket.socket(socket.AF_UNIX) as given:
        given.bind(str(broker.path))
        given.listen()
        link = SessionLink(broker.path, "s1", "token")
        link.start()
        wait = link.wait("h", "cell", lambda: None)
        connection, _ = given.accept()
        with connection:
            hello = decode(connection.recv(65536))
            connection.settimeout(0.3)
            # The link sends nothing and keeps the connection open. If a slow link closes it after
            # these 0.3 s, this check misses the fault.
            with pytest.raises(TimeoutError):
                connection.recv(1)
            assert not link.given_up(wait)
            connection.sendall(encode({**broker._on_hello(hello), "type": "ok", "id": hello["id"]}))
            connection.settimeout(60)
            assert decode(connection.recv(65536))["hold"] == "h"
            link.close()
