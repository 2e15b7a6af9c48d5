# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Numbers of the processes in a session's page, which are those of the container that they run in.

The operating system translates: a process counts as the one in the page only if it runs in the
PID namespace of the session, has that number there and was started at that time. So a page that
names another container's processes, or the machine's, names nobody.
"""

from __future__ import annotations

from typing import Collection

from ... import procfs
from ...procfs import ProcessId
from ..sessions import LiveSession


class Translation:
    """Translates, and remembers: a process keeps its numbers."""

    def __init__(self) -> None:
        #: By session: its PID namespace, and a map from process ids there to ids here (None: no
        #: process).
        self._known: dict[str, tuple[int, dict[ProcessId, ProcessId | None]]] = {}

    def here(
        self, session: LiveSession, processes: Collection[ProcessId]
    ) -> dict[ProcessId, ProcessId]:
        """Return those of a page's ``processes`` that live, as this process sees them."""
        space, known = self._of(session)
        if not space:
            return {process: process for process in processes if procfs.alive(process)}
        if not known.keys() >= {*processes}:
            # A process is there before it writes its number, so the look need not be repeated.
            found = procfs.insiders(space)
            names = {p: found.get(p) for p in processes if p not in known}
            kept = {p: known[p] for p in processes if p in known}
            known.clear()
            known.update(kept | names)
        pairs = ((process, known[process]) for process in processes)
        return {there: here for there, here in pairs if here is not None and procfs.alive(here)}

    def forget(self, session: LiveSession) -> None:
        """Forget a session that has ended."""
        self._known.pop(session.id, None)

    def _of(self, session: LiveSession) -> tuple[int, dict[ProcessId, ProcessId | None]]:
        known = self._known.get(session.id)
        if known is None:
            if session.process is None:
                return 0, {}
            space = procfs.other_space(session.process.pid)
            if space is None:
                return 0, {}  # it ends now
            known = self._known[session.id] = space, {}
        return known
