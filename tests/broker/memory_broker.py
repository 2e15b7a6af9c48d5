# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A broker for the devices of another vendor. The tests emulate their memory by files.

These devices have no driver and no guard. The file ``<machine>/<uuid>/<pid>`` has the bytes that
the program ``pid`` has on a device. After a suspend, the file ``<machine>/host/<pid>`` has them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from jupyter_gpupool import procfs
from jupyter_gpupool.broker import app
from jupyter_gpupool.devices import (
    DeviceSample,
    ProcessMemory,
    ResumeOutcome,
    SuspendOutcome,
)
from jupyter_gpupool.errors import DriverError
from jupyter_gpupool.pool.model import Device

MACHINE = "MEMORY_MACHINE"
VISIBLE = "MEMORY_VISIBLE_DEVICES"
SIZE = 512 << 20
NAMES = ("MEM-0", "MEM-1")


class MemoryDevices:
    """See :class:`jupyter_gpupool.devices.Devices`."""

    problem = limit = hazard = memo = ""
    versions = "Host memory 1.0"
    visible = VISIBLE
    guard = None

    def __init__(self, options):
        self.machine = Path(options.env[MACHINE])
        self.down = ""
        self.renewed = frozenset()

    def _place(self, device, process):
        return self.machine / device / str(process.pid)

    def _found(self):
        for name in (*NAMES, "host"):
            (self.machine / name).mkdir(parents=True, exist_ok=True)
        return [
            Device(name, index, "Host memory", "memory", SIZE, tier="unguarded")
            for index, name in enumerate(NAMES)
        ]

    async def start(self, known=None):
        return self._found()

    async def assume(self, known, reason):
        self.down = reason
        return [*known.values()]

    async def renew(self, uuids=None):
        self.down, self.renewed = "", frozenset(NAMES if uuids is None else uuids)
        return self._found()

    async def self_test(self, uuid):
        return self._found()[NAMES.index(uuid)]

    retest = self_test

    async def sample(self):
        if self.down:
            raise DriverError(self.down, code="paused")
        found = []
        for name in NAMES:
            sizes = {int(p.name): p.stat().st_size for p in (self.machine / name).iterdir()}
            there = tuple(ProcessMemory(pid, n) for pid, n in sizes.items() if procfs.identify(pid))
            used = sum(process.bytes for process in there)
            found.append(DeviceSample(name, SIZE, used, 0, SIZE - used, there))
        return found

    def environment(self, devices):
        return {VISIBLE: ",".join(devices), MACHINE: str(self.machine)}

    def context_bytes(self, uuid):
        return 0

    async def suspend(self, root, devices, *, session, on_kept=None):
        if procfs.presence(root) == "gone":
            return SuspendOutcome("gone")
        found = next((name for name in devices if self._place(name, root).exists()), None)
        if found is None:
            return SuspendOutcome("nothing", cuda=False)
        size = self._place(found, root).stat().st_size
        self._place(found, root).rename(self._place("host", root))
        return SuspendOutcome("suspended", freed={found: size}, cuda=True, processes=(root,))

    async def resume(self, root, devices, origin, *, session, need, known=()):
        if procfs.presence(root) == "gone":
            return ResumeOutcome("gone")
        free = {sample.uuid: sample.free for sample in await self.sample()}
        if any(free[name] < size for name, size in need.items()):
            return ResumeOutcome("no-room", "Another program uses the memory.")
        self._place("host", root).rename(self._place(devices[0], root))
        return ResumeOutcome("resumed")

    async def driver_state(self, root, *, session):
        if procfs.presence(root) == "gone":
            return "gone"
        if self._place("host", root).exists():
            return "checkpointed"
        return "running" if any(self._place(name, root).exists() for name in NAMES) else "none"

    async def unlock(self, root, *, session):
        pass

    async def stand_down(self, reason, uuids=None):
        if uuids is None:
            self.down = reason

    def is_aside(self, uuid):
        return False

    def has_file(self, uuid):
        return False

    def holders(self, uuid=""):
        return [], 0

    async def close(self, grace=10.0):
        pass


if __name__ == "__main__":
    os.environ.pop(VISIBLE, None)
    sys.exit(app.main(open_devices=MemoryDevices))
