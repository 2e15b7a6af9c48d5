# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Worker processes and their effects.

A worker process suspends other processes, and reads their memory from NVML.
"""

from contextlib import suppress
from pathlib import Path

#: Statements to pass to ``machine.target().do``.
WORKER = """
from cuda.core.checkpoint import Process
import pynvml as n
n.nvmlInit()
def call(pid, name, *args):
    try:
        getattr(Process(pid), name)(*args)
    except Exception as error:
        return str(error).split(":")[0]
def handle(i=0):
    return n.nvmlDeviceGetHandleByIndex(i)
def listed(i=0):
    return {p.pid: p.usedGpuMemory for p in n.nvmlDeviceGetComputeRunningProcesses(handle(i))}
def pids(i=0):
    return [*listed(i)]
_ = 1
"""


def on_devices(pid):
    """Return how many bytes of a process's device memory are on a device, not in host memory."""
    sizes = {}
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the process has closed it since
            if str(file.readlink()).startswith("/memfd:emucuda-device"):
                found = file.stat()
                sizes[found.st_ino] = found.st_blocks * 512
    return sum(sizes.values())
