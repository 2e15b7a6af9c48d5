# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Find out whether the guard is in this process, and read the figures on the session's page.

The guard itself counts the memory that a process takes and frees, in every language. No call here
reaches the driver, which would block while the session is suspended.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any, Mapping, NamedTuple

from ..endpoint import SOCKET_VARIABLE, dial
from ..guard.page import CLOSED, PASSED, SLOT_CONTEXT, Page, PageError, Reading
from ..procfs import ProcessId, alive
from ..protocol import encode

#: The environment variable with the path of the session's page, or ``PASSED``. Only the processes
#: of a session with a guard have this variable.
PAGE_VARIABLE = "GPUPOOL_PAGE"

#: The guard's library, which replaces the driver's library of the same name.
LIBRARY = "libcuda.so.1"

#: Seconds to wait until the broker passes the session's page.
PATIENCE = 10.0

NO_GUARD = "the broker does not guard this kernel"


class MemoryFigures(NamedTuple):
    """Memory in bytes, and how many of the session's threads wait at the gate (``waiting``).

    If the session has several devices, the bytes are those of the device that has the least free
    memory.
    """

    used: int
    granted: int
    limit: int
    waiting: int


def _ask(environ: Mapping[str, str]) -> int:
    """Ask the broker for the session's page; return its file descriptor.

    Raises
    ------
    OSError
        If the broker passes no file descriptor.
    """
    message: dict[str, Any] = {"type": "page", "id": 1}
    for name in ("session", "token"):
        message[name] = environ.get(f"GPUPOOL_{name.upper()}", "")
    with dial(Path(environ.get(SOCKET_VARIABLE, "")), PATIENCE) as connection:
        connection.settimeout(PATIENCE)
        connection.sendall(encode(message))
        _, found, _, _ = socket.recv_fds(connection, 1 << 16, 1)
    if not found:
        raise OSError("the broker did not send the session's page")
    return found[0]


class Guard:
    """The guard of this process. ``problem`` says why there is no guard; "" if there is one."""

    def __init__(self, environ: Mapping[str, str], maps: Path = Path("/proc/self/maps")) -> None:
        self._page: Page | None = None
        self.problem = self._open(environ, maps)

    def _open(self, environ: Mapping[str, str], maps: Path) -> str:
        path = environ.get(PAGE_VARIABLE)
        if not path:
            return NO_GUARD
        library = next(
            (p for p in environ.get("LD_PRELOAD", "").replace(":", " ").split()
             if os.path.basename(p) == LIBRARY),
            None,
        )  # fmt: skip
        if library is None:
            return "LD_PRELOAD of this process does not name the guard"
        try:
            if os.path.realpath(library) not in maps.read_text():
                return f"{library} is not loaded in this process"
            self._page = Page.passed(_ask(environ)) if path == PASSED else Page.open(Path(path))
        except (OSError, PageError) as error:
            return str(error).rstrip(".")
        return ""

    @property
    def on(self) -> bool:
        """Whether CUDA calls of this process go through the guard."""
        return self._page is not None

    def close(self) -> None:
        """Close the session's page."""
        if self._page is not None:
            self._page.close()
            self._page = None
            self.problem = "the agent was unloaded"

    def reading(self) -> Reading | None:
        """Return what the session's page says, without the slots of dead processes.

        Return None if the process has no guard, or if the page is not valid.
        """
        if self._page is None:
            return None
        try:
            reading = self._page.read()
        except (OSError, PageError):
            return None
        slots = tuple(s for s in reading.slots if alive(ProcessId(s.pid, s.start_time)))
        return replace(reading, slots=slots)

    def devices(self) -> tuple[str, ...]:
        """Return the UUIDs of the devices that the session's processes see, in their order."""
        try:
            return () if self._page is None else self._page.devices()
        except (OSError, PageError):
            return ()

    def cuda(self) -> bool | None:
        """Return whether any process of the session has called cuInit; None if unknown."""
        reading = self.reading()
        return None if reading is None else reading.cuda

    def waiting(self) -> int:
        """Return how many threads of the session wait for a slice.

        Threads that wait only for their time slice do not count.
        """
        reading = self.reading()
        return reading.waiting if reading is not None and reading.gate == CLOSED else 0

    def held(self) -> bool:
        """Return whether a library's own thread still waits after an interrupt by the user."""
        reading = self.reading()
        return reading is not None and any(slot.held for slot in reading.slots)

    def away(self) -> bool:
        """Return whether this process's device state is in host memory, or will soon move there.

        If this is true, a CUDA call waits until the device state is back on the device. The page
        shows this state: the gate is closed, and this process has a context.
        """
        reading = self.reading()
        if reading is None or reading.gate != CLOSED:
            return False
        own = os.getpid()
        return any(s.pid == own and s.flags & SLOT_CONTEXT for s in reading.slots)

    def refuses_managed(self) -> bool:
        """Return whether the session may not allocate managed memory."""
        try:
            return self._page is not None and not self._page.managed()
        except OSError:
            return False

    def figures(self) -> MemoryFigures | None:
        """Return the figures of the session's device with the least free memory."""
        reading = self.reading()
        if reading is None:
            return None
        pairs = zip(reading.granted, reading.used, strict=True)
        granted, used = min(pairs, key=lambda pair: pair[0] - pair[1], default=(0, 0))
        return MemoryFigures(used, granted, reading.limit, reading.waiting)
