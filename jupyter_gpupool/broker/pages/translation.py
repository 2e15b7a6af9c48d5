# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Translates process ids in a session's page: from the session's namespace to the broker's.

The broker asks the operating system for the ids. A process counts as a process of the page only if
it runs in the PID namespace of the session, and has the id and the start time that the page names.
So a page cannot name processes of another container or of the machine.
"""

from __future__ import annotations

import time
from typing import Callable, Collection

from ... import procfs
from ...procfs import ProcessId
from ..ratelimit import TokenBucket
from ..sessions import LiveSession
from ..transport.auth import User

#: To translate a new process id, the broker scans all processes of the machine. One session may
#: cause this many scans: per second, and in one burst. A forged page may name new false processes
#: at each read, and each scan delays the event loop by 20 to 60 us per process of the machine. The
#: burst is large enough for a program that starts a process for each of eight GPUs at once.
LOOKS = 1.0, 8.0

#: The pages of all sessions of one user may cause this many scans: per second, and in one burst.
#: Without this limit, a user with a forged page in each of 20 sessions would keep the event loop
#: busy on a machine with 1,000 processes. Scans for a message do not count here, because the sender
#: pays for them with the message.
LOOKS_OF_USER = 4.0, 32.0


class Translation:
    """Translates process ids, and remembers the result, because a process keeps its ids."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: By session: the PID namespace of its processes, and a map from each process's identity in
        #: that namespace to its identity in the broker's namespace (None: no such process).
        self._known: dict[str, tuple[int, dict[ProcessId, ProcessId | None]]] = {}
        #: The scans that each session may cause, and the scans that each user may cause.
        self._looks: dict[str, TokenBucket] = {}
        self._looks_of_user: dict[User, TokenBucket] = {}

    def here(
        self, session: LiveSession, processes: Collection[ProcessId]
    ) -> dict[ProcessId, ProcessId]:
        """Map the processes of a page to their identities in the broker's namespace.

        ``processes`` are the identities that the page has. The result leaves out ended processes.
        If the session may cause no scan now, it also leaves out processes that need a scan.
        """
        space, known = self._of(session)
        if not space:
            return {process: process for process in processes if procfs.alive(process)}
        if not known.keys() >= {*processes} and self._may_look(session, user=True):
            # A process exists before it writes its number into the page, so one scan is enough.
            found = procfs.insiders(space)
            names = {p: found.get(p) for p in processes if p not in known}
            kept = {p: known[p] for p in processes if p in known}
            known.clear()
            known.update(kept | names)
        pairs = ((process, known.get(process)) for process in processes)
        return {there: here for there, here in pairs if here is not None and procfs.alive(here)}

    def number(self, session: LiveSession, number: int, beside: int) -> int:
        """Return :func:`...procfs.translated` of these values, or 0 if no scan is allowed now."""
        if procfs.other_space(beside) and not self._may_look(session):
            return 0
        return procfs.translated(number, beside)

    def forget(self, session: LiveSession) -> None:
        """Forget a session that has ended."""
        self._known.pop(session.id, None)
        self._looks.pop(session.id, None)
        users = self._looks_of_user
        if session.uid in users and users[session.uid].full(self._clock()):
            del users[session.uid]  # a full bucket equals a new bucket

    def _may_look(self, session: LiveSession, *, user: bool = False) -> bool:
        """Pay for a scan from the session's budget.

        If ``user`` is true, pay also from the budget of the session's user.

        Return False if a budget does not allow the scan.
        """
        now, users = self._clock(), self._looks_of_user
        buckets = [self._looks.setdefault(session.id, TokenBucket(*LOOKS, now))]
        if user:
            buckets.append(users.setdefault(session.uid, TokenBucket(*LOOKS_OF_USER, now)))
        if min(bucket.left(now) for bucket in buckets) < 1:
            return False
        for bucket in buckets:
            bucket.pay(1, now)
        return True

    def _of(self, session: LiveSession) -> tuple[int, dict[ProcessId, ProcessId | None]]:
        known = self._known.get(session.id)
        if known is None:
            if session.process is None:
                return 0, {}
            space = procfs.other_space(session.process.pid)
            if space is None:
                return 0, {}  # the process is ending
            # The kernel's own process needs no scan.
            process = session.process
            inside = ProcessId(procfs.number_inside(process.pid), process.start_time)
            known = self._known[session.id] = space, {inside: process}
        return known
