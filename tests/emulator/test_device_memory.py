# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Device memory is sparse, is charged to processes, and is freed when its process ends."""

import os
import signal
from pathlib import Path
from textwrap import dedent

import pytest

MIB = 1 << 20
GIB = 1 << 30

NVML = """
import pynvml as n
n.nvmlInit()
def used(i=0):
    return n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(i), version=n.nvmlMemory_v2).used
def processes(i=0):
    h = n.nvmlDeviceGetHandleByIndex(i)
    return {p.pid: p.usedGpuMemory for p in n.nvmlDeviceGetComputeRunningProcesses(h)}
_ = 1
"""


def rss(pid):
    """Return the resident host memory of a process in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


@pytest.fixture
def watch(emulated):
    """Return a machine, and a function that evaluates an expression with NVML in a process.

    The machine has two devices of 1 GiB. A context takes 32 MiB.
    """
    machine = emulated()
    watcher = machine.target()
    watcher.do(NVML)
    return machine, lambda expression: watcher.do(f"_ = {expression}")


def test_a_large_machine_costs_only_touched_memory(emulated):
    machine = emulated("8x80GiB")
    child = machine.target()
    child.do("context(0)")
    before = rss(child.pid)
    code = """
    pointers = []
    for device in range(8):
        context(device)
        pointers.append(ok(D.cuMemAlloc(79 << 30)))
        put(int(pointers[-1]) + (70 << 30), bytes_of(1 << 20, device))
    _ = [get(int(p) + (70 << 30), 1 << 20) for p in pointers]
    """
    hashes = child.do(dedent(code))
    assert len(set(hashes)) == 8
    assert rss(child.pid) - before < 48 * MIB
    machine.run(SUSPEND_AND_RESUME, child.pid)
    assert rss(child.pid) - before < 48 * MIB
    assert child.do("_ = [get(int(p) + (70 << 30), 1 << 20) for p in pointers]") == hashes


SUSPEND_AND_RESUME = """
import sys
from cuda.core.checkpoint import Process
p = Process(int(sys.argv[1]))
p.lock(5000); p.checkpoint(); p.restore(); p.unlock()
"""


def test_loading_the_libraries_has_no_effect(emulated):
    machine = emulated()
    code = """
    import ctypes, os
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        ctypes.CDLL(name)
    print(len(os.listdir("/proc/self/task")), os.path.exists(os.environ["EMUCUDA_STATE"]))
    """
    assert machine.run(dedent(code)) == "1 False"


def test_contexts_and_allocations_are_charged(watch):
    machine, look = watch
    child = machine.target()
    child.do("ok(D.cuInit(0))")
    assert look("used(0)") == 0
    child.do("context(0)")
    assert look("used(0)") == 32 * MIB
    child.do("context(0); _ = 1")  # the overhead is charged once
    assert look("used(0)") == 32 * MIB
    child.do("p = ok(D.cuMemAlloc(100 << 20)); q = ok(D.cuMemAlloc(100))")
    assert look("used(0)") == 132 * MIB + 512
    assert look("processes(0)") == {child.pid: 132 * MIB + 512}
    assert child.do("_ = ok(D.cuMemGetInfo())") == (GIB - 132 * MIB - 512, GIB)
    assert (look("used(1)"), look("processes(1)")) == (0, {})
    child.do("ok(D.cuMemFree(p)); ok(D.cuMemFree(q))")
    assert look("used(0)") == 32 * MIB
    child.do("ok(D.cuDevicePrimaryCtxReset(0))")
    assert (look("used(0)"), look("processes(0)")) == (0, {})


@pytest.mark.parametrize("end", ["cuCtxDestroy(c)", "cuDevicePrimaryCtxReset(0)"])
def test_memory_of_a_pool_outlives_its_context(watch, end):
    machine, look = watch
    child = machine.target()
    if "Primary" in end:
        child.do("c = context()")
    else:
        child.do("context(); c = ok(D.cuCtxCreate(None, 0, 0))")
    code = f"""
    data = bytes_of(4 << 20)
    stream = ok(D.cuStreamCreate(1))
    p, q = (ok(D.cuMemAllocAsync(data.nbytes, stream)) for _ in range(2))
    put(p, data)
    ok(D.{end})
    """
    child.do(dedent(code))
    assert look("used(0)") == (8 if "Primary" in end else 40) * MIB
    code = """
    context()
    owner = D.CUpointer_attribute.CU_POINTER_ATTRIBUTE_CONTEXT
    _ = (get(p, data.nbytes) == hashlib.sha256(data).hexdigest(),
         int(ok(D.cuPointerGetAttribute(owner, p)) or 0))
    """
    assert child.do(dedent(code)) == (True, 0)
    child.do("ok(D.cuMemFree(p)); ok(D.cuMemFreeAsync(q, 0)); ok(D.cuCtxSynchronize())")
    assert look("used(0)") == 32 * MIB


ARRAYS = """
def shape(width):
    d = D.CUDA_ARRAY3D_DESCRIPTOR()
    d.Width, d.Height, d.NumChannels = width, 1024, 4
    d.Format = D.CUarray_format.CU_AD_FORMAT_FLOAT
    return d
"""


def test_arrays_end_with_their_context(watch):
    machine, look = watch
    child = machine.target()
    code = """
    context()
    kept = ok(D.cuArray3DCreate(shape(256)))
    c = ok(D.cuCtxCreate(None, 0, 0))
    array, mipmap = ok(D.cuArray3DCreate(shape(1024))), ok(D.cuMipmappedArrayCreate(shape(1024), 2))
    level = ok(D.cuMipmappedArrayGetLevel(mipmap, 1))
    """
    child.do(ARRAYS + dedent(code))
    assert look("used(0)") == (32 + 4 + 16 + 20) * MIB
    code = """
    ok(D.cuCtxDestroy(c))
    calls = [D.cuArrayDestroy(array), D.cuMipmappedArrayDestroy(mipmap),
             D.cuArray3DGetDescriptor(level)]
    _ = [int(result[0]) for result in calls]
    """
    assert child.do(dedent(code)) == [400] * 3
    assert look("used(0)") == 36 * MIB
    child.do("ok(D.cuArrayDestroy(kept))")
    assert look("used(0)") == 32 * MIB


def test_context_end_unregisters_host_memory(emulated):
    child = emulated().target()
    code = """
    context()
    c = ok(D.cuCtxCreate(None, 0, 0))
    host = bytes_of(1 << 20)
    ok(D.cuMemHostRegister(host.ctypes.data, host.nbytes, 0))
    ok(D.cuCtxDestroy(c))
    twice = [int(D.cuMemHostRegister(host.ctypes.data, host.nbytes, 0)[0]) for _ in range(2)]
    _ = (twice, (host == bytes_of(1 << 20)).all().item())
    """
    assert child.do(dedent(code)) == ([0, 712], True)


@pytest.mark.parametrize("end", ["cuCtxDestroy(c)", "cuDevicePrimaryCtxReset(0)"])
def test_events_end_with_their_context(emulated, end):
    machine = emulated()
    child = machine.target()
    code = f"""
    c = context()
    if "Primary" not in "{end}":
        c = ok(D.cuCtxCreate(None, 0, 0))
    events = [ok(D.cuEventCreate(6)) for _ in range(3)]  # without timing, for other processes
    ok(D.cuIpcGetEventHandle(events[1]))
    ok(D.cuEventDestroy(events.pop()))
    ok(D.{end})
    context()
    new = ok(D.cuEventCreate(0))
    calls = [D.cuEventQuery(events[0]), D.cuEventDestroy(events[1]), D.cuEventRecord(new, 0)]
    _ = [int(result[0]) for result in calls]
    """
    assert child.do(dedent(code)) == [400, 400, 0]
    machine.run(SUSPEND_AND_RESUME, child.pid)  # no exported event refuses the checkpoint
    child.do("ok(D.cuEventSynchronize(new)); ok(D.cuEventDestroy(new))")


def test_memory_handle_opened_twice_is_mapped_once(emulated):
    machine = emulated()
    exporter, child = machine.target(), machine.target()
    handle = exporter.do(
        "context(); p = ok(D.cuMemAlloc(2 << 20)); put(p, bytes_of(2 << 20))\n"
        "_ = ctypes.string_at(ok(D.cuIpcGetMemHandle(p)).getPtr(), 64)"
    )
    code = f"""
    context()
    h = D.CUipcMemHandle()
    ctypes.memmove(h.getPtr(), {handle!r}, 64)
    def opened():
        return int(ok(D.cuIpcOpenMemHandle(h, 1)))
    def closed(p):
        return int(D.cuIpcCloseMemHandle(p)[0])
    p, q = opened(), opened()
    first = closed(p)
    _ = (p == q, first, get(p, 2 << 20) == hashlib.sha256(bytes_of(2 << 20)).hexdigest(),
         closed(p), closed(p))
    """
    assert child.do(dedent(code)) == (True, 0, True, 0, 1)
    # Another context has a mapping of its own, which ends with the context.
    code = """
    p, c = opened(), ok(D.cuCtxCreate(None, 0, 0))
    q = opened()
    ok(D.cuCtxDestroy(c))
    _ = (p == q, closed(q), closed(p))
    """
    assert child.do(dedent(code)) == (False, 1, 0)
    machine.run(SUSPEND_AND_RESUME, child.pid)  # nothing imported refuses the checkpoint


def test_sizes_that_overflow_are_refused(emulated):
    child = emulated("1x1GiB").target()
    code = """
    context()
    p, host = ok(D.cuMemAlloc(4096)), np.zeros(4096, np.uint8)
    prop = D.CUmemAllocationProp()
    prop.type = D.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = D.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    unit, most = 2 << 20, 2**64 - 1
    mapped, handle = ok(D.cuMemAddressReserve(unit, 0, 0, 0)), ok(D.cuMemCreate(unit, prop, 0))
    ok(D.cuMemMap(mapped, unit, 0, handle, 0))
    access = D.CUmemAccessDesc()
    access.location = prop.location
    access.flags = D.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    ok(D.cuMemSetAccess(mapped, unit, [access], 1))
    def plane(kind, **fields):
        c = kind()
        c.srcMemoryType, c.srcHost = D.CUmemorytype.CU_MEMORYTYPE_HOST, host.ctypes.data
        c.dstMemoryType, c.dstDevice = D.CUmemorytype.CU_MEMORYTYPE_DEVICE, p
        c.WidthInBytes, c.Height = 64, 3
        for name, value in fields.items():
            setattr(c, name, value)
        return c
    flat, deep = D.CUDA_MEMCPY2D, D.CUDA_MEMCPY3D
    wrong = [
        D.cuMemsetD32(p, 0, 1 << 62), D.cuMemsetD16(p, 0, 1 << 63),
        D.cuMemsetD2D8(p, 1 << 63, 0, 64, 3), D.cuMemsetD2D32(p, 1 << 63, 0, 1 << 62, 3),
        D.cuMemcpyDtoH(host.ctypes.data, mapped, most), D.cuMemcpyDtoD(p, mapped, most),
        D.cuMemcpyDtoH(host.ctypes.data, p, most), D.cuMemcpy2D(plane(flat, dstPitch=1 << 63)),
        D.cuMemcpy2D(plane(flat, srcPitch=1 << 63)), D.cuMemcpy2D(plane(flat, dstY=1 << 58)),
        D.cuMemcpy3D(plane(deep, Depth=1, dstPitch=1 << 63)),
        D.cuMemcpy3D(plane(deep, Depth=2, dstHeight=1 << 58)),
        D.cuMemcpy3D(plane(deep, Depth=1, dstPitch=32)),
    ]
    full = [D.cuMemAllocPitch(*size, 4) for size in ((512, (1 << 55) + 1), (most, 1))]
    ok(D.cuMemcpy2D(plane(flat))); ok(D.cuMemcpy3D(plane(deep, Depth=2)))
    _ = ([int(result[0]) for result in wrong], [int(result[0]) for result in full])
    """
    assert child.do(dedent(code)) == ([1] * 13, [2, 2])


POOL = """
context()
pool = ok(D.cuDeviceGetDefaultMemPool(0))
names = D.CUmemPool_attribute
def reserved():
    return int(ok(D.cuMemPoolGetAttribute(pool, names.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT))) >> 20
def keep(threshold):
    at = names.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    ok(D.cuMemPoolSetAttribute(pool, at, D.cuuint64_t(threshold)))
"""


def test_event_synchronize_releases_unused_memory_of_pools(emulated):
    child = emulated().target()
    code = """
    event = ok(D.cuEventCreate(0))
    ok(D.cuMemFreeAsync(ok(D.cuMemAllocAsync(8 << 20, 0)), 0))
    ok(D.cuEventRecord(event, 0))
    before = reserved()
    ok(D.cuEventSynchronize(event))
    _ = (before, reserved())
    """
    assert child.do(POOL + dedent(code)) == (8, 0)


def test_trimmed_pool_keeps_at_least_the_given_bytes(emulated):
    child = emulated().target()
    code = """
    keep(2**64 - 1)
    ok(D.cuMemFreeAsync(ok(D.cuMemAllocAsync(8 << 20, 0)), 0))
    def trimmed(least):
        ok(D.cuMemPoolTrimTo(pool, least))
        return reserved()
    _ = [trimmed(least) for least in (2**64 - 1, 8 << 20, (5 << 20) + 1, 1, 0)]
    """
    assert child.do(POOL + dedent(code)) == [8, 8, 6, 2, 0]


def test_allocations_above_one_mib_take_whole_pages(watch):
    machine, look = watch
    child = machine.target()
    child.do("context(); p = ok(D.cuMemAlloc((1 << 20) + 1))")
    assert look("used(0)") == 34 * MIB


def test_a_killed_process_frees_its_memory(watch):
    machine, look = watch
    child = machine.target()
    child.do("context(); ok(D.cuMemAlloc(900 << 20))")
    assert look("used(0)") == 932 * MIB
    other = machine.target()
    assert other.attempt("context(); ok(D.cuMemAlloc(900 << 20))") == ("failed", 2)
    os.kill(child.pid, signal.SIGKILL)
    # The process is a zombie until the test reaps it.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert look("used(0)") == 32 * MIB  # the context of the other process
    assert other.do("ok(D.cuMemAlloc(900 << 20)); _ = 1") == 1


def test_exec_frees_the_memory_of_a_process(watch):
    machine, look = watch
    child = machine.target()
    child.do("context(); ok(D.cuMemAlloc(100 << 20))")
    child.send("os.execv(sys.executable, [sys.executable, '-c', 'print(\"\\x01 1\"); input()'])")
    assert child.reply() == 1
    assert look("used(0)") == 0


def test_a_forked_child_has_no_device_and_no_charge(watch):
    machine, look = watch
    child = machine.target()
    code = """
    context(); p = ok(D.cuMemAlloc(100 << 20)); stream = ok(D.cuStreamCreate(0))
    r, w = os.pipe()
    if not os.fork():
        found = [int(D.cuInit(0)[0]), int(D.cuMemAlloc(4096)[0]), int(D.cuDeviceGetCount()[0])]
        found.append(int(D.cuStreamGetFlags(stream)[0]))
        os.write(w, repr(found).encode()); os._exit(0)
    os.wait()
    _ = (eval(os.read(r, 100)), int(D.cuMemFree(p)[0]))
    """
    assert child.do(dedent(code)) == ([3, 3, 3, 3], 0)
    assert look("used(0)") == 32 * MIB


def test_a_surviving_child_does_not_keep_its_parents_memory(watch):
    machine, look = watch
    child = machine.target()
    survivor = child.do("""
context(); p = ok(D.cuMemAlloc(100 << 20)); put(p, bytes_of(100 << 20))
import time
pid = os.fork()
if not pid:
    time.sleep(60); os._exit(0)
_ = pid
""")
    try:
        child.kill()
        assert look("used(0)") == 0
        maps = Path(f"/proc/{survivor}/maps").read_text()
        assert "emucuda-device" not in maps
        links = [link.readlink().name for link in Path(f"/proc/{survivor}/fd").iterdir()]
        assert not [name for name in links if "emucuda-device" in name]
    finally:
        os.kill(survivor, signal.SIGKILL)


RACE = """
context()
import random, time
random.seed(os.getpid())
held, most = [], 0
def race(rounds):
    refused = 0
    for _ in range(rounds):
        if held and random.random() < 0.4:
            ok(D.cuMemFree(held.pop(random.randrange(len(held)))))
            continue
        result = D.cuMemAlloc(random.choice([2, 6, 30, 64]) << 20)
        if int(result[0]) == 2:
            refused += 1
        else:
            held.append(ok(result))
    return refused
_ = 1
"""


def test_processes_together_never_exceed_the_device(watch):
    machine, look = watch
    children = [machine.target() for _ in range(4)]
    for child in children:
        child.do(RACE)
    for child in children:
        child.send("_ = race(3000)")
    samples, busy = [], list(children)
    while busy:
        samples.append(look("used(0)"))
        busy = [child for child in busy if child.hangs(0)]
    assert max(samples) <= GIB
    assert sum(child.reply() for child in children) > 0  # the device was full at times
    assert look("used(0)") == sum(look("processes(0)").values())
    for child in children:
        child.do("for p in held: ok(D.cuMemFree(p))")
    assert look("used(0)") == 4 * 32 * MIB


def test_processes_killed_while_they_allocate_leak_nothing(watch):
    machine, look = watch
    for _ in range(10):
        child = machine.target()
        child.do(RACE)
        child.send("_ = race(10**9)")
        assert child.hangs(0.05)
        child.kill()
        assert look("used(0)") == 0


def test_host_access_to_device_memory_crashes_the_process(emulated):
    child = emulated().target()
    child.send("context(); p = ok(D.cuMemAlloc(4096)); ctypes.memset(int(p), 0, 1)")
    with pytest.raises(EOFError, match=str(-signal.SIGSEGV)):
        child.reply()


@pytest.mark.parametrize(
    ("visible", "want"),
    [
        ("0", [0]),
        ("2,0", [2, 0]),
        (" 1 , 2", [1, 2]),
        ("1,7,0", [1]),  # the driver ignores the entries from the first wrong one on
        ("1,-1,0", [1]),
        ("1,1", None),
        ("", None),
        ("-1", None),
        ("NoDevFiles", None),
        ("{1}", [1]),
        ("{2},{0}", [2, 0]),
        ("{1:.12}", [1]),
        ("GPU-", None),  # more than one UUID begins with this text
    ],
)
def test_visible_devices_select_and_order_devices(emulated, visible, want):
    machine = emulated("3x1GiB")
    uuids = machine.run("""
import pynvml
pynvml.nvmlInit()
for i in range(3): print(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i)))
""").split()
    code = """
from cuda.bindings import driver as D
import os
first = int(D.cuInit(0)[0])
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
again = int(D.cuInit(0)[0])
uuids = [bytes(D.cuDeviceGetUuid(i)[1].bytes).hex() for i in range(D.cuDeviceGetCount()[1] or 0)]
print(first, again, *uuids)
"""
    first, again, *found = machine.run(code, CUDA_VISIBLE_DEVICES=visible.format(*uuids)).split()
    # The second cuInit reads the changed variable only if the first cuInit has found no device.
    assert (first, again) == ("100" if want is None else "0", "0")
    seen = [0] if want is None else want
    assert found == [uuids[i][4:].replace("-", "") for i in seen]


def test_threads_share_the_driver(emulated):
    child = emulated().target()
    code = """
    from threading import Thread
    c = context(); bad = []
    def work(seed):
        try:
            ok(D.cuCtxSetCurrent(c))
            s = ok(D.cuStreamCreate(1))
            for n in range(200):
                data = bytes_of(3000 + n, seed)
                size = data.nbytes
                p = ok(D.cuMemAlloc(size)) if n % 2 else ok(D.cuMemAllocAsync(size, s))
                put(p, data)
                if get(p, data.nbytes) != hashlib.sha256(data).hexdigest():
                    bad.append((seed, n))
                ok(D.cuMemFree(p)) if n % 2 else ok(D.cuMemFreeAsync(p, s))
            ok(D.cuStreamDestroy(s))
        except BaseException as error:
            bad.append(repr(error))
    threads = [Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads: t.start()
    for t in threads: t.join()
    _ = (bad, ok(D.cuMemGetInfo())[0])
    """
    bad, free = child.do(dedent(code))
    assert bad == []
    assert free >= GIB - 32 * MIB - 64 * MIB  # the driver's pool may keep unused memory


def test_mapped_memory_without_access_is_refused(emulated):
    """This test is not in the conformance program: on a real driver, it may break the context."""
    child = emulated("1x1GiB").target()
    code = """
    context()
    prop = D.CUmemAllocationProp()
    prop.type = D.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = D.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    unit = 2 << 20
    address = ok(D.cuMemAddressReserve(unit, 0, 0, 0))
    handle = ok(D.cuMemCreate(unit, prop, 0))
    ok(D.cuMemMap(address, unit, 0, handle, 0))
    refused = int(D.cuMemsetD32(address, 1, 1)[0])
    access = D.CUmemAccessDesc()
    access.location = prop.location
    access.flags = D.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    ok(D.cuMemSetAccess(address, unit, [access], 1))
    ok(D.cuMemsetD32(address, 1, 1))
    _ = refused
    """
    assert child.do(dedent(code)) != 0
