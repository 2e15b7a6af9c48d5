# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Helpers for tests that act as the guard: a test maps the session's page, and asks the broker."""

from __future__ import annotations

import mmap
import os
import struct
from contextlib import contextmanager
from pathlib import Path

from jupyter_gpupool.guard import page as layout
from jupyter_gpupool.guard.install import without_guard
from jupyter_gpupool.procfs import identify

from . import kit

OPEN, UNUSED, CLOSED, PAUSED = layout.OPEN, layout.UNUSED, layout.CLOSED, layout.PAUSED

#: Offsets in a slot.
START, INFLIGHT, WAITING, FLAGS, PINS, USED, CAPTURES = 8, 16, 20, 24, 28, 32, 160


class GuardedBroker(kit.Broker):
    """A broker whose devices count as guarded."""

    module = "tests.broker.guarded_broker"


class Guarded(kit.Kernel):
    """A kernel without a guard: the test acts as its guard. With ``agent``, it has an agent."""

    def __init__(self, broker, label="", *, agent=False, launch=True, attach=None, **request):
        self._attach = attach
        super().__init__(broker, label, agent=agent, launch=False, **request)
        self.path = Path(self.env["GPUPOOL_PAGE"])
        with self.path.open("r+b") as file:
            self.map = mmap.mmap(file.fileno(), layout.SIZE)
        self.slots = 0
        self.env = without_guard(self.env)
        self.env.pop("LD_PRELOAD", None)
        if launch:
            self.launch(agent=agent)
            self.slot(self.process.pid)

    def open_fields(self):
        return {} if self._attach is None else {"attach": self._attach}

    # ------------------------------------------------------------------ the page

    def gate(self):
        return self.map[8]

    def touch(self):
        """Change the gate from UNUSED to OPEN, as the first CUDA call after a sample does.

        Return False if a CUDA call must wait at the gate.
        """
        if self.map[8] == UNUSED:
            self.map[8] = OPEN
        return self.map[8] == OPEN

    def slot(self, pid, flags=0):
        """Give process ``pid`` a slot; return its number."""
        number, self.slots = self.slots, self.slots + 1
        at = layout.HEADER_BYTES + number * layout.SLOT_BYTES
        struct.pack_into("<IIQ", self.map, at, 1, pid, identify(pid).start_time)
        self.set(FLAGS, flags, slot=number)
        return number

    def set(self, field, value, *, slot=0):
        at = layout.HEADER_BYTES + slot * layout.SLOT_BYTES + field
        struct.pack_into("<Q" if USED <= field != CAPTURES else "<I", self.map, at, value)

    def use(self, size, *, slot=0, device=0):
        """Count bytes, as an allocation does."""
        assert self.touch()
        self.set(USED + 8 * device, size, slot=slot)

    def granted(self, device=0):
        return struct.unpack_from("<Q", self.map, 64 + 8 * device)[0]

    def limit(self):
        return struct.unpack_from("<Q", self.map, 32)[0]

    def pause_until(self):
        return struct.unpack_from("<Q", self.map, 24)[0]

    def devices(self):
        count = struct.unpack_from("<I", self.map, 12)[0]
        texts = [self.map[128 + 48 * i : 176 + 48 * i] for i in range(count)]
        return [bytes(text).split(b"\0", 1)[0].decode() for text in texts]

    # ------------------------------------------------------------------ the broker

    @contextmanager
    def asking(self, kind="attach", **fields):
        """Send the request of a thread that waits at the gate; yield the connection."""
        with kit.Raw(self.broker.socket) as raw:
            fields = {"session": self.session, "token": self.token, **fields}
            raw.say(type=kind, id=1, pid=os.getpid(), tid=1, **fields)
            yield raw

    def ask(self, kind="attach", **fields):
        with self.asking(kind, **fields) as raw:
            return raw.read()

    def lease(self):
        """Wait at the gate until it opens."""
        answer = self.ask()
        assert answer["type"] == "ok", answer
        assert self.gate() in (OPEN, UNUSED)
        self.set(FLAGS, layout.SLOT_CUDA | layout.SLOT_CONTEXT)
        return answer

    def status(self):
        return self.broker.session(self.session)

    def close(self):
        self.map.close()
        super().close()
