# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The CUDA runtime (``libcudart.so``) of the emulated driver."""

import os
import subprocess
import sys

import pytest

from emucuda import build, library_dir

#: The first lines of all clients: they load the runtime and define functions for its calls.
CLIENT = r"""
import ctypes as c, sys
R = c.CDLL(sys.argv[1])
R.cudaGetErrorName.restype = R.cudaGetErrorString.restype = c.c_char_p
P, I, N = c.c_void_p, c.c_int, c.c_size_t
def ok(code): assert code == 0, (code, R.cudaGetErrorName(code))
def get(kind, call, *args):
    out = kind(); ok(call(c.byref(out), *args)); return out.value
class Dim(c.Structure): _fields_ = [("x", I), ("y", I), ("z", I)]
one = Dim(1, 1, 1)
def register(stub, name):
    R.__getattr__("__cudaRegisterFunction")(None, stub, b"", name, *[None] * 6)
"""

USES = r"""
assert get(I, R.cudaGetDeviceCount) == 2
assert get(I, R.cudaGetDevice) == 0
properties = (c.c_char * 2048)()
call = "cudaGetDeviceProperties" + ("_v2" if "so.12" in sys.argv[1] else "")
ok(getattr(R, call)(properties, 1))
assert properties.value.startswith(b"EMULATED"), properties.value

text = b"hello emulated runtime"
device = get(P, R.cudaMalloc, N(1 << 20))
back = c.create_string_buffer(len(text))
ok(R.cudaMemcpy(P(device), text, N(len(text)), 1))
ok(R.cudaMemcpy(back, P(device), N(len(text)), 4))
assert back.value + back.raw[len(back.value):] == text

stream, event = get(P, R.cudaStreamCreate), get(P, R.cudaEventCreateWithFlags, 2)
ok(R.cudaMemsetAsync(P(device), 7, N(16), P(stream)))
ok(R.cudaEventRecord(P(event), P(stream)))
ok(R.cudaStreamSynchronize(P(stream)))
ok(R.cudaEventQuery(P(event)))
ok(R.cudaMemcpy(back, P(device), N(16), 2))
assert back.raw[:16] == bytes([7]) * 16

attributes = (I * 64)()
ok(R.cudaPointerGetAttributes(attributes, P(device)))
assert list(attributes[:2]) == [2, 0]
ok(R.cudaPointerGetAttributes(attributes, back))
assert list(attributes[:2]) == [0, -2]
ok(R.cudaSetDevice(1))
ok(R.cudaMemcpyPeer(P(get(P, R.cudaMalloc, N(64))), 1, P(device), 0, N(64)))
ok(R.cudaFree(P(device)))

# Sleeping kernels are the only ones of compiled programs that can run.
register(P(16), b"_ZN2at4cuda11spin_kernelEl")
cycles = c.c_int64(1000)
ok(R.cudaLaunchKernel(P(16), one, one, c.byref(P(c.addressof(cycles))), N(0), None))
ok(R.cudaDeviceSynchronize())
"""

REFUSALS = r"""
register(P(32), b"_Z3addPf")
for _ in range(2):
    assert R.cudaLaunchKernel(P(32), one, one, None, N(0), None) == 209
assert R.cudaGetLastError() == 209 and R.cudaGetLastError() == 0
ok(R.cudaDeviceSynchronize())
# A program that ignored it gets no old bytes for results.
host, device = c.c_uint32(7), get(P, R.cudaMalloc, N(4))
assert R.cudaLaunchKernel(P(32), one, one, None, N(0), None) == 209
assert R.cudaMemcpy(c.byref(host), P(device), N(4), 2) == 209 and host.value == 7
ok(R.cudaMemcpy(c.byref(host), P(device), N(4), 2))
import threading  # as in a backward pass
thread = threading.Thread(target=R.cudaLaunchKernel, args=(P(32), one, one, None, N(0), None))
thread.start(); thread.join()
assert R.cudaDeviceSynchronize() == 209
ok(R.cudaDeviceSynchronize())
assert R.cudaLaunchKernel(P(48), one, one, None, N(0), None) == 98
assert R.cudaCreateTextureObject(None, None, None, None) == 801
assert R.cudaGetErrorName(2) == b"CUDA_ERROR_OUT_OF_MEMORY"
assert R.cudaMalloc(c.byref(P()), N(1 << 40)) == 2 and R.cudaPeekAtLastError() == 2
"""


def _run(env, code, major):
    command = [sys.executable, "-c", CLIENT + code, str(library_dir() / f"libcudart.so.{major}")]
    return subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("major", [12, 13])
def test_program_that_calls_the_cuda_runtime_works(emulated, major):
    done = _run(emulated("2x64MiB,context=1MiB").env, USES, major)
    assert (done.returncode, done.stderr) == (0, "")


def test_error_names_the_call_that_cannot_run(emulated):
    done = _run(emulated("1x64MiB,context=1MiB").env, REFUSALS, 12)
    assert done.returncode == 0, done.stderr
    native, refused = done.stderr.splitlines()  # each message is printed once
    assert native.startswith("emucuda: _Z3addPf is a kernel in a GPU's machine code")
    assert refused == "emucuda: cudaCreateTextureObject is not emulated."


def test_runtime_reports_that_there_is_no_device():
    env = {"LD_LIBRARY_PATH": str(library_dir()), "EMUCUDA_MACHINE": ""}
    done = _run(env, "assert R.cudaGetDeviceCount(c.byref(I())) == 100", 12)
    assert done.returncode == 0, done.stderr


def test_the_runtime_refuses_a_driver_that_is_not_emulated(tmp_path):
    """On a machine with a GPU, the emulated runtime must not replace NVIDIA's runtime."""
    source = tmp_path / "driver.c"
    source.write_text(
        "int no(const void **table, const void *id) { *table = 0; return 1; }\n"
        "int cuGetProcAddress_v2(const char *name, void **out, int version, long flags, int *s)\n"
        "{ *out = no; return 0; }\n"
    )
    command = [*build.compiler(), "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), source]
    subprocess.run(command, check=True, timeout=60)
    code = "assert R.cudaGetDeviceCount(c.byref(I())) == 35"
    done = _run({"LD_LIBRARY_PATH": str(tmp_path)}, code, 12)
    assert done.returncode == 0, done.stderr
    assert "use NVIDIA's runtime there" in done.stderr


#: Defines ``launch``, which launches the host function ``add`` in place of a kernel. ``add`` adds
#: one to a word of device memory.
HOST_CALLS = r"""
PTX = b'''.version 7.0
.target sm_70
.address_size 64
.visible .entry emucuda_host_call(.param .u64 f, .param .u64 x, .param .u64 ns) { ret; }'''
lib = ctypes.CDLL("libcuda.so.1")
class Table(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t),
                ("bytes_at", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64))]
table = ctypes.POINTER(Table)()
assert lib.cuGetExportTable(ctypes.byref(table), b"emucuda: devices") == 0
c = context()
function = ok(D.cuModuleGetFunction(ok(D.cuModuleLoadData(PTX)), b"emucuda_host_call"))
word = int(ok(D.cuMemAlloc(4)))
ok(D.cuMemsetD32(word, 41, 1))
begin, go = threading.Event(), threading.Event()
seen = []

@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)
def add(address):
    begin.set()
    go.wait()
    seen.append(int(D.cuMemAlloc(4096)[0]))  # a nested call, while the lock waits for this one
    ctypes.c_uint32.from_address(table.contents.bytes_at(address, 4)).value += 1
    return 0

def launch(stream=0, ns=0):
    values = [ctypes.cast(add, ctypes.c_void_p).value, word, ns]
    arrays = np.array(values, dtype=np.uint64)
    pointers = np.array([arrays[i:].ctypes.data for i in range(3)], dtype=np.uint64)
    ok(D.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, pointers.ctypes.data, 0))

def value():
    found = np.zeros(1, dtype=np.uint32)
    ok(D.cuMemcpyDtoH(found.ctypes.data, word, 4))
    return int(found[0])
"""


def test_suspend_waits_for_a_host_call_and_a_graph_repeats_it(emulated):
    machine = emulated("1x256MiB,context=1MiB")
    child, other = machine.target(), machine.target()
    child.do("import threading" + HOST_CALLS)
    child.do("t = threading.Thread(target=lambda: (ok(D.cuCtxSetCurrent(c)), launch()))")
    child.do("t.start(); begin.wait()")
    other.do("from cuda.core.checkpoint import Process; ok(D.cuInit(0))")
    other.do(f"p = Process({child.pid})")
    other.send("p.lock(60000)")
    assert other.hangs()
    child.do("go.set()")
    other.reply()
    assert child.do("_ = seen") == [0]
    other.do("p.checkpoint(); p.restore(); p.unlock()")
    assert child.do("t.join(); _ = value()") == 42
    # ``bytes_at`` must return NULL for a range that is larger than the allocation.
    assert child.do("_ = table.contents.bytes_at(word, 1 << 40)") is None
    child.do("s = ok(D.cuStreamCreate(1)); ok(D.cuStreamBeginCapture(s, 2)); launch(s)")
    child.do("g = ok(D.cuGraphInstantiate(ok(D.cuStreamEndCapture(s)), 0))")
    assert child.do("_ = value()") == 42
    assert child.do("[ok(D.cuGraphLaunch(g, s)) for _ in range(3)]; _ = value()") == 45
