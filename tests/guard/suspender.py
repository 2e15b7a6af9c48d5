# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Suspends and resumes processes with the driver's own calls, as the broker does."""

import random
import sys
import threading
import time

from jupyter_gpupool.guard import page as pages

MIB = 1 << 20

WORKER = r"""
import ast, sys
from cuda.core.checkpoint import Process
import pynvml as n

n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)

def used():
    return n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2).used

def suspend(pids):
    for pid in pids:
        Process(pid).lock(10000)
    for pid in pids:
        Process(pid).checkpoint()
    return used()

def resume(pids):
    for pid in pids:
        Process(pid).restore()
    for pid in pids:
        Process(pid).unlock()

g = dict(globals())
for line in sys.stdin:
    try:
        exec(ast.literal_eval(line), g)
        out = repr(g.pop("_", None))
    except BaseException as error:
        out = repr(("raised", type(error).__name__, str(error)))
    print("\x01" + out, flush=True)
"""


class Suspender:
    """Suspends and resumes the processes, as the broker does."""

    def __init__(self, session, seed, *, open_gate=True):
        self.session = session
        self.chance = random.Random(seed)
        self.worker = session.child(
            [sys.executable, "-uc", WORKER],
            LD_PRELOAD=None,
            LD_LIBRARY_PATH=session.machine_env["LD_LIBRARY_PATH"],
            GPUPOOL_PAGE=None,
        )
        self.opened = threading.Condition()
        self.open = True
        self.grants = 0
        self.refusals = 0
        self._granting = threading.Lock()
        session.broker.answer = self._answer
        if open_gate:
            session.grant(session.uuids, each=64 * MIB)

    def _answer(self, message):
        if message["type"] == "grow":
            return self._grow(message)
        assert message["type"] == "attach", message
        with self.opened:
            assert self.opened.wait_for(lambda: self.open, 60)
        return {"type": "ok", "epoch": 1}

    def _grow(self, message):
        with self._granting:
            assert message["bytes"] > 0
            assert message["device"] == 0
            if (self.grants + self.refusals) % 5 == 4:
                self.refusals += 1
                return {"type": "error", "code": "limit", "message": "no"}
            page = self.session.page.read()
            if not page.granted[0]:  # the session was suspended after the guard sent its request
                return {"type": "error", "code": "no-memory", "message": "no"}
            granted = page.granted[0] + message["bytes"] + 4 * MIB
            self.session.page.set_grant([granted, granted], 1 << 30, 1)
            self.grants += 1
            return {"type": "ok", "granted": granted}

    def used(self):
        """Return how many bytes of the device all processes together use."""
        return self.worker.do("_ = used()", 60)

    def suspend(self, pids, until):
        with self.opened:
            self.open = False
            self.session.page.set_gate(pages.CLOSED)
        until(lambda: self.session.page.read().inflight == 0)
        assert self.worker.do(f"_ = suspend({pids})", 60) == 0  # bytes in use on the device
        with self._granting:
            self.session.page.set_grant([], 1 << 30, 1)

    def resume(self, pids, until, used=True):
        assert self.worker.do(f"_ = resume({pids})", 60) is None
        with self._granting:  # the grant is small, so that the guard often asks for more
            granted = self.session.page.read().used[0] + MIB
            self.session.page.set_grant([granted, granted], 1 << 30, 1)
        with self.opened:
            self.open = True
            self.session.page.set_gate(pages.UNUSED)
            self.opened.notify_all()
        if used:
            until(lambda: self.session.page.gate() == pages.OPEN)  # a call has passed the gate

    def pause(self):
        """Pause the processes, as the broker does when a neighbour uses the device.

        A process sends no request during a pause.
        """
        until = time.monotonic_ns() + 4_000_000
        self.session.page.set_gate(pages.PAUSED, pause_until=until)
        if self.chance.random() < 0.5:
            time.sleep(0.002)
            self.session.page.set_gate(pages.UNUSED)
