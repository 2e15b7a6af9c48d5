# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The configuration in force. Every part reads it here, so a change reaches all parts at once.

The configuration changes when the broker reloads the files, and when a schedule begins or ends.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Sequence

from traitlets.config import Config

from ..config import BrokerSettings, Timetable, load_timetable, needs_restart
from ..config.differences import shown
from ..endpoint import MACHINE_SOCKET, find_socket, is_usual_socket, machine_service
from .transport.auth import Access, Peer
from .transport.listener import is_machine_wide

#: The broker may repeat an answer about schedules for this many seconds.
SCHEDULE_LASTS = 5.0


class Configuration:
    """The admin's configuration, and the values that follow from it for this broker.

    Parameters
    ----------
    files, overrides:
        See :func:`jupyter_gpupool.config.load_timetable`.
    socket:
        Overrules the configuration. If it is "", :func:`jupyter_gpupool.endpoint.find_socket` finds
        the socket.

    Raises
    ------
    GPUPoolError
        If the configuration is wrong.
    """

    def __init__(
        self, files: Sequence[Path] = (), overrides: Config | None = None, socket: str = ""
    ) -> None:
        self._files = [*files]
        self._overrides = overrides
        #: The whole content of the files: the settings and all schedules.
        self.timetable = self.read()
        self._schedule: tuple[float, dict[str, Any] | None] = (0.0, None)
        now = time.time()
        #: The schedules in force.
        self.rules = self.timetable.rules(now)
        #: The settings in force.
        self.settings: BrokerSettings = self._settings(now)
        self.socket = Path(socket) if socket else find_socket(self.settings.socket)
        #: Whether this broker serves every user of the machine.
        self.machine_wide = is_machine_wide(self.socket)
        self.access = self._access()

    def read(self) -> Timetable:
        """Return the configuration that the files contain now.

        The configuration in force does not change. Reading takes a while, so this method may also
        run in a thread beside the event loop.

        Raises
        ------
        GPUPoolError
            If the configuration is wrong.
        """
        return load_timetable(self._files, self._overrides)

    def take(self, timetable: Timetable) -> tuple[str, ...]:
        """Put ``timetable`` in force, a configuration that :meth:`read` has returned.

        A running broker cannot apply changes of some options. Return the names of such options that
        have changed. Their new values take effect when the broker starts again.
        """
        late = needs_restart(self.timetable.base, timetable.base)
        self.timetable = timetable
        self._enter(time.time())
        return late

    def follow_calendar(self, now: float) -> bool:
        """Put in force the schedules for the time ``now``; return whether anything has changed."""
        same = self.timetable.rules(now) == self.rules
        # If the clock has jumped, a priority class may open at a different time. This is possible
        # even if the schedules in force stay the same.
        if same and self.timetable.classes_open(now) == self.settings.pool.classes_open:
            return False
        self._enter(now)
        return True

    def schedule(self, now: float) -> dict[str, Any] | None:
        """Return the schedules in force and the next change, for ``status``.

        The result is None if no schedule is configured. It may be a few seconds old, because
        every answer to ``status`` contains it.
        """
        timetable = self.timetable
        if not timetable.base.schedules:
            return None
        made, shown = self._schedule
        if shown is None or not 0 <= now - made < SCHEDULE_LASTS:
            change = timetable.next_change(now)
            shown = {
                "in_force": [*timetable.names(self.rules)],
                "next_change": change[0] if change else None,
                "next": [*timetable.names(change[1])] if change else None,
            }
            self._schedule = now, shown
        return shown

    def _enter(self, now: float) -> None:
        self._schedule = 0.0, None
        self.rules = self.timetable.rules(now)
        self.settings = self._settings(now)
        self.access = self._access()

    def _settings(self, now: float) -> BrokerSettings:
        settings = self.timetable.under(self.rules)
        opens = self.timetable.classes_open(now)
        return replace(settings, pool=replace(settings.pool, classes_open=opens))

    def shown(self, peer: Peer) -> dict[str, Any]:
        """Return the parts of the configuration in force that ``peer`` may see.

        A Jupyter Server asks for them, because its own configuration files may contain something
        else.
        """
        return shown(self.settings, private=self.access.is_admin(peer))

    def stands_aside(self) -> bool:
        """Return whether the machine's service has replaced this user's own broker.

        The result is false for a broker whose socket is configured or unusual, because such a
        broker serves another pool.
        """
        usual = not self.settings.socket and is_usual_socket(self.socket)
        return usual and self.socket != MACHINE_SOCKET and machine_service()

    def _access(self) -> Access:
        return Access(self.machine_wide, os.geteuid(), self.settings.admins)
