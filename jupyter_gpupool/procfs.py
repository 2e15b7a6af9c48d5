# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What /proc says: who a process is, whether it may be touched, and who belongs to a session.

Standard library only. Reading ``environ`` or ``maps`` of a process can block while that process
is being suspended (it takes the lock of its address space), so these run in a child process that
can be killed, not in the broker.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

#: Set in the environment of a session's kernel; whatever it starts inherits it.
SESSION_VARIABLE = "GPUPOOL_SESSION"

Presence = Literal["alive", "stopped", "gone"]

_PROC = Path("/proc")

#: In the path of a process's mapping of the guard, which is never that of its link.
_GUARD = b"/jupyter_gpupool/guard/lib/"

#: What says nothing about a process: we have no descriptor or no memory left.
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})

#: In ``flags``: the first thread is past the point of no return.
_PF_EXITING = 0x4


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process, safe against reuse of its number."""

    pid: int
    #: Field 22 of ``/proc/<pid>/stat``: clock ticks between boot and the start of the process.
    start_time: int


@dataclass(frozen=True, slots=True)
class Stat:
    """The part of ``/proc/<pid>/stat`` (proc_pid_stat(5)) that matters here."""

    pid: int
    #: R running, S sleeping, D disk, T stopped, t traced, Z zombie, X dead, I idle.
    state: str
    parent: int
    #: PF_* of the kernel's sched.h.
    flags: int
    threads: int
    start_time: int

    @property
    def identity(self) -> ProcessId:
        """The process, safe against reuse of its number."""
        return ProcessId(self.pid, self.start_time)

    @property
    def presence(self) -> Presence:
        """Whether it can answer. A stopped process makes every checkpoint call on it hang."""
        # A zombie with threads is only a first thread that ended: the process lives on.
        if self.state == "X" or (self.state == "Z" and self.threads <= 1):
            return "gone"
        return "stopped" if self.state in "Tt" else "alive"


@dataclass(frozen=True, slots=True)
class Member:
    """One process of a session."""

    process: ProcessId
    presence: Presence
    #: The CUDA driver library is mapped; None if its map cannot be read. Without the library
    #: there is no context; with it, only the driver can tell.
    libcuda: bool | None


def parse_stat(text: str) -> Stat:
    """Parse one ``stat`` line. The name, second field, may hold blanks and brackets."""
    pid = int(text[: text.index(" ")])
    fields = text[text.rindex(")") + 2 :].split()
    return Stat(
        pid=pid,
        state=fields[0],
        parent=int(fields[1]),
        flags=int(fields[6]),
        threads=int(fields[17]),
        start_time=int(fields[19]),
    )


def read_stat(pid: int) -> Stat | None:
    """Return the stat of process ``pid``, None if there is none."""
    try:
        return parse_stat(_read(pid, "stat").decode(errors="replace"))
    except (OSError, ValueError, IndexError):
        return None  # ended before or while it was read


def identify(pid: int) -> ProcessId | None:
    """Return the identity of the live process ``pid``, None if there is none."""
    stat = read_stat(pid)
    return None if stat is None or stat.presence == "gone" else stat.identity


def presence(process: ProcessId) -> Presence:
    """Tell whether ``process`` (and no later one of the same number) is there and can answer.

    Where that cannot be read for want of a descriptor, a process that exists is alive: nobody must
    be taken for dead because we are short of something.
    """
    try:
        stat = parse_stat(_read(process.pid, "stat").decode(errors="replace"))
    except OSError as error:
        there = error.errno in _EXHAUSTED and _exists(process.pid)
        return "alive" if there else "gone"
    except (ValueError, IndexError):
        return "gone"
    return stat.presence if stat.start_time == process.start_time else "gone"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's
    return True


def resident(process: ProcessId) -> tuple[int, int]:
    """Return the host memory that a process has, in bytes, and the part that it shares.

    The kernel reads this without the lock that a suspend may hold for long.
    """
    try:
        _, all_of_it, shared, *_ = map(int, _read(process.pid, "statm").split())
    except (OSError, ValueError):
        return 0, 0
    page = os.sysconf("SC_PAGE_SIZE")
    return all_of_it * page, shared * page


def ending(process: ProcessId) -> bool:
    """Tell whether ``process`` has ended or is about to: nothing stops it any more.

    It may hold device memory for a while yet: giving back many GiB takes the kernel seconds.
    """
    if presence(process) == "gone":
        return True
    stat = read_stat(process.pid)
    if stat is not None and stat.flags & _PF_EXITING:
        return True
    try:
        status = _read(process.pid, "status").decode(errors="replace")
    except OSError:
        return True
    pending = re.findall(r"^(?:SigPnd|ShdPnd):\s*([0-9a-f]+)$", status, re.MULTILINE)
    return any(int(mask, 16) >> (signal.SIGKILL - 1) & 1 for mask in pending)


def session_of(pid: int) -> str | None:
    """Return the session in the environment that ``pid`` was started with.

    Empty if there is none, None if the environment cannot be read (ended, or another user's).
    """
    try:
        environ = _read(pid, "environ")
    except OSError:
        return None
    prefix = SESSION_VARIABLE.encode() + b"="
    for entry in environ.split(b"\0"):
        if entry.startswith(prefix):
            return os.fsdecode(entry[len(prefix) :])
    return ""


def maps_libcuda(pid: int) -> bool | None:
    """Tell whether the CUDA driver library is mapped into ``pid``; None if that cannot be read.

    The guard has the driver's name, and every shell of a session has it; it loads the driver
    itself only for who calls it.
    """
    try:
        with open(_PROC / str(pid) / "maps", "rb") as maps:
            return any(b"/libcuda.so" in line and _GUARD not in line for line in maps)
    except OSError:
        return None


class _Spare:
    """One descriptor in reserve: a process that has no other left must still know who lives."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = -1

    def keep(self) -> None:
        """Hold one from now on, if there is one to be had."""
        with self._lock:
            self._take()

    def open(self, path: str, error: OSError) -> int:
        """Open a file in the place of the spare descriptor, or raise ``error`` if there is none."""
        with self._lock:
            if self._fd < 0:
                raise error
            os.close(self._fd)
            self._fd = -1
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def _take(self) -> None:
        if self._fd < 0:
            try:
                self._fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                pass


spare = _Spare()


def _read(pid: int, name: str) -> bytes:
    path = f"{_PROC}/{pid}/{name}"
    try:
        # A plain open() is three times as slow, and this is done for every process of the machine.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in _EXHAUSTED:
            raise
        try:
            return _read_all(spare.open(path, error))
        finally:
            spare.keep()
    return _read_all(fd)


def _read_all(fd: int) -> bytes:
    try:
        chunks = [chunk := os.read(fd, 8192)]
        while len(chunk) > 0:
            chunks.append(chunk := os.read(fd, 1 << 16))
        return b"".join(chunks)
    finally:
        os.close(fd)


def all_pids() -> frozenset[int]:
    """Return the numbers of all processes there are now."""
    return frozenset(int(name) for name in os.listdir(_PROC) if name.isdigit())  # noqa: PTH208


def _all_stats() -> dict[int, Stat]:
    stats = (read_stat(pid) for pid in all_pids())
    return {stat.pid: stat for stat in stats if stat is not None and stat.presence != "gone"}


def _depth(stat: Stat, stats: dict[int, Stat], root: int) -> int | None:
    """Return how far below ``root`` a process is, None if it is not below."""
    depth, pid, seen = 0, stat.pid, {stat.pid}
    while pid != root:
        above = stats.get(pid)
        if above is None or above.parent in seen:
            return None
        pid, depth = above.parent, depth + 1
        seen.add(pid)
    return depth


def _owner(pid: int) -> int | None:
    try:
        return (_PROC / str(pid)).stat().st_uid
    except OSError:
        return None


def _passes(stat: Stat, stats: dict[int, Stat], broker: int, root: int) -> bool:
    """Return whether ``broker`` is the process or above it, and not above ``root``."""
    pid, seen = stat.pid, set[int]()
    while pid not in seen and pid != root:
        if pid == broker:
            return True
        seen.add(pid)
        above = stats.get(pid)
        if above is None:
            return False
        pid = above.parent
    return False


def session_members(root: ProcessId, session: str, broker: int = 0) -> list[Member]:
    """Return the live processes of a session, children before their parents, ``root`` last.

    These are ``root`` and its descendants, unless started for another session (a notebook may run
    a second pooled kernel), and processes of the same user whose environment names ``session``
    (their parent has ended, or they went to the background). Empty if ``root`` has ended.

    ``broker`` never belongs to a session, nor does what is below it, unless that names the session
    by itself: a notebook may have started the broker, and a broker may get a notebook's orphans.
    """
    if not session:  # or every process of the user without the variable would belong
        raise ValueError("A session must have a name.")
    stats = _all_stats()
    top = stats.get(root.pid)
    if top is None or top.start_time != root.start_time:
        return []
    owner = _owner(root.pid)
    found: list[tuple[int, int, Stat]] = []
    for stat in stats.values():
        depth = _depth(stat, stats, root.pid)
        if stat.pid == root.pid:
            found.append((0, stat.start_time, stat))
            continue
        # Only that user's word counts: anybody may put anything into an environment. And who
        # was there before the root was not started by it.
        if depth is None and (stat.start_time < root.start_time or _owner(stat.pid) != owner):
            continue
        beside = depth is None and stat.pid != broker
        if broker and not beside and _passes(stat, stats, broker, root.pid):
            continue
        named = session_of(stat.pid)
        if named == session or (depth is not None and not named):
            # An orphan's place in the tree is lost; it may be a child of anything but root.
            found.append((1 << 20 if depth is None else depth, stat.start_time, stat))
    found.sort(key=lambda item: item[:2], reverse=True)
    return [Member(stat.identity, stat.presence, maps_libcuda(stat.pid)) for *_, stat in found]


def look_again(members: list[Member]) -> list[Member]:
    """Return those of ``members`` that are still there, as they now are."""
    now = [(member.process, presence(member.process)) for member in members]
    return [Member(p, there, maps_libcuda(p.pid)) for p, there in now if there != "gone"]
