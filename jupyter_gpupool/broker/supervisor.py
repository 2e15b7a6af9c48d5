# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Takes sockets from a service manager such as systemd, and reports the broker's state to it.

The service manager passes sockets that are already bound (``LISTEN_FDS``, sd_listen_fds(3)). The
broker tells the service manager that it is ready, lives or ends (``NOTIFY_SOCKET``, sd_notify(3)).
If the variables are not set, this module has no effect.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import MutableMapping

#: The first descriptor that a service manager hands over (SD_LISTEN_FDS_START).
FIRST = 3

#: Seconds until the broker tries again to send a READY message that it could not send.
AGAIN = 1.0

#: The variables of the service manager that no child of the broker may inherit.
VARIABLES = (
    "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID",
)  # fmt: skip


class Supervisor:
    """The service manager that started this process. Without one, the methods do nothing.

    The constructor removes the service manager's variables from ``environment``, so that no child
    inherits them.
    """

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        found = {name: environment.pop(name, "") for name in VARIABLES}
        mine = str(os.getpid())
        self._address = found["NOTIFY_SOCKET"]
        self._watchdog = 0.0
        #: The READY message that the broker could not send yet; empty if there is none.
        self._owed: tuple[str, ...] = ()
        if found["WATCHDOG_PID"] in ("", mine):
            with suppress(ValueError):
                self._watchdog = int(found["WATCHDOG_USEC"]) / 1e6
        count = 0
        if found["LISTEN_PID"] == mine:
            with suppress(ValueError):
                count = int(found["LISTEN_FDS"])
        self._descriptors = [*range(FIRST, FIRST + count)]
        for descriptor in self._descriptors:
            with suppress(OSError):
                os.set_inheritable(descriptor, False)

    def listening(self, path: Path) -> socket.socket | None:
        """Return the socket that the service manager has bound to ``path``, or None."""
        for descriptor in self._descriptors:
            with suppress(OSError):
                given = socket.socket(fileno=descriptor)
                if given.family == socket.AF_UNIX and given.getsockname() == str(path):
                    self._descriptors.remove(descriptor)
                    return given
                given.detach()  # a socket at another path stays open
        return None

    def ready(self, text: str) -> None:
        """Tell the service manager that the broker serves; ``text`` is for ``systemctl status``."""
        lines = ("READY=1", f"STATUS={text}")
        self._owed = () if self._say(*lines) else lines

    def ending(self) -> None:
        """Tell the service manager that the broker ends."""
        self._say("STOPPING=1")

    async def keep_alive(self) -> None:
        """Tell the watchdog that the event loop runs, and repeat a lost READY, until cancelled.

        If the event loop hangs, the watchdog ends the broker with SIGABRT. The stacks of the
        broker's threads are then in the log.
        """
        if self._watchdog and self._address and not faulthandler.is_enabled():
            faulthandler.enable()
        while self._address and (self._watchdog or self._owed):
            if self._owed and self._say(*self._owed):
                self._owed = ()
            if self._watchdog:
                self._say("WATCHDOG=1")
            pauses = ([AGAIN] if self._owed else []) + ([self._watchdog / 3] * bool(self._watchdog))
            await asyncio.sleep(min(pauses, default=0.0))

    def _say(self, *lines: str) -> bool:
        """Send a message; return False if it could not be sent, and raise no error.

        Without a service manager, send nothing and return True.
        """
        if not self._address:
            return True
        address = self._address
        if address.startswith("@"):
            address = "\0" + address[1:]  # an abstract address
        # The call of socket() can raise an error, too: if no descriptor or no memory is left.
        with (
            suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to,
        ):
            # The broker must not wait for a service manager that does not read.
            to.setblocking(False)
            to.sendto("\n".join(lines).encode(), address)
            return True
        return False
