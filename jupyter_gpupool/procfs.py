# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Processes in ``/proc``: their identity, state, ancestors and open files; and how to end them.

Only this module reads ``/proc/<pid>``. It imports only the standard library, because kernels also
use it. A suspend holds the lock of a process's address space. A read of the process's ``environ``
or ``maps`` can then block, so do not read these files on the broker's event loop.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Iterable, Iterator, Literal

#: The environment variable with the session's id. A kernel or program of the pool has this
#: variable, and its child processes inherit the variable.
SESSION_VARIABLE = "GPUPOOL_SESSION"

Presence = Literal["alive", "stopped", "gone"]

PROC = Path("/proc")

#: A read in ``/proc`` fails with one of these errors if descriptors or memory are short. Such an
#: error does not show whether the process that is read exists.
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})

#: The search for a process's ancestors stops after this many steps. The processes of notebooks have
#: fewer ancestors.
MAX_DEPTH = 64

#: Some machines count a thread's run time only in clock ticks (gVisor, or a Linux that was built
#: without ``schedstat``). This module then takes each counted tick as this many nanoseconds of run
#: time. The value is half a tick, because Linux may count two ticks for a thread that has run for
#: only one.
_TICK = 500_000_000 // os.sysconf("SC_CLK_TCK")

#: In ``flags``: the first thread is exiting.
_PF_EXITING = 0x4


@dataclass(frozen=True, slots=True)
class ProcessId:
    """The identity of a process, which stays unique if Linux reuses the pid."""

    pid: int
    #: Field 22 of ``/proc/<pid>/stat``: clock ticks between boot and the start of the process.
    start_time: int


@dataclass(frozen=True, slots=True)
class Stat:
    """The fields of ``/proc/<pid>/stat`` (proc_pid_stat(5)) that this package uses."""

    pid: int
    #: R running, S sleeping, D disk, T stopped, t traced, Z zombie, X dead, I idle.
    state: str
    parent: int
    #: The flags PF_* of Linux's sched.h.
    flags: int
    threads: int
    start_time: int

    @property
    def identity(self) -> ProcessId:
        """The identity of the process, which stays unique if Linux reuses the pid."""
        return ProcessId(self.pid, self.start_time)

    @property
    def presence(self) -> Presence:
        """Whether the process is alive, stopped or gone.

        Every checkpoint call on a stopped process hangs.
        """
        # A process is a zombie as soon as its first thread has ended. If it has other threads, it
        # still runs.
        if self.state == "X" or (self.state == "Z" and self.threads <= 1):
            return "gone"
        return "stopped" if self.state in "Tt" else "alive"


def parse_stat(text: str) -> Stat:
    """Parse one ``stat`` line. The second field, the name, may contain blanks and brackets."""
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
    """Return the stat of process ``pid``; None if there is no such process."""
    try:
        return parse_stat(_read(pid, "stat").decode(errors="replace"))
    except (OSError, ValueError, IndexError):
        return None  # the process ended before or while its file was read


def identify(pid: int) -> ProcessId | None:
    """Return the identity of the live process ``pid``; None if there is no such process."""
    stat = read_stat(pid)
    return None if stat is None or stat.presence == "gone" else stat.identity


def presence(process: ProcessId) -> Presence:
    """Return whether ``process`` (not a later process with its pid) is alive, stopped or gone.

    Without a free descriptor, this function cannot read the state of ``process``. It then returns
    "alive" if the pid exists. Otherwise the broker would end sessions only because it has no free
    descriptor itself.
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
        pass  # the process belongs to another user
    return True


def resident(process: ProcessId) -> tuple[int, int]:
    """Return a process's host memory, and the shared part of this memory, both in bytes.

    This read does not need the lock of the address space, which a suspend can hold for a long time.
    """
    try:
        _, all_of_it, shared, *_ = map(int, _read(process.pid, "statm").split())
    except (OSError, ValueError):
        return 0, 0
    page = os.sysconf("SC_PAGE_SIZE")
    return all_of_it * page, shared * page


def ending(process: ProcessId) -> bool:
    """Return whether ``process`` has ended or will certainly end.

    A process that has ended may still hold device memory: Linux takes seconds to release many GiB.
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


def variables(pid: int, names: Iterable[str]) -> dict[str, str] | None:
    """Return the variables among ``names`` that the initial environment of ``pid`` has.

    None if the environment cannot be read: the process has ended, or belongs to another user.
    """
    try:
        environ = b"\0" + _read(pid, "environ")
    except OSError:
        return None
    found = {}
    for name in names:
        # Each suspend reads the environment of every process. A search for each name is faster than
        # a dictionary of all variables.
        _, there, rest = environ.rpartition(f"\0{name}=".encode())
        if there:
            found[name] = os.fsdecode(rest.partition(b"\0")[0])
    return found


def session_of(pid: int) -> str | None:
    """Return the session in which ``pid`` was started; "" if it has no session, None if unknown."""
    found = variables(pid, [SESSION_VARIABLE])
    return None if found is None else found.get(SESSION_VARIABLE, "")


def spaces(pid: int) -> tuple[int, int] | None:
    """Return the PID namespace and the mount namespace of a process; None if unknown."""
    try:
        # This function runs for all processes of the machine, and os.stat is faster than Path.stat.
        return (
            os.stat(f"{PROC}/{pid}/ns/pid").st_ino,  # noqa: PTH116
            os.stat(f"{PROC}/{pid}/ns/mnt").st_ino,  # noqa: PTH116
        )
    except OSError:
        return None


def apart(one: int, other: int) -> bool:
    """Return whether two processes are known to be in different containers."""
    first, second = spaces(one), spaces(other)
    return None not in (first, second) and first != second


def number_inside(pid: int) -> int:
    """Return the pid that a process has in its own PID namespace; 0 if it has ended."""
    try:
        for line in _read(pid, "status").splitlines():
            if line.startswith(b"NSpid:"):
                return int(line.split()[-1])
    except (OSError, ValueError, IndexError):
        return 0
    return pid  # Linux before 4.1 does not have that line


def translated(number: int, beside: int) -> int:
    """Return this namespace's pid for the pid ``number`` in the PID namespace of ``beside``.

    Both pids belong to one process. The answer is 0 if no process in the PID namespace of
    ``beside`` has the pid ``number``.
    """
    space = other_space(beside)
    if not space:
        # ``beside`` is in this namespace, or has ended. If it has ended, a process in a container
        # may have inherited its connection. ``number`` is then perhaps a pid in that container, so
        # return 0.
        return number if identify(beside) is not None else 0
    pids = (process.pid for process in insiders(space).values())
    return next((pid for pid in pids if number_inside(pid) == number), 0)


def other_space(pid: int) -> int | None:
    """Return the PID namespace of ``pid``; 0 if this process is in it, too; None if unknown."""
    found = spaces(pid)
    if found is None:
        return None
    return 0 if found[0] == _own_space() else found[0]


def insiders(space: int) -> dict[ProcessId, ProcessId]:
    """Map a process's identity in a PID namespace to its identity in this namespace.

    The result has all processes of the namespace ``space``.
    """
    found = {}
    for pid in all_pids():
        its = spaces(pid)
        process = identify(pid) if its is not None and its[0] == space else None
        if process is not None:
            found[ProcessId(number_inside(pid), process.start_time)] = process
    return found


@lru_cache(maxsize=1)
def _own_space() -> int:
    found = spaces(os.getpid())
    return found[0] if found is not None else 0


def open_files(pid: int) -> Iterator[tuple[Path, str]]:
    """Yield, for each open file of a process, the link in ``/proc`` and the link's target.

    Raises
    ------
    OSError
        If the process has ended (FileNotFoundError) or belongs to another user (PermissionError).
    """
    for link in (PROC / str(pid) / "fd").iterdir():
        try:
            yield link, str(link.readlink())
        except FileNotFoundError:
            continue  # the process closed the file meanwhile


def command(pid: int) -> str:
    """Return the command line of a process, else its name in brackets; "" if it has ended."""
    try:
        line = _read(pid, "cmdline")[:4096].replace(b"\0", b" ").decode(errors="replace").strip()
        return line or f"[{_read(pid, 'comm').decode(errors='replace').strip()}]"
    except OSError:
        return ""


def threads(pid: int) -> list[int]:
    """Return the ids of the threads of a process; [] if it has ended."""
    try:
        return [int(name) for name in os.listdir(PROC / str(pid) / "task")]  # noqa: PTH208
    except OSError:
        return []


def thread_time(pid: int, thread: int) -> tuple[str, int]:
    """Return state and run time (ns) of a thread; ("", 0) if it has ended or cannot be read."""
    try:
        fields = _read(pid, f"task/{thread}/stat").rpartition(b")")[2].split()
        state, ticks = fields[0].decode(), int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return "", 0
    try:
        return state, int(_read(pid, f"task/{thread}/schedstat").split()[0])
    except (OSError, ValueError, IndexError):
        return state, ticks * _TICK


class _Spare:
    """A spare file descriptor, for reading ``/proc`` when no other descriptor is free."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = -1

    def keep(self) -> None:
        """Reserve a descriptor, if one is free."""
        with self._lock:
            self._take()

    def open(self, path: str, error: OSError) -> int:
        """Close the spare descriptor and open a file instead; raise ``error`` without a spare."""
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
    path = f"{PROC}/{pid}/{name}"
    try:
        # This runs for all processes of the machine, and os.open is three times as fast as open().
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
    """Return the pids of all processes that exist now."""
    return frozenset(int(name) for name in os.listdir(PROC) if name.isdigit())  # noqa: PTH208


def all_stats() -> dict[int, Stat]:
    """Return the stat of every live process by its pid."""
    stats = (read_stat(pid) for pid in all_pids())
    return {stat.pid: stat for stat in stats if stat is not None and stat.presence != "gone"}


def owner(pid: int) -> int | None:
    """Return the user id of the owner of ``/proc/<pid>``; None if the process has ended.

    If the process is not dumpable, the owner is root.
    """
    try:
        # Path.stat() would be slower: to make the Path costs more than the call of stat.
        return os.stat(f"{PROC}/{pid}").st_uid  # noqa: PTH116
    except OSError:
        return None


def real_uid(pid: int) -> int | None:
    """Return the real user id, even of a process that is not dumpable; None if it has ended."""
    try:
        for line in _read(pid, "status").splitlines():
            if line.startswith(b"Uid:"):
                return int(line.split()[1])
    except OSError:
        pass
    return None


# ---------------------------------------------------------------------- descent


def alive(process: ProcessId) -> bool:
    """Return whether ``process`` (not a later process with its pid) still runs."""
    return presence(process) != "gone"


def ancestry(pid: int) -> list[ProcessId]:
    """Return the living process ``pid`` and its ancestors, the nearest first."""
    found = []
    for _ in range(MAX_DEPTH):
        stat = read_stat(pid) if pid > 1 else None
        if stat is None:
            break
        if stat.presence != "gone":
            found.append(stat.identity)
        pid = stat.parent
    return found


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


def descendants(root: ProcessId) -> list[ProcessId]:
    """Return the living descendants of ``root``, parents before children, without ``root``.

    A notebook may have started this broker, so the list leaves out this process and its
    descendants.
    """
    if not alive(root):
        return []
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        stat = read_stat(pid)
        if stat is not None:
            children.setdefault(stat.parent, []).append(pid)
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


# ---------------------------------------------------------------------- end


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends. The caller closes it.

    The answer is None if Linux is older than 5.3, if no descriptor is free, or if the process is
    gone. The descriptor may belong to a later process with the same pid, so the caller must compare
    the start time of the process after this call.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def kill(processes: Iterable[ProcessId]) -> list[str]:
    """Send SIGKILL to each of the processes; return a sentence for each failure.

    A later process that has the pid of one of them gets no signal.
    """
    problems = []
    for process in processes:
        try:
            _kill(process)
        except ProcessLookupError:
            continue
        except OSError as error:
            problems.append(f"Process {process.pid} could not be ended: {error.strerror}.")
    return problems


def kill_tree(root: ProcessId) -> list[str]:
    """Send SIGKILL to ``root`` and to its descendants; return a sentence for each failure.

    Parents come before their children, so no parent can start a new child in place of a killed one
    (the workers of a ``multiprocessing.Pool`` are replaced in this way).
    """
    return kill([root, *descendants(root)])


def _kill(process: ProcessId) -> None:
    descriptor = open_pidfd(process.pid)
    if descriptor is None:
        if alive(process):
            os.kill(process.pid, signal.SIGKILL)
        return
    try:
        if alive(process):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    finally:
        os.close(descriptor)
