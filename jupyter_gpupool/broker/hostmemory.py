# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What the machine and its memory control groups say: limits, what is left, how short it is.

A suspended kernel's device memory lands in that kernel's own resident memory, so what counts is
the machine *and* every memory cgroup above the process that takes it, version 1 or 2. A limit that
is the machine's or more does not bound anything. A group that cannot be read (it is outside this
namespace, or a threaded one, which has no memory controller) does not limit; the one above it does.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, TypeVar

from ..config.reading import HostReserve
from ..units import format_bytes

ROOT, PROC = Path("/sys/fs/cgroup"), Path("/proc")


@dataclass(frozen=True, slots=True)
class Group:
    """A memory cgroup; nobody has looked yet whether it has a limit."""

    folder: Path
    #: Its path as processes see it.
    name: str
    version: int


@dataclass(frozen=True, slots=True)
class Level:
    """Memory that is limited: the machine's (``group`` is None), or a control group's."""

    group: Group | None
    limit: int
    #: Bytes that could be taken now without swapping or an OOM kill.
    free: int

    @property
    def key(self) -> str:
        """What tells it from others."""
        return "" if self.group is None else str(self.group.folder)

    def __str__(self) -> str:
        return "this machine" if self.group is None else f"control group {self.group.name}"


@dataclass(frozen=True, slots=True)
class Stress:
    """How short the memory of a level is. Either only means something compared with ``free``."""

    #: How often it was at its limit, since it was made.
    events: int = 0
    #: Per cent of the last ten seconds in which something waited for memory.
    stalled: float = 0.0


class Host:
    """Reads below ``root``, where control groups are mounted, and ``proc``; takes milliseconds."""

    def __init__(self, root: Path = ROOT, proc: Path = PROC) -> None:
        self._root = root
        self._proc = proc

    def machine(self) -> Level:
        """Return the machine's memory.

        Raises
        ------
        OSError
            If ``/proc/meminfo`` does not say.
        """
        found: dict[str, int] = {}
        with (self._proc / "meminfo").open() as file:
            for line in file:
                name, _, rest = line.partition(":")
                if name in ("MemTotal", "MemAvailable"):
                    found[name] = int(rest.split()[0]) * 1024
        if "MemAvailable" not in found:
            raise OSError("/proc/meminfo has no MemAvailable (Linux 3.14 has it)")
        free = found["MemAvailable"]
        return Level(None, found.get("MemTotal", free), free)

    def groups(self, pid: int | None) -> tuple[Group, ...]:
        """Return the memory cgroups of a process (None: this one), its own first; () if unknown."""
        try:
            path = self._proc / ("self" if pid is None else str(pid)) / "cgroup"
            lines = path.read_text().splitlines()
        except OSError:
            return ()
        found: list[Group] = []
        for line in lines:
            _, controllers, path_text = line.split(":", 2)
            if controllers == "":
                base, version = self._root, 2
            elif "memory" in controllers.split(","):
                base, version = self._root / "memory", 1
            else:
                continue
            folder = base / path_text.lstrip("/")
            while folder != base.parent:
                name = "/" + str(folder.relative_to(base)) if folder != base else "/"
                found.append(Group(folder, name, version))
                folder = folder.parent
        return tuple(found)

    def level(self, group: Group, most: int) -> Level | None:
        """Return the memory of a group; None if it has no limit below ``most`` bytes."""
        names, usage_name = ["memory.max", "memory.high"], "memory.current"
        if group.version == 1:
            names, usage_name = ["memory.limit_in_bytes"], "memory.usage_in_bytes"
        limits = [limit for name in names if (limit := _number(group.folder / name)) is not None]
        limit = min(limits, default=most)
        if limit >= most:
            return None
        usage = _number(group.folder / usage_name)
        if usage is None:
            return None
        # Cache that the kernel can drop is no use that counts against us.
        return Level(group, limit, max(0, limit - usage + _reclaimable(group)))

    def levels(self, pid: int | None = None) -> list[Level]:
        """Return what limits a process (None: this one): the machine first."""
        machine = self.machine()
        found = (self.level(group, machine.limit) for group in self.groups(pid))
        return [machine, *(level for level in found if level is not None)]

    def available(self, pid: int | None = None) -> int:
        """Return the bytes that a process (None: this one) could still take."""
        return min(level.free for level in self.levels(pid))

    def stress(self, level: Level) -> Stress:
        """Return how short the memory of a level is."""
        group = level.group
        if group is None:
            return Stress(stalled=_stalled(self._proc / "pressure" / "memory"))
        if group.version == 1:
            return Stress(events=_number(group.folder / "memory.failcnt") or 0)
        rows = _rows(group.folder / "memory.events")
        events = sum(rows.get(name, 0) for name in ("high", "max", "oom"))
        return Stress(events, _stalled(group.folder / "memory.pressure"))


def available(pid: int | None = None, *, root: Path = ROOT, proc: Path = PROC) -> int:
    """Return the bytes that process ``pid`` (None: this one) could still take."""
    return Host(root, proc).available(pid)


def stalled(text: str) -> float:
    """Return the per cent of ten seconds in which some task waited, from a PSI file's text."""
    for line in text.splitlines():
        kind, *figures = line.split()
        if kind == "some":
            for figure in figures:
                name, _, value = figure.partition("=")
                if name == "avg10":
                    return float(value)
    return 0.0


def _stalled(path: Path) -> float:
    try:
        return stalled(path.read_text())
    except (OSError, ValueError):
        return 0.0  # the kernel was built or started without it


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" is no limit


def _rows(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(" ") for line in lines)
    return {name: int(value) for name, _, value in pairs if value.strip().isdigit()}


def _reclaimable(group: Group) -> int:
    rows = _rows(group.folder / "memory.stat")
    # Version 1 has one figure of the group alone, and one with those below it.
    return rows.get("total_inactive_file", rows.get("inactive_file", 0))


_T = TypeVar("_T")

#: A suspend leaves this much more than the reserve (a part of it): else what is left would be
#: short again with the next few bytes, and the state would go back and forth.
SLACK = 8


class HostRoom:
    """The room for suspended state: what is left of each level, less what must stay free.

    Suspends under way are counted: their copies are not in any figure yet, and two of them at once
    must not both count on the same bytes. Files are read in a thread of its own.
    """

    def __init__(self, host: Host | None = None, reserve: HostReserve | None = None) -> None:
        self.host = host or Host()
        self.reserve = reserve or HostReserve()
        #: By session: the bytes of its suspend under way, and the levels that they count in.
        self._going: dict[str, tuple[int, frozenset[str]]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gpupool-host")

    async def read(self, work: Callable[[], _T]) -> _T:
        """Return what ``work`` does, which reads files, from the thread for that."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """Read nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ figures

    def kept(self, level: Level) -> int:
        """Return the bytes of a level that stay free, whatever is suspended."""
        return self.reserve.of(level.limit, machine=level.group is None)

    def most(self, level: Level) -> int:
        """Return the bytes that suspended state could take of a level with nothing else in it."""
        return max(0, level.limit - self._margin(level))

    def machine(self) -> int:
        """Return the bytes that suspends may take of what limits the broker itself.

        The machine's memory, and the broker's cgroup, which in a container is the kernels', too.
        Suspends under way are not counted. Reads files.
        """
        return max(0, min(level.free - self._margin(level) for level in self.host.levels()))

    def _margin(self, level: Level) -> int:
        kept = self.kept(level)
        return kept + kept // SLACK

    def _spare(self, level: Level) -> int:
        going = sum(size for size, keys in self._going.values() if level.key in keys)
        return level.free - self._margin(level) - going

    # ------------------------------------------------------------------ suspends

    async def take(self, session: str, pid: int, size: int) -> str:
        """Set ``size`` bytes aside for a suspend of process ``pid``; return why not, or "".

        Until :meth:`give`.
        """
        try:
            levels = await self.read(lambda: self.host.levels(pid))
        except OSError as error:
            return f"Host memory cannot be read now: {error}. The pool tries again by itself."
        # From here on nothing waits: two suspends that were read at once are counted in turn.
        tightest = min(levels, key=self._spare)
        if size and size > self._spare(tightest):
            return self._refusal(tightest, size)
        self._going[session] = size, frozenset(level.key for level in levels)
        return ""

    def give(self, session: str) -> None:
        """The suspend is over: its copy is in the figures, or was not made."""
        self._going.pop(session, None)

    def never(self, levels: list[Level], size: int) -> str:
        """Return why ``size`` bytes of state can never be suspended below these levels, or ""."""
        least = min(levels, key=self.most)
        return self._refusal(least, size) if size > self.most(least) else ""

    def _refusal(self, level: Level, size: int) -> str:
        kept = f"{format_bytes(self.kept(level))} stays free (c.GPUPool.host_reserve)"
        if size > self.most(level):
            return (
                f"{format_bytes(size)} of GPU state cannot be moved to host memory here: {level} "
                f"may use {format_bytes(level.limit)} in all, of which {kept}. Free GPU memory in "
                "the kernel, ask for a smaller slice with %gpu, or have the memory limit raised."
            )
        return (
            f"{format_bytes(size)} of GPU state has no room in host memory now: {level} has "
            f"{format_bytes(level.free)} left, of which {kept}. The pool tries again by itself; "
            "free host memory there, or end kernels that are not needed."
        )
