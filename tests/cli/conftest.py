# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Fixtures: a broker whose answers each test sets, and a machine without configuration files."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

import pytest
from snapshots import pool

from jupyter_gpupool.config import loading
from jupyter_gpupool.protocol import decode, encode


class Broker:
    """A broker that answers each request with ``answers[type]``.

    A value of ``answers`` has the fields of an ``ok`` message, or is an error message. If
    ``snapshots`` is not empty, each status request gets the next snapshot. The last snapshot
    repeats. If a snapshot is None, the broker does not answer and closes the connection.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: dict[str, dict] = {"status": pool()}
        self.snapshots: list[dict | None] = []
        self.requests: list[dict] = []
        self.asked = threading.Condition()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept)]
        self._peers: list[socket.socket] = []
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                self._peers.append(peer)
                self._threads.append(threading.Thread(target=self._serve, args=(peer,)))
                self._threads[-1].start()

    def _serve(self, peer: socket.socket) -> None:
        with peer, peer.makefile("rb") as lines, contextlib.suppress(OSError):
            for line in lines:
                request = decode(line)
                with self.asked:
                    self.requests.append(request)
                    self.asked.notify_all()
                answer = self.answers[request["type"]]
                if request["type"] == "status" and self.snapshots:
                    answer = self.snapshots[0]
                    if len(self.snapshots) > 1:
                        self.snapshots.pop(0)
                    if answer is None:
                        peer.shutdown(socket.SHUT_RDWR)
                        return
                peer.sendall(encode({"type": "ok", **answer, "id": request["id"]}))

    def wait_for(self, number: int) -> None:
        """Wait until the broker has read ``number`` requests."""
        with self.asked:
            assert self.asked.wait_for(lambda: len(self.requests) >= number, timeout=30)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture(autouse=True)
def no_configuration(tmp_path, monkeypatch):
    """Hide this machine's configuration files and brokers from the test."""
    monkeypatch.setattr(loading, "jupyter_config_path", lambda: [str(tmp_path / "config")])
    monkeypatch.delenv("GPUPOOL_EMULATE", raising=False)
    monkeypatch.setenv("GPUPOOL_SOCKET", str(tmp_path / "s"))
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "config").mkdir()
    return tmp_path / "config"


@pytest.fixture
def broker(tmp_path):
    broker = Broker(tmp_path / "s")
    yield broker
    broker.close()
