# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A CUDA process under test. It answers each line of JSON with a line of JSON.

This script uses NVIDIA's own bindings and imports nothing of jupyter_gpupool.
"""

import hashlib
import json
import os
import random
import subprocess
import sys

from cuda.bindings import driver

buffers = {}
children = []


def call(function, *arguments):
    result, *values = function(*arguments)
    if result != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{function.__name__}: {result.name}")
    return values[0] if values else None


def init():
    call(driver.cuInit, 0)


def context():
    init()
    device = call(driver.cuDeviceGet, 0)
    call(driver.cuCtxSetCurrent, call(driver.cuDevicePrimaryCtxRetain, device))


def leave():
    """Destroy the context of :func:`context`."""
    call(driver.cuDevicePrimaryCtxRelease, call(driver.cuDeviceGet, 0))


def fill(size, seed):
    """Allocate, write known bytes, and return their hash."""
    data = random.Random(seed).randbytes(size)
    pointer = call(driver.cuMemAlloc, size)
    call(driver.cuMemcpyHtoD, pointer, data, size)
    buffers[seed] = (pointer, size)
    return hashlib.sha256(data).hexdigest()


def take(size):
    """Allocate without touching the memory."""
    return int(call(driver.cuMemAlloc, size))


def digest(seed):
    """Return the hash of the bytes on the device now."""
    pointer, size = buffers[seed]
    data = bytearray(size)
    call(driver.cuMemcpyDtoH, data, pointer, size)
    return hashlib.sha256(data).hexdigest()


def address(seed):
    return int(buffers[seed][0])


def managed(size):
    flags = driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL.value
    return int(call(driver.cuMemAllocManaged, size, flags))


def device():
    """Return the UUID of the current device as the driver reports it now."""
    uuid = call(driver.cuDeviceGetUuid_v2, call(driver.cuCtxGetDevice))
    return uuid.bytes.hex()


def spawn():
    """Start a child that runs this script, too; return its pid."""
    child = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    children.append(child)
    return child.pid


def relay(request):
    """Pass ``request`` to the newest child, and return the child's answer."""
    child = children[-1]
    child.stdin.write(json.dumps(request).encode() + b"\n")
    child.stdin.flush()
    return json.loads(child.stdout.readline())


def pid():
    return os.getpid()


def main():
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"ok": globals()[name](*arguments)}
        except RuntimeError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


main()
