# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The code of a worker process: it suspends other processes and reads their memory from NVML."""

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
