# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Helpers that write the session's page in place of a guard.

To find a guard, the agent reads only the page and the list of mapped files. A page and an empty
library with the guard's name look like a guard to the agent.
"""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

from jupyter_gpupool.guard import page as layout
from jupyter_gpupool.guard.page import CLOSED, UNUSED, Page
from jupyter_gpupool.procfs import identify

#: The first fields of ``struct page_slot``. The last of these fields is ``context``, which has the
#: bytes charged for contexts.
_SLOT = struct.Struct("<IIQIIII8Q8Q")


class GuardPage:
    """The page of one session, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "page"
        self.page = Page.create(self.path, "s1", os.getuid())
        self.library = folder / "libcuda.so.1"
        subprocess.run(
            ["cc", "-shared", "-x", "c", "/dev/null", "-o", str(self.library)], check=True
        )

    def env(self, device: str) -> dict[str, str]:
        return {
            "GPUPOOL_PAGE": str(self.path),
            "GPUPOOL_VISIBLE": device,
            "LD_PRELOAD": str(self.library),
        }

    def grant(self, device: str, granted: int, limit: int, epoch: int = 1) -> None:
        """Open the gate, with this many bytes granted."""
        self.page.set_devices([device])
        self.page.set_grant([granted], limit, epoch)
        self.page.set_gate(UNUSED)

    def shut(self) -> None:
        self.page.set_gate(CLOSED)

    def process(
        self, pid: int, *, waiting: int = 0, used: int = 0, flags: int = 0, number: int = 0,
        held: int = 0,
    ) -> None:  # fmt: skip
        """Write the state of one process."""
        found = identify(pid)
        start = found.start_time if found else 0
        data = _SLOT.pack(1, pid, start, 0, waiting, flags, 0, used, *[0] * 15)
        with self.path.open("r+b") as file:
            file.seek(layout.HEADER_BYTES + number * layout.SLOT_BYTES)
            file.write(data)
            file.seek(layout.HEADER_BYTES + number * layout.SLOT_BYTES + layout.HELD_AT)
            file.write(held.to_bytes(4, "little"))
