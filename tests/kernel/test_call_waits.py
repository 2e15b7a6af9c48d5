# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The threads of ``CallWaits`` in rare orders, without a kernel."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable

import pytest

from jupyter_gpupool.kernel import call_waits
from jupyter_gpupool.kernel.call_waits import CallWaits
from jupyter_gpupool.kernel.link import SessionLink


class Publisher:
    """The parts of a kernel that CallWaits uses. It collects the published messages."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.published = threading.Event()
        self.session = SimpleNamespace(send=self._send)
        self.iopub_socket = None
        self.iopub_thread = SimpleNamespace(schedule=lambda call: call(), socket=None)

    def _send(self, stream: Any, kind: str, content: Any, parent: Any) -> None:
        self.kinds.append(kind)
        self.published.set()

    def get_parent(self) -> dict[str, Any]:
        return {"header": {"msg_id": "m1"}}


@pytest.fixture
def kernel() -> Publisher:
    return Publisher()


@pytest.fixture
def calls(kernel: Publisher, monkeypatch: pytest.MonkeyPatch) -> CallWaits:
    """Return the CallWaits of a kernel whose call waits. The test starts its thread."""
    monkeypatch.setattr(call_waits, "PATIENCE", 0.0)
    monkeypatch.setattr(call_waits, "start_thread", lambda thread: None)
    guard: Any = SimpleNamespace(waiting=lambda: 1, held=lambda: False)
    found = CallWaits(kernel, SessionLink(Path("/none/b.sock"), "s1", "token"), guard)
    found.install()
    return found


class WatchedLock:
    """A lock that calls ``tried`` when a thread other than the test's wants it."""

    def __init__(self, tried: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._mine = threading.current_thread()
        self._tried = tried

    def __enter__(self) -> None:
        if threading.current_thread() is not self._mine:
            self._tried()
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def test_line_is_cleared_if_its_cell_ends_meanwhile(
    calls: CallWaits, kernel: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = calls.begin(silent=False)
    reached = threading.Event()

    def end() -> None:
        calls.end(key)
        reached.set()

    ending = threading.Thread(target=end, daemon=True)
    oldest = calls._oldest

    def found_then_ended() -> Any:
        found = oldest()
        ending.start()
        assert reached.wait(60)  # the cell has ended, or its end waits for the lock
        return found

    monkeypatch.setattr(calls, "_lock", WatchedLock(reached.set))
    monkeypatch.setattr(calls, "_oldest", found_then_ended)
    calls._show()
    ending.join(60)
    assert kernel.kinds == ["display_data", "clear_output"]


def test_push_between_two_cells_is_not_lost(calls: CallWaits, kernel: Publisher) -> None:
    """The thread has seen that no cell runs; then a cell begins, and its call waits."""
    begun = []

    class News(threading.Event):
        def clear(self) -> None:
            if not begun:
                begun.append(calls.begin(silent=False))
                calls.news()
            super().clear()

    calls._news = News()
    key = calls.begin(silent=False)
    calls.news()
    calls.end(key)
    thread = calls._thread
    assert thread is not None
    thread.start()
    try:
        assert kernel.published.wait(60)
    finally:
        calls.uninstall()
        thread.join(60)
    assert kernel.kinds[0] == "display_data"
