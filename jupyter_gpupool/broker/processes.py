# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Who a process is, from whom it descends, and the moment it ends. Linux ``/proc`` and pidfd."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Callable, Iterable

from ..procfs import ProcessId, identify, presence, read_stat

__all__ = ["Death", "alive", "descendants", "descends", "identify", "kill", "real_uid"]

#: Seconds between looks at ``/proc`` where the kernel has no pidfd (before Linux 5.3).
POLL = 0.25

#: A chain of parents longer than this is not a notebook's.
MAX_DEPTH = 64


def alive(process: ProcessId) -> bool:
    """Return whether this very process (not a later one with its pid) still runs."""
    return presence(process) != "gone"


def real_uid(pid: int) -> int | None:
    """Return the real user id, or None if the process has ended.

    Read from ``status``: the owner of the ``/proc/<pid>`` folder is root for a process that has
    made itself undumpable.
    """
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"Uid:"):
                    return int(line.split()[1])
    except OSError:
        pass
    return None


def descends(pid: int, root: ProcessId) -> bool:
    """Return whether ``pid`` is ``root`` or one of its living descendants."""
    for _ in range(MAX_DEPTH):
        if pid == root.pid:
            return alive(root)
        if pid <= 1:
            return False
        stat = read_stat(pid)
        pid = 0 if stat is None else stat.parent
    return False


def ancestry(pid: int) -> list[ProcessId]:
    """Return the living process ``pid`` and those above it, the nearest first."""
    found = []
    for _ in range(MAX_DEPTH):
        stat = read_stat(pid) if pid > 1 else None
        if stat is None:
            break
        if stat.presence != "gone":
            found.append(stat.identity)
        pid = stat.parent
    return found


def descendants(root: ProcessId) -> list[ProcessId]:
    """Return the living descendants of ``root``, parents before children, without ``root``.

    This process and what is below it are left out: a notebook may have started its broker.
    """
    if not alive(root):
        return []
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            stat = read_stat(int(entry.name))
            if stat is not None:
                children.setdefault(stat.parent, []).append(stat.pid)
    found: list[ProcessId] = []
    todo = list(children.get(root.pid, ()))
    while todo:
        pid = todo.pop(0)
        if pid == os.getpid():
            continue
        process = identify(pid)
        if process is not None:
            found.append(process)
        todo += children.get(pid, ())
    return found


def kill(processes: Iterable[ProcessId]) -> list[str]:
    """Send SIGKILL to each, by identity; return a sentence for each that could not be ended."""
    problems = []
    for process in processes:
        try:
            _kill(process)
        except ProcessLookupError:
            continue
        except OSError as error:
            problems.append(f"Process {process.pid} could not be ended: {error.strerror}.")
    return problems


def _kill(process: ProcessId) -> None:
    """End this very process: a pidfd, once its start time was compared, cannot mean another."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # an old kernel, or no descriptor left
        if alive(process):
            os.kill(process.pid, signal.SIGKILL)
        return
    try:
        if alive(process):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    finally:
        os.close(descriptor)


class Death:
    """Calls ``on_death`` once, from the event loop, when ``process`` has ended.

    Not to be confused with the agent's connection: a child of the kernel can keep that open.
    """

    def __init__(self, process: ProcessId, on_death: Callable[[], None]) -> None:
        self.process = process
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._descriptor: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        try:
            self._descriptor = os.pidfd_open(process.pid)
            self._loop.add_reader(self._descriptor, self._ended)
        except (AttributeError, OSError):
            self._timer = self._loop.call_later(POLL, self._look)
        # The pid may have been reused between its identification and pidfd_open.
        if not alive(process):
            self._loop.call_soon(self._ended)

    def close(self) -> None:
        """Stop watching. Safe to call twice."""
        self._on_death = _nothing
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def _look(self) -> None:
        if alive(self.process):
            self._timer = self._loop.call_later(POLL, self._look)
        else:
            self._ended()

    def _ended(self) -> None:
        report, self._on_death = self._on_death, _nothing
        self.close()
        report()


def _nothing() -> None:
    pass
