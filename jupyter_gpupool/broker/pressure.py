# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Notices when host memory that holds suspended state becomes short, and tells the pool.

Suspended state cannot be swapped out or dropped. If the machine or a control group runs out of
memory, the system may end the kernel that holds the state. In this module, the machine and each
control group is a "level". If a level becomes short of memory, the broker tells the pool which
sessions use this level. The pool then resumes one of them: the session with the largest state for
which a device has room (see ``HostPressure``). The session's user gets a notice. The notice says
that the state moves to a GPU, or that no GPU has room for it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from ..cgroups import ControlGroup, Level
from ..pool import events as e
from ..procfs import ProcessId
from ..states import WAITING
from ..units import format_bytes
from .core import Core
from .hostmemory import SLACK, HostRoom
from .sessions import LiveSession

#: A level with little free memory is short if its processes wait for memory for at least this
#: percentage of the time.
STALLED = 10.0

#: The broker reads the control groups of a process again after this many rounds, because somebody
#: may have moved the process to another group.
AGAIN = 60

#: One round checks the requested sizes of at most this many sessions against the limits.
AT_ONCE = 50


@dataclass
class _Short:
    """A level that is short of memory."""

    level: Level
    #: The notices that users have got about this level. Each entry has the session, and whether the
    #: notice announced a move to a GPU.
    told: set[tuple[str, bool]] = field(default_factory=set)


class Pressure:
    """Checks the levels in which the pool keeps suspended state."""

    def __init__(self, core: Core, room: HostRoom, log: logging.Logger) -> None:
        self._core = core
        self._room = room
        self._log = log
        self._looks = 0
        #: By process: its control groups, and the round that read them.
        self._groups: dict[ProcessId, tuple[int, tuple[ControlGroup, ...]]] = {}
        #: By level: how often the level had reached its memory limit at the last check. The system
        #: counts this.
        self._events: dict[str, int] = {}
        self._short: dict[str, _Short] = {}
        self._concerned: frozenset[str] = frozenset()
        #: By session: the requested size that was last checked against the limits.
        self._checked: dict[str, int] = {}

    async def look(self) -> None:
        """Check all levels once, tell the pool, and warn users."""
        self._looks += 1
        await self._look_at_limits()
        held = self._core.pool.suspended()
        if not held and not self._concerned:
            return
        sessions = {s.id: s.process for s in self._core.sessions if s.process is not None}
        short = await self._room.read(lambda: self._find_short(sessions, held))
        self._short = {
            level.key: _Short(
                level, before.told if (before := self._short.get(level.key)) else set()
            )
            for level in short
        }
        concerned = frozenset(
            name for name, process in sessions.items() if self._short.keys() & self._keys(process)
        )
        if concerned or self._concerned:
            self._concerned = concerned
            self._core.handle(e.HostPressure(now=self._core.now(), sessions=concerned))
        self._tell(sessions, held)

    # ------------------------------------------------------------------ in the thread that reads

    def _find_short(self, sessions: dict[str, ProcessId], held: dict[str, int]) -> list[Level]:
        self._groups = {p: self._groups[p] for p in sessions.values() if p in self._groups}
        machine = self._room.host.machine()
        groups: dict[str, ControlGroup] = {}
        for name in held:
            if name in sessions:
                for group in self._groups_of(sessions[name]):
                    groups[str(group.folder)] = group
        found = [self._room.host.level(group, machine.limit) for group in groups.values()]
        levels = [machine, *(level for level in found if level is not None)]
        short = [level for level in levels if self._is_short(level)]
        if short:
            for process in sessions.values():
                self._groups_of(process)
        return short

    def _is_short(self, level: Level) -> bool:
        kept = self._room.kept(level)
        if level.key in self._short:
            # A level that is already short stays short until it has as much free memory as a
            # suspend must leave.
            kept += kept // SLACK
        if level.free < kept:
            return True
        if level.free >= 2 * kept:
            self._events.pop(level.key, None)
            return False
        # The free memory is between the reserve and twice the reserve. So look also at the system's
        # own signs of stress. With more free memory, these signs mean nothing: a group that reads
        # many files is always at its limit, but the system can drop the cached files.
        stress = self._room.host.stress(level)
        before = self._events.get(level.key, stress.events)
        self._events[level.key] = stress.events
        return stress.events > before or stress.stalled >= STALLED

    def _groups_of(self, process: ProcessId) -> tuple[ControlGroup, ...]:
        known = self._groups.get(process)
        if known is None or self._looks - known[0] >= AGAIN:
            known = self._looks, self._room.host.groups(process.pid)
            self._groups[process] = known
        return known[1]

    # ------------------------------------------------------------------ notices

    def _keys(self, process: ProcessId) -> set[str]:
        _, groups = self._groups.get(process, (0, ()))
        return {"", *(str(group.folder) for group in groups)}

    def _tell(self, sessions: dict[str, ProcessId], held: dict[str, int]) -> None:
        for session in self._core.sessions:
            if session.host_short and session.id not in self._concerned:
                session.host_short = ""
        for short in self._short.values():
            there = [
                n for n, p in sessions.items() if n in held and short.level.key in self._keys(p)
            ]
            there.sort(key=lambda name: (-held[name], name))
            moving = [n for n in there if self._core.busy.get(n) in WAITING]
            for name in moving or there[:1]:
                found = self._core.sessions.find(name)
                if found is not None and (name, bool(moving)) not in short.told:
                    short.told.add((name, bool(moving)))
                    self._warn(found, short.level, held[name], moves=bool(moving))

    def _warn(self, session: LiveSession, level: Level, size: int, *, moves: bool) -> None:
        what = (
            f"So the GPU state of this kernel ({format_bytes(size)}) goes back to a GPU."
            if moves
            else f"But no GPU has room for the GPU state of this kernel ({format_bytes(size)}), "
            "so the state stays in host memory."
        )
        message = (
            f"Host memory is short: {level} has {format_bytes(level.free)} of "
            f"{format_bytes(level.limit)} left. {what} Delete large objects or shut down kernels "
            "that are not needed, before the system kills a process to free memory."
        )
        session.host_short = message
        self._log.warning("Session %s: %s", session.id, message)
        self._core.note("host-short", session, bytes=size, reason=message)
        session.send({"type": "notice", "message": message})

    # ------------------------------------------------------------------ limits below the slice

    async def _look_at_limits(self) -> None:
        """Find the sessions whose requested size can never fit into host memory; store the reason.

        The broker checks each requested size of a session once.
        """
        todo: list[tuple[LiveSession, ProcessId, int]] = []
        for name in self._core.busy:
            session = self._core.sessions.find(name)
            if session is None or session.process is None or name not in self._core.pool:
                continue
            request = self._core.pool.request(name)
            size = request.memory * request.devices
            if self._checked.get(name) != size:
                self._checked[name] = size
                todo.append((session, session.process, size))
            if len(todo) >= AT_ONCE:
                break
        if len(self._checked) > 2 * len(self._core.sessions) + AT_ONCE:
            self._checked = {n: v for n, v in self._checked.items() if n in self._core.sessions}
        if not todo:
            return
        room = self._room
        found = await room.read(
            lambda: [room.never(room.host.levels(process.pid), size) for _, process, size in todo]
        )
        for (session, _, _), why in zip(todo, found, strict=True):
            session.host_limit = why
