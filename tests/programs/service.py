# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A small inference service: ``service.py SOCKET MIB KEY``.

The service keeps a model of MIB mebibytes in GPU memory. Each request and each answer is a line of
JSON. A request says for how long the GPU computes. The answer is a word of the model. The words
depend on KEY, so a service with another KEY gives other answers.
"""

from __future__ import annotations

import ctypes
import json
import socket
import sys
from pathlib import Path

import numpy as np
from cuda.bindings import driver

from tests.emulated import PTX


def call(answer):
    error, *values = answer
    assert error == driver.CUresult.CUDA_SUCCESS, f"the driver answered {error!r}"
    return values[0] if values else None


def main():
    path, mib, key = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    call(driver.cuInit(0))
    device = call(driver.cuDeviceGet(0))
    call(driver.cuCtxSetCurrent(call(driver.cuDevicePrimaryCtxRetain(device))))
    spin = call(driver.cuModuleGetFunction(call(driver.cuModuleLoadData(PTX.encode())),
                                           b"emucuda_spin_ns"))  # fmt: skip
    model = np.arange(mib << 17, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(key)
    address = int(call(driver.cuMemAlloc(model.nbytes)))
    call(driver.cuMemcpyHtoD(address, model.ctypes.data, model.nbytes))
    with socket.socket(socket.AF_UNIX) as listener:
        # A client connects as soon as ``path`` exists. So the service gives the socket this name
        # only when it already listens.
        listener.bind(f"{path}.new")
        listener.listen()
        Path(f"{path}.new").rename(path)
        while True:
            peer, _ = listener.accept()
            with peer, peer.makefile("rw") as lines:
                for line in lines:
                    print(json.dumps(serve(json.loads(line), spin, address, model)), file=lines)
                    lines.flush()


def serve(request, spin, address, model):
    if "alloc" in request:
        error, pointer = driver.cuMemAlloc(request["alloc"] << 20)
        if error == driver.CUresult.CUDA_SUCCESS:
            call(driver.cuMemFree(pointer))
        return error.name
    call(driver.cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, 0,
                               ((request["ns"],), (ctypes.c_uint64,)), 0))  # fmt: skip
    call(driver.cuCtxSynchronize())
    back = np.empty(1, dtype=np.uint64)
    call(driver.cuMemcpyDtoH(back.ctypes.data, address + 8 * request["word"], 8))
    assert back[0] == model[request["word"]], "another model's word"
    return int(back[0])


if __name__ == "__main__":
    main()
