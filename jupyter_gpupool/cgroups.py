# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Memory of the machine and its control groups: limits, available bytes, pressure.

A suspend moves a kernel's device memory to the host memory of the kernel's own process. So the
limits of the machine *and* of every memory cgroup above that process apply. This module reads
cgroups of version 1 and of version 2. It ignores a limit that is not below the machine's memory. A
group that it cannot read counts as a group without a limit: the group is outside this namespace, or
is threaded and has no memory controller. The limits of the groups above it still apply.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT, PROC = Path("/sys/fs/cgroup"), Path("/proc")

#: By version of the control groups: the file with the hard limit, which Linux enforces.
_HARD = {1: "memory.limit_in_bytes", 2: "memory.max"}


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A memory cgroup, with or without a limit."""

    folder: Path
    #: The group's path, as ``/proc/<pid>/cgroup`` shows it.
    name: str
    version: int


@dataclass(frozen=True, slots=True)
class Level:
    """The memory of the machine (``group`` is None), or of a control group with a limit."""

    group: ControlGroup | None
    limit: int
    #: Bytes that a process could take now without swapping or an OOM kill.
    free: int

    @property
    def key(self) -> str:
        """The identity of the level."""
        return "" if self.group is None else str(self.group.folder)

    def __str__(self) -> str:
        return "this machine" if self.group is None else f"control group {self.group.name}"


@dataclass(frozen=True, slots=True)
class Stress:
    """The memory pressure of a level. Both figures are useful only together with ``Level.free``."""

    #: How many times the group has been at its limit since its creation; 0 for the machine.
    events: int = 0
    #: The percentage of the last ten seconds in which at least one task waited for memory.
    stalled: float = 0.0


class Host:
    """Reads limits and use of memory from ``proc``, and from the cgroups, mounted at ``root``.

    A read takes milliseconds.
    """

    def __init__(self, root: Path = ROOT, proc: Path = PROC) -> None:
        self._root = root
        self._proc = proc

    def machine(self) -> Level:
        """Return the machine's memory.

        Raises
        ------
        OSError
            If ``/proc/meminfo`` has no MemAvailable.
        """
        found = self._meminfo()
        if "MemAvailable" not in found:
            raise OSError("/proc/meminfo has no MemAvailable (Linux 3.14 and later have it)")
        free = found["MemAvailable"]
        return Level(None, found.get("MemTotal", free), free)

    def total(self) -> int:
        """Return the machine's memory, or the lowest hard limit of this process if it is lower."""
        limits = (_number(group.folder / _HARD[group.version]) for group in self.groups(None))
        return min([self._meminfo()["MemTotal"], *(n for n in limits if n is not None)])

    def _meminfo(self) -> dict[str, int]:
        found: dict[str, int] = {}
        with (self._proc / "meminfo").open() as file:
            for line in file:
                name, _, size = line.partition(":")
                if name in ("MemTotal", "MemAvailable"):
                    found[name] = int(size.split()[0]) * 1024
        return found

    def groups(self, pid: int | None) -> tuple[ControlGroup, ...]:
        """Return the memory cgroups of ``pid`` (None: this process), innermost first.

        The result is () if the cgroups are unknown.
        """
        try:
            path = self._proc / ("self" if pid is None else str(pid)) / "cgroup"
            lines = path.read_text().splitlines()
        except OSError:
            return ()
        found: list[ControlGroup] = []
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
                found.append(ControlGroup(folder, name, version))
                folder = folder.parent
        return tuple(found)

    def level(self, group: ControlGroup, most: int) -> Level | None:
        """Return the memory of a group; None if it has no limit below ``most`` bytes."""
        names, usage_name = [_HARD[2], "memory.high"], "memory.current"
        if group.version == 1:
            names, usage_name = [_HARD[1]], "memory.usage_in_bytes"
        limits = [limit for name in names if (limit := _number(group.folder / name)) is not None]
        limit = min(limits, default=most)
        if limit >= most:
            return None
        usage = _number(group.folder / usage_name)
        if usage is None:
            return None
        # Cache that Linux can drop does not count as used.
        return Level(group, limit, max(0, limit - usage + _reclaimable(group)))

    def levels(self, pid: int | None = None) -> list[Level]:
        """Return the levels that limit ``pid`` (None: this process); the machine is the first."""
        machine = self.machine()
        found = (self.level(group, machine.limit) for group in self.groups(pid))
        return [machine, *(level for level in found if level is not None)]

    def available(self, pid: int | None = None) -> int:
        """Return the bytes that ``pid`` (None: this process) could still take."""
        return min(level.free for level in self.levels(pid))

    def stress(self, level: Level) -> Stress:
        """Return the memory pressure of a level."""
        group = level.group
        if group is None:
            return Stress(stalled=_stalled(self._proc / "pressure" / "memory"))
        if group.version == 1:
            return Stress(events=_number(group.folder / "memory.failcnt") or 0)
        rows = _rows(group.folder / "memory.events")
        events = sum(rows.get(name, 0) for name in ("high", "max", "oom"))
        return Stress(events, _stalled(group.folder / "memory.pressure"))


def available(pid: int | None = None, *, root: Path = ROOT, proc: Path = PROC) -> int:
    """Return the bytes that process ``pid`` (None: this process) could still take."""
    return Host(root, proc).available(pid)


def stalled(text: str) -> float:
    """Read from a PSI file in what percentage of the last ten seconds a task waited."""
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
        return 0.0  # Linux was built or started without PSI


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" means no limit


def _rows(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(" ") for line in lines)
    return {name: int(value) for name, _, value in pairs if value.strip().isdigit()}


def _reclaimable(group: ControlGroup) -> int:
    rows = _rows(group.folder / "memory.stat")
    # In version 1, only total_inactive_file includes the subgroups.
    return rows.get("total_inactive_file", rows.get("inactive_file", 0))
