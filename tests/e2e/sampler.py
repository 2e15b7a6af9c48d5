# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A child process that samples the devices through NVML: ``sampler.py FILE HERTZ SOCKET``.

The process writes one JSON line per sample to FILE until stdin is closed. A line has the time. For
each device, it has the total, used and reserved bytes, and the bytes of each process. With HERTZ 0,
the process takes only one sample.

With a SOCKET, the process asks the broker for its status before and after every fifth sample. This
sample has three more fields:

``granted``
    Device -> pid -> bytes: the grants in the second status.
``steady``
    The pids with the same lease in both statuses. Only for these pids, the sampled bytes and the
    grant belong to the same moment.
``landing``
    Pid -> devices on which the process was landing in one of the two statuses. A landing process
    makes its first context on such a device, and then the broker moves the process to the device
    of its slice. Each device keeps memory for one such context.
"""

from __future__ import annotations

import json
import select
import sys
import time
from typing import Any

import pynvml

from jupyter_gpupool.client import Client
from jupyter_gpupool.errors import GPUPoolError


def look(handles: list[Any]) -> list[dict[str, Any]]:
    devices = []
    for handle in handles:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        devices.append(
            {
                "uuid": pynvml.nvmlDeviceGetUUID(handle),
                "total": memory.total,
                "used": memory.used,
                "reserved": memory.reserved,
                "processes": {str(p.pid): p.usedGpuMemory or 0 for p in processes},
            }
        )
    return devices


class Broker:
    """The connection to the broker. It is made again when needed, because tests kill the broker."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.client: Client | None = None

    def leases(self) -> dict[str, tuple[Any, ...]] | None:
        """Return pid -> (state, granted bytes, devices, landing); None if no broker answers."""
        try:
            if self.client is None or self.client.closed:
                self.client = Client(self.path)
            sessions = self.client.call("status", timeout=60)["sessions"]
        except GPUPoolError:
            return None
        return {
            str(s["pid"]): (s["state"], s["granted_bytes"], s["devices"], s["landing"])
            for s in sessions
            if s["pid"]
        }


def main(path: str, hertz: float, socket: str) -> None:
    pynvml.nvmlInit()
    count = pynvml.nvmlDeviceGetCount()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
    broker = Broker(socket) if socket else None
    number = 0
    with open(path, "w") as file:
        while True:
            asked = broker is not None and number % 5 == 0
            before = broker.leases() if broker and asked else None
            sample: dict[str, Any] = {"time": time.time(), "devices": look(handles)}
            after = broker.leases() if broker and asked else None
            if before is not None and after is not None:
                granted: dict[str, dict[str, int]] = {}
                landing: dict[str, list[str]] = {}
                for pid, (_, amount, devices, there) in after.items():
                    landing[pid] = [*there, *(before[pid][3] if pid in before else ())]
                    for device in devices:
                        granted.setdefault(device, {})[pid] = amount // len(devices)
                sample["granted"] = granted
                sample["landing"] = landing
                sample["steady"] = [
                    pid for pid in after if after[pid][:3] == before.get(pid, ())[:3]
                ]
            file.write(json.dumps(sample) + "\n")
            file.flush()
            number += 1
            if not hertz or select.select([sys.stdin], [], [], 1 / hertz)[0]:
                return


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3])
