# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A program that calls CUDA without any part of the pool: no agent, no hold, no broker.

It reads one JSON command per line on stdin, and writes one answer per line on stdout. It makes all
CUDA calls by ctypes. If a call returns an error code, the answer is ``{"cuda": code}``.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import uuid

from tests.broker.readback import has_byte

CUDA = ctypes.CDLL("libcuda.so.1")
POINTER = ctypes.c_uint64
BUFFERS = {}
CHILDREN = []
THREADS = {}


class CudaError(Exception):
    pass


def call(name, *args):
    result = getattr(CUDA, name)(*args)
    if result:
        raise CudaError(result)


def do_init(_):
    call("cuInit", 0)
    count = ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    return count.value


def do_ask(_):
    """Ask about the devices as programs do before they use one."""
    call("cuInit", 0)
    count, number, total = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    call("cuDeviceGetCount", ctypes.byref(count))
    name = ctypes.create_string_buffer(100)
    for device in range(count.value):
        call("cuDeviceGetName", name, 100, device)
        call("cuDeviceGetAttribute", ctypes.byref(number), 16, device)
        call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
    return [f"GPU-{uuid.UUID(bytes=uuid_of(device))}" for device in range(count.value)]


def do_look(_):
    """Query CUDA in this process and in two child processes; return the errors, by query."""
    found = {}
    number, size, pointer = ctypes.c_uint(), ctypes.c_size_t(), ctypes.c_void_p()
    questions = {
        "cuDevicePrimaryCtxGetState": (0, ctypes.byref(number), ctypes.byref(ctypes.c_int())),
        "cuDevicePrimaryCtxSetFlags_v2": (0, 4),
        "cuDeviceGetPCIBusId": (ctypes.create_string_buffer(64), 64, 0),
        "cuCtxGetCurrent": (ctypes.byref(pointer),),
        "cuCtxSetCurrent": (None,),
        "cuMemGetInfo_v2": (ctypes.byref(size), ctypes.byref(size)),
    }
    for name, arguments in questions.items():
        found[name] = getattr(CUDA, name)(*arguments)
    child = os.fork()
    if not child:
        os._exit(CUDA.cuInit(0))
    found["fork"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = (
        "import ctypes, pynvml; from cuda.bindings import driver; pynvml.nvmlInit();"
        "assert ctypes.CDLL('libcuda.so.1').cuInit(0) == 0; driver.cuInit(0);"
        "pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0));"
        "assert driver.cuDeviceGetCount()[1] == 1"
    )
    found["child"] = subprocess.run([sys.executable, "-c", code], check=False).returncode
    return {name: result for name, result in found.items() if result}


def uuid_of(device):
    found = ctypes.create_string_buffer(16)
    call("cuDeviceGetUuid_v2", found, device)
    return found.raw


def do_retain(command):
    """Make a context on a given device: in a new program, the first call that needs a lease."""
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), command["device"])
    call("cuCtxSetCurrent", context)


def do_release(command):
    call("cuDevicePrimaryCtxRelease_v2", command["device"])


def do_hold(command):
    """Ask for a slice as the agent does, without waiting for the answer."""
    from jupyter_gpupool.kernel.link import SessionLink

    names = ("GPUPOOL_SOCKET", "GPUPOOL_SESSION", "GPUPOOL_TOKEN")
    link = SessionLink(*(os.environ[name] for name in names), cuda=lambda: None)
    link.start()
    THREADS["agent"] = link, link.wait(command["hold"], "cell", lambda: None)


def do_land(command):
    """Send ``land``, as the guard does when it moves the process to the GPU of its slice.

    Return None, or the code of the broker's error.
    """
    from jupyter_gpupool.client import Client
    from jupyter_gpupool.errors import GPUPoolError

    session, token = os.environ["GPUPOOL_SESSION"], os.environ["GPUPOOL_TOKEN"]
    with Client(os.environ["GPUPOOL_SOCKET"]) as client:
        try:
            client.call("land", session=session, token=token, step=command["step"], timeout=90)
        except GPUPoolError as error:
            return error.code
    return None


def do_threads(command):
    """Make contexts in many threads at once; return the results."""
    found = []

    def make():
        context = ctypes.c_void_p()
        found.append(CUDA.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))

    threads = [threading.Thread(target=make) for _ in range(command["count"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def do_open(command):
    """Open a file, and keep it open."""
    return os.open(command["path"], os.O_RDWR)


def do_sub(command):
    """Let a child process run a command. The same child process runs the later commands."""
    if not CHILDREN:
        CHILDREN.append(
            subprocess.Popen(
                [sys.executable, "-m", __spec__.name],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
        CHILDREN[0].stdout.readline()
    CHILDREN[0].stdin.write(json.dumps(command["command"]) + "\n")
    CHILDREN[0].stdin.flush()
    return json.loads(CHILDREN[0].stdout.readline())["ok"]


def do_subpid(_):
    """Return the pid of the child process that ``do_sub`` uses."""
    return CHILDREN[0].pid


def do_context(_):
    """Make the first call that needs a lease."""
    call("cuInit", 0)
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxSetCurrent", context)


def do_alloc(command):
    """Allocate a buffer and fill it with one byte value. This value is also the buffer's key."""
    pointer = POINTER()
    call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(command["bytes"]))
    size = ctypes.c_size_t(command["bytes"])
    call("cuMemsetD8_v2", pointer, ctypes.c_ubyte(command["byte"]), size)
    BUFFERS[command["byte"]] = pointer, command["bytes"]


def do_exhaust(command):
    """Try many times to allocate too much memory; return the set of result codes, sorted."""
    pointer, size = POINTER(), ctypes.c_size_t(command["bytes"])
    times = range(command["times"])
    return sorted({CUDA.cuMemAlloc_v2(ctypes.byref(pointer), size) for _ in times})


def do_check(_):
    for byte, (pointer, size) in BUFFERS.items():

        def copy(host, offset, count, start=pointer.value):
            into = (ctypes.c_char * len(host)).from_buffer(host)
            call("cuMemcpyDtoH_v2", into, POINTER(start + offset), ctypes.c_size_t(count))

        assert has_byte(copy, size, byte), "bytes differ"
    return sum(size for _, size in BUFFERS.values())


def do_free(command):
    pointer, _ = BUFFERS.pop(command["byte"])
    call("cuMemFree_v2", pointer)


def do_info(_):
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return [free.value, total.value]


def do_sync(_):
    call("cuCtxSynchronize")


def do_nvml(_):
    """Ask NVML on the main thread, as a cell does."""
    import pynvml

    ctypes.CDLL("libnvidia-ml.so.1").gpupool_guard  # noqa: B018 - not the driver's own
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetCount()


def do_poll(_):
    """Start a thread that queries NVML about every 5 ms, like a program that collects metrics."""
    import pynvml

    state = THREADS["poll"] = {"answers": 0}

    def poll():
        while True:
            pynvml.nvmlDeviceGetUtilizationRates(handle)
            state["answers"] += 1
            threading.Event().wait(0.005)

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    threading.Thread(target=poll, daemon=True).start()


def do_polled(_):
    return THREADS["poll"]["answers"]


def do_storm(command):
    """Start a thread that makes short calls until ``do_calm`` ends it."""
    context = ctypes.c_void_p()
    call("cuCtxGetCurrent", ctypes.byref(context))
    stop = threading.Event()
    state = {"calls": 0, "error": 0}

    def storm():
        CUDA.cuCtxSetCurrent(context)
        while not stop.wait(command.get("pause", 0.001)):
            result = CUDA.cuCtxSynchronize()
            if result:
                state["error"] = result
                return
            state["calls"] += 1

    thread = threading.Thread(target=storm, daemon=True)
    THREADS["storm"] = thread, stop, state
    thread.start()


def do_calm(_):
    thread, stop, state = THREADS.pop("storm")
    stop.set()
    thread.join()
    return state


def do_toil(command):
    """Start a thread that adds to values in device memory with GPU kernels, and checks the sums."""
    import numpy

    from tests.emulated import PTX

    context, stream = ctypes.c_void_p(), ctypes.c_void_p()
    module, add = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuCtxGetCurrent", ctypes.byref(context))
    call("cuModuleLoadData", ctypes.byref(module), PTX.encode() + b"\0")
    call("cuModuleGetFunction", ctypes.byref(add), module, b"emucuda_add_u32")
    call("cuStreamCreate", ctypes.byref(stream), 1)
    words, pointer = 1 << 18, POINTER()
    size = ctypes.c_size_t(4 * words)
    call("cuMemAlloc_v2", ctypes.byref(pointer), size)
    stop, state = threading.Event(), {"rounds": 0, "error": ""}

    def toil():
        call("cuCtxSetCurrent", context)
        n, one = ctypes.c_uint64(words), ctypes.c_uint32(1)
        fields = (ctypes.c_void_p * 3)(*(ctypes.addressof(x) for x in (pointer, n, one)))
        mine, back = numpy.arange(words, dtype=numpy.uint32), numpy.empty(words, numpy.uint32)
        call("cuMemcpyHtoD_v2", pointer, ctypes.c_void_p(mine.ctypes.data), size)
        while not stop.is_set():
            for _ in range(4):
                call("cuLaunchKernel", add, 1, 1, 1, 32, 1, 1, 0, stream, fields, None)
                mine += 1
            call("cuStreamSynchronize", stream)
            call("cuMemcpyDtoH_v2", ctypes.c_void_p(back.ctypes.data), pointer, size)
            assert (back == mine).all(), "bytes differ"
            state["rounds"] += 1

    def guarded():
        try:
            toil()
        except Exception as error:
            state["error"] = repr(error)

    thread = threading.Thread(target=guarded, daemon=True)
    THREADS["toil"] = thread, stop, state
    thread.start()


def do_rounds(_):
    """Return the rounds of the thread of ``do_toil``, and its error if an error has ended it."""
    return THREADS["toil"][2]


def do_rest(_):
    """End the thread of ``do_toil``; return its rounds and its error."""
    thread, stop, state = THREADS.pop("toil")
    stop.set()
    thread.join()
    return state


def do_spin(command):
    """Submit a kernel that runs for the given seconds, and do not wait for it."""
    from tests.emulated import PTX

    module, spin = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), PTX.encode() + b"\0")
    call("cuModuleGetFunction", ctypes.byref(spin), module, b"emucuda_spin_ns")
    ns = ctypes.c_uint64(int(command["seconds"] * 1e9))
    fields = (ctypes.c_void_p * 1)(ctypes.addressof(ns))
    call("cuLaunchKernel", spin, 1, 1, 1, 1, 1, 1, 0, None, fields, None)


def do_flood(command):
    """Start a thread that submits many kernels and waits for none of them."""
    from tests.emulated import PTX

    context, stream = ctypes.c_void_p(), ctypes.c_void_p()
    module, spin = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuCtxGetCurrent", ctypes.byref(context))
    call("cuModuleLoadData", ctypes.byref(module), PTX.encode() + b"\0")
    call("cuModuleGetFunction", ctypes.byref(spin), module, b"emucuda_spin_ns")
    call("cuStreamCreate", ctypes.byref(stream), 1)
    ns = ctypes.c_uint64(int(command["seconds"] * 1e9))
    fields = (ctypes.c_void_p * 1)(ctypes.addressof(ns))
    state = THREADS["flood"] = {"submitted": 0, "error": "", "over": False}

    def flood():
        try:
            call("cuCtxSetCurrent", context)
            for _ in range(command["count"]):
                call("cuLaunchKernel", spin, 1, 1, 1, 1, 1, 1, 0, stream, fields, None)
                state["submitted"] += 1
        except Exception as error:
            state["error"] = repr(error)
        state["over"] = bool(ns.value)  # this also keeps the parameters alive

    threading.Thread(target=flood, daemon=True).start()


def do_flooded(_):
    """Return how many kernels the thread of ``do_flood`` has submitted, and its error."""
    return THREADS["flood"]


def do_capture(_):
    """Begin to record a graph."""
    stream = THREADS["stream"] = ctypes.c_void_p()
    call("cuStreamCreate", ctypes.byref(stream), 1)
    call("cuStreamBeginCapture_v2", stream, 0)


def do_captured(_):
    """End the recording of the graph."""
    graph = ctypes.c_void_p()
    call("cuStreamEndCapture", THREADS["stream"], ctypes.byref(graph))


def do_on_interrupt(_):
    """Let an interrupt end waits without an exception."""
    signal.signal(signal.SIGINT, lambda *_: None)


def do_hang_up(_):
    """Close the agent's connection; the agent does not connect again."""
    THREADS["agent"][0].close()


def do_calls(_):
    return THREADS["storm"][2]["calls"]


def do_spawn(command):
    """Start a child process that allocates memory and keeps running.

    Return its pid, and its answers to the two commands.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", __spec__.name],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    CHILDREN.append(child)
    for do in ({"do": "context"}, {"do": "alloc", "bytes": command["bytes"], "byte": 1}):
        child.stdin.write(json.dumps(do) + "\n")
        child.stdin.flush()
    answers = [json.loads(child.stdout.readline()) for _ in range(3)]
    return {"pid": child.pid, "answers": answers[1:]}


#: A program that allocates device memory and sleeps. It does not end with its parent.
ORPHAN = """
import ctypes, sys, time
C = ctypes.CDLL("libcuda.so.1")
context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
assert C.cuInit(0) == 0
assert C.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert C.cuCtxSetCurrent(context) == 0
assert C.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(int(sys.argv[1]))) == 0
print(flush=True)
time.sleep(600)
"""


def do_orphan(command):
    """Start a process that outlives this one; return its pid."""
    child = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(command["bytes"])],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    CHILDREN.append(child)
    assert child.stdout.readline() == b"\n"
    return child.pid


def do_kill(_):
    child = CHILDREN.pop()
    child.kill()
    child.wait()
    child.stdin.close()
    child.stdout.close()


def main():
    print(json.dumps({"ok": os.getpid()}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"ok": globals()[f"do_{command['do']}"](command)}
        except CudaError as error:
            answer = {"ok": {"cuda": error.args[0]}}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}", "code": "exception"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
