# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""NVIDIA's own client libraries, unchanged, on the emulated driver."""

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from emucuda.build import SOURCES, libraries

MIB = 1 << 20

#: Functions that cuda-bindings must find: functions for ordinary programs, and the checkpoint API.
NEEDED = """
cuInit cuDriverGetVersion cuDeviceGet cuDeviceGetCount cuDeviceGetName cuDeviceGetUuid_v2
cuDeviceTotalMem_v2 cuDeviceGetAttribute cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease_v2
cuCtxCreate_v4 cuCtxDestroy_v2 cuCtxSetCurrent cuCtxGetCurrent cuCtxPushCurrent_v2
cuCtxPopCurrent_v2 cuCtxSynchronize cuMemAlloc_v2 cuMemAllocPitch_v2 cuMemFree_v2 cuMemGetInfo_v2
cuMemAllocManaged cuMemHostAlloc cuMemFreeHost cuMemHostRegister_v2 cuMemcpy cuMemcpyAsync
cuMemcpyHtoD_v2 cuMemcpyDtoH_v2 cuMemcpyDtoD_v2 cuMemcpyHtoDAsync_v2 cuMemcpyDtoHAsync_v2
cuMemcpy2D_v2 cuMemcpy3D_v2 cuMemsetD8_v2 cuMemsetD16_v2 cuMemsetD32_v2 cuMemsetD32Async
cuMemAllocAsync cuMemFreeAsync cuMemAllocFromPoolAsync cuMemPoolCreate cuMemPoolTrimTo
cuMemPoolGetAttribute cuMemCreate cuMemMap cuMemUnmap cuMemSetAccess cuMemRelease
cuMemAddressReserve cuMemAddressFree cuStreamCreate cuStreamDestroy_v2 cuStreamSynchronize
cuStreamQuery cuEventCreate cuEventRecord cuEventSynchronize cuEventElapsedTime_v2
cuModuleLoadData cuModuleGetFunction cuLibraryLoadData cuLibraryGetKernel cuLaunchKernel
cuLaunchKernelEx cuLaunchHostFunc cuPointerGetAttribute cuArrayCreate_v2 cuArrayDestroy
cuCheckpointProcessGetState cuCheckpointProcessGetRestoreThreadId cuCheckpointProcessLock
cuCheckpointProcessCheckpoint cuCheckpointProcessRestore cuCheckpointProcessUnlock
"""


def test_cuda_bindings_resolves_common_calls(emulated):
    code = """
    from cuda.bindings._internal import driver
    for name, address in driver._inspect_function_pointers().items():
        print(name.removeprefix("__"), int(bool(address)))
    """
    lines = emulated().run(dedent(code)).splitlines()
    found = {name: found == "1" for name, found in (line.split() for line in lines)}
    assert len(found) > 450  # the client looked up all names and did not fail
    assert [name for name in NEEDED.split() if not found.get(name)] == []


def test_call_that_the_driver_lacks_raises_a_python_error(emulated):
    code = """
    from cuda.bindings import driver as D
    D.cuInit(0)
    try:
        D.cuTexRefCreate()
    except Exception as error:
        print(type(error).__name__)
    """
    assert emulated().run(dedent(code)).endswith("Error")


def test_each_driver_function_is_an_exported_symbol(emulated):
    """The library exports every symbol in the table of cuGetProcAddress."""
    text = (SOURCES / "entries.h").read_text()
    entries = re.findall(r'^\s*ENTRY1?\("(\w+)", (\d+), (\w+)(?:, (\w+))?\)', text, re.M)
    assert len(entries) > 150
    code = """
    import ctypes, sys
    cuda = ctypes.CDLL("libcuda.so.1")
    def address(name, version, flags):
        p = ctypes.c_void_p()
        status = ctypes.c_int(-1)
        rc = cuda.cuGetProcAddress_v2(
            name.encode(), ctypes.byref(p), version, ctypes.c_uint64(flags), ctypes.byref(status)
        )
        return rc, p.value, status.value
    def symbol(name):
        return ctypes.cast(getattr(cuda, name), ctypes.c_void_p).value
    for line in sys.argv[1].split(";"):
        name, since, plain, ptsz = line.split(",")
        assert address(name, int(since), 0) == (0, symbol(plain), 0), line
        assert address(name, int(since), 1) == (0, symbol(plain), 0), line
        since = max(int(since), 7000) if ptsz else int(since)
        assert address(name, since, 2) == (0, symbol(ptsz or plain), 0), line
    assert address("cuMemAlloc", 2000, 0) == (0, None, 2)  # too old a version
    assert address("cuNoSuchThing", 13000, 0) == (0, None, 1)
    assert address("", 13000, 0) == (0, None, 1)
    assert address("cuMemAlloc", 13010, 0) == (1, None, -1)  # above the driver's own version
    assert address("cuMemAlloc", 13000, 4)[0] == 1
    """
    emulated().run(dedent(code), ";".join(",".join(entry) for entry in entries))


def test_cuda_core_runs_on_the_emulated_driver(emulated):
    code = """
    import numpy as np
    from cuda.core import *
    device = Device(0)
    assert device.name == "EMULATED NVIDIA GPU 1 GiB", device.name
    assert tuple(device.compute_capability) == (8, 0)
    device.set_current()
    stream = device.create_stream()
    host = LegacyPinnedMemoryResource().allocate(1 << 20)
    view = np.from_dlpack(host).view(np.uint8)
    view[:] = np.arange(1 << 20) % 251
    want = view.copy()
    resources = [
        device.memory_resource,
        DeviceMemoryResource(device, DeviceMemoryResourceOptions(max_size=64 << 20)),
        VirtualMemoryResource(device, VirtualMemoryResourceOptions(handle_type=None)),
    ]
    for resource in resources:
        buffer = resource.allocate(2 << 20, stream=stream)
        part = Buffer.from_handle(int(buffer.handle), 1 << 20)
        part.copy_from(host, stream=stream)
        view[:] = 0
        part.copy_to(host, stream=stream)
        stream.sync()
        assert (view == want).all(), resource
        buffer.close(stream)
    pool = resources[1]
    stream.sync()
    assert pool.attributes.used_mem_current == pool.attributes.reserved_mem_current == 0
    try:
        pool.allocate(65 << 20, stream=stream)
    except Exception as error:
        assert "OUT_OF_MEMORY" in str(error)
    pinned = PinnedMemoryResource().allocate(4096, stream=stream)
    assert pinned.is_host_accessible and pinned.is_device_accessible
    assert [d.name for d in Device.get_all_devices()] == [device.name] * 2
    print("good")
    """
    assert emulated().run(dedent(code)) == "good"


def test_kernels_compute_and_take_modelled_time(emulated):
    code = """
    import numpy as np
    from cuda.core import *
    from emucuda.kernels import PTX
    device = Device(0); device.set_current(); stream = device.create_stream()
    module = ObjectCode.from_ptx(PTX.encode())
    config = LaunchConfig(grid=8, block=64)
    n = 100_000
    def run(name, *args):
        launch(stream, config, module.get_kernel("emucuda_" + name), *args)
    buffer = device.allocate(8 * n, stream=stream)
    total = device.allocate(8, stream=stream)
    host = LegacyPinnedMemoryResource().allocate(8 * n)
    def read(kind, source=buffer):
        source.copy_to(Buffer.from_handle(int(host.handle), source.size), stream=stream)
        stream.sync()
        return np.from_dlpack(host).view(np.uint8)[: source.size].view(kind)
    run("iota_u32", buffer, np.uint64(n), np.uint32(7))
    run("add_u32", buffer, np.uint64(n), np.uint32(2**32 - 1))
    assert (read(np.uint32)[:n] == np.arange(6, n + 6)).all()
    total.fill(0, stream=stream)
    run("sum_u32", total, buffer, np.uint64(n))
    assert read(np.uint64, total)[0] == sum(range(6, n + 6))
    run("fill_u64", buffer, np.uint64(n), np.uint64(2**63 + 5))
    assert (read(np.uint64) == 2**63 + 5).all()
    timed = EventOptions(timing_enabled=True)
    start = stream.record(options=timed)
    run("spin_ns", np.uint64(500_000_000))
    end = stream.record(options=timed)
    assert not end.is_done
    end.sync()
    assert 499 < end - start < 20_000, end - start  # milliseconds, on a busy machine
    kernel = module.get_kernel("emucuda_sum_u32")
    assert kernel.num_arguments == 3
    run("illegal_address")
    try:
        stream.sync()
    except Exception as error:
        assert "ILLEGAL_ADDRESS" in str(error)
        print("good")
    """
    assert emulated().run(dedent(code)) == "good"


def test_stream_query_returns_the_error_of_a_failed_kernel(emulated):
    child = emulated().target()
    code = """
    from emucuda.kernels import PTX
    context()
    stream, event = ok(D.cuStreamCreate(1)), ok(D.cuEventCreate(0))
    module = ok(D.cuModuleLoadData(PTX.encode()))
    bad = ok(D.cuModuleGetFunction(module, b"emucuda_illegal_address"))
    ok(D.cuLaunchKernel(bad, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0))
    calls = [D.cuStreamQuery(stream), D.cuStreamQuery(0), D.cuEventQuery(event)]
    _ = [int(result[0]) for result in [*calls, D.cuStreamSynchronize(stream)]]
    """
    assert child.do(dedent(code)) == [700] * 4


def test_streams_wait_for_one_another(emulated):
    """The default stream and a blocking stream wait for each other's kernels.

    They wait until the modelled end of a kernel, 200 ms after its start.
    """
    child = emulated().target()
    child.do(
        dedent("""
        import time
        from emucuda.kernels import PTX
        context()
        module = ok(D.cuModuleLoadData(PTX.encode()))
        spin = ok(D.cuModuleGetFunction(module, b"emucuda_spin_ns"))
        def start(stream, ms):
            args = ((ms * 1_000_000,), (ctypes.c_uint64,))
            ok(D.cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, stream, args, 0))
        def busy(stream):
            return int(D.cuStreamQuery(stream)[0]) == 600
        blocking, free = ok(D.cuStreamCreate(0)), ok(D.cuStreamCreate(1))
        """)
    )
    code = "start({}, 200); _ = [busy(s) for s in (0, blocking, free)]; ok(D.cuCtxSynchronize())"
    assert child.do(code.format("0")) == [True, True, False]
    assert child.do(code.format("blocking")) == [True, True, False]
    assert child.do(code.format("free")) == [False, False, True]
    waits = """
    e = ok(D.cuEventCreate(0)); start(blocking, 200); ok(D.cuEventRecord(e, blocking))
    ok(D.cuStreamWaitEvent(free, e, 0)); _ = busy(free); ok(D.cuCtxSynchronize())
    """
    assert child.do(dedent(waits)) is True
    assert child.do("_ = [busy(s) for s in (0, blocking, free)]") == [False] * 3


def test_clients_can_use_per_thread_streams(emulated):
    code = """
    import sys
    from cuda.bindings import driver as D
    from cuda.core import *
    device = Device(0); device.set_current()
    b = device.allocate(4096, stream=PER_THREAD_DEFAULT_STREAM)
    b.fill(1, stream=PER_THREAD_DEFAULT_STREAM)
    PER_THREAD_DEFAULT_STREAM.sync()
    assert D.cuStreamGetId(2)[1] != D.cuStreamGetId(1)[1]
    b.close(PER_THREAD_DEFAULT_STREAM)
    print("good")
    """
    machine = emulated()
    assert machine.run(dedent(code)) == "good"
    assert machine.run(dedent(code), CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM="1") == "good"


def test_thread_has_one_per_thread_stream_in_each_context(emulated):
    code = """
    from cuda.bindings import driver as D
    D.cuInit(0)
    first, second = (D.cuCtxCreate(None, 0, 0)[1] for _ in range(2))
    def stream(context):
        D.cuCtxSetCurrent(context)
        return D.cuStreamGetId(2)[1]
    found = [stream(context) for context in (first, second, first, second)]
    assert found[:2] == found[2:] and found[0] != found[1], found
    print("good")
    """
    assert emulated().run(dedent(code)) == "good"


def test_cuda_arrays_count_as_used_memory(emulated):
    child = emulated("1x1GiB,context=0").target()
    child.do(
        dedent("""
        context()
        d = D.CUDA_ARRAY_DESCRIPTOR()
        d.Width, d.Height, d.NumChannels = 1024, 1024, 4
        d.Format = D.CUarray_format.CU_AD_FORMAT_FLOAT
        a = ok(D.cuArrayCreate(d))
        """)
    )
    assert child.do("_ = ok(D.cuMemGetInfo())") == ((1 << 30) - 16 * MIB, 1 << 30)
    child.do("ok(D.cuArrayDestroy(a))")
    assert child.do("_ = ok(D.cuMemGetInfo())") == (1 << 30, 1 << 30)


def test_nvidia_ml_py_reads_the_emulated_machine(emulated):
    code = """
    import os
    from pynvml import *
    nvmlInit(); nvmlInit()
    assert nvmlSystemGetDriverVersion().startswith("580."), nvmlSystemGetDriverVersion()
    assert nvmlSystemGetCudaDriverVersion() == 13000
    assert nvmlSystemGetNVMLVersion().startswith("13.580.")
    assert nvmlDeviceGetCount() == 2
    h = nvmlDeviceGetHandleByIndex(1)
    uuid = nvmlDeviceGetUUID(h)
    assert nvmlDeviceGetIndex(nvmlDeviceGetHandleByUUID(uuid)) == 1
    pci = nvmlDeviceGetPciInfo(h).busId
    assert nvmlDeviceGetIndex(nvmlDeviceGetHandleByPciBusId(pci)) == 1
    assert nvmlDeviceGetName(h).startswith("EMULATED ")
    m = nvmlDeviceGetMemoryInfo(h, version=nvmlMemory_v2)
    assert (m.total, m.reserved, m.used, m.free) == (1 << 30, 100 << 20, 0, 924 << 20), m
    m = nvmlDeviceGetMemoryInfo(h)
    assert (m.total, m.used, m.free) == (1 << 30, 100 << 20, 924 << 20)
    assert nvmlDeviceGetComputeRunningProcesses(h) == nvmlDeviceGetGraphicsRunningProcesses(h) == []
    assert nvmlDeviceGetPersistenceMode(h) == 1
    assert nvmlDeviceGetMigMode(h) == [0, 0]
    assert nvmlDeviceGetUtilizationRates(h).gpu == 0
    assert 0 < nvmlDeviceGetTemperature(h, NVML_TEMPERATURE_GPU) < 100
    assert 0 < nvmlDeviceGetPowerUsage(h) <= nvmlDeviceGetPowerManagementLimit(h)
    assert nvmlDeviceGetClockInfo(h, NVML_CLOCK_SM) > 0
    assert nvmlSystemGetProcessName(os.getpid()) == os.fsdecode(
        open("/proc/self/cmdline", "rb").read().split(bytes(1))[0]
    )
    def fails(function, *args):
        try:
            function(*args)
        except NVMLError as error:
            return error.value
    assert fails(nvmlDeviceGetHandleByIndex, 2) == NVML_ERROR_INVALID_ARGUMENT
    assert fails(nvmlDeviceGetHandleByUUID, "GPU-0") == NVML_ERROR_NOT_FOUND
    assert fails(nvmlDeviceGetFanSpeed, h) == NVML_ERROR_NOT_SUPPORTED
    assert fails(nvmlDeviceGetPdi, h) == NVML_ERROR_FUNCTION_NOT_FOUND
    assert fails(nvmlDeviceGetProcessUtilization, h, 0) == NVML_ERROR_NOT_FOUND
    assert fails(nvmlSystemGetProcessName, 2**22 + 1) == NVML_ERROR_NOT_FOUND
    nvmlShutdown()
    nvmlDeviceGetCount()
    nvmlShutdown()
    assert fails(nvmlDeviceGetCount) == NVML_ERROR_UNINITIALIZED
    assert fails(nvmlShutdown) == NVML_ERROR_UNINITIALIZED  # one too many
    print("good")
    """
    assert emulated("2x1GiB,reserved=100MiB").run(dedent(code)) == "good"


def test_utilisation_is_the_modelled_kernel_time(emulated, until):
    machine = emulated()
    child, watcher = machine.target(), machine.target()
    watcher.do(
        dedent("""
        import pynvml as n
        n.nvmlInit()
        h = n.nvmlDeviceGetHandleByIndex(0)
        def look():
            try:
                by_pid = {s.pid: s.smUtil for s in n.nvmlDeviceGetProcessUtilization(h, 0)}
            except n.NVMLError_NotFound:
                by_pid = {}
            return n.nvmlDeviceGetUtilizationRates(h).gpu, by_pid
        """)
    )
    child.do(
        dedent("""
        from emucuda.kernels import PTX
        import time
        context()
        spin = ok(D.cuModuleGetFunction(ok(D.cuModuleLoadData(PTX.encode())), b"emucuda_spin_ns"))
        def work(ms):
            args = ((ms * 1_000_000,), (ctypes.c_uint64,))
            ok(D.cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, 0, args, 0))
        """)
    )
    assert watcher.do("_ = look()") == (0, {})
    # The two figures are for two different moments, so they are certainly equal only while the
    # kernel fills the whole window of a sample.
    child.do("work(60_000)")
    until(lambda: watcher.do("_ = look()") == (100, {child.pid: 100}))


def test_nvml_works_before_and_after_fork(emulated):
    child = emulated().target()
    child.do("import pynvml as n; n.nvmlInit(); context()")
    assert (
        child.do(
            "_ = n.nvmlDeviceGetComputeRunningProcesses(n.nvmlDeviceGetHandleByIndex(0))[0].pid"
        )
        == child.pid
    )
    code = """
    r, w = os.pipe()
    if not os.fork():
        os.write(w, str(n.nvmlDeviceGetCount()).encode()); os._exit(0)
    os.wait(); _ = os.read(r, 10)
    """
    assert child.do(dedent(code)) == b"2"


@pytest.mark.parametrize("flag", ["-1"])
def test_nvitop_starts_on_the_emulated_machine(emulated, flag):
    machine = emulated()
    child = machine.target()
    child.do("context(); ok(D.cuMemAlloc(100 << 20))")
    done = subprocess.run(
        [sys.executable, "-m", "nvitop", flag, "--ascii"],
        env={**os.environ, **machine.env, "COLUMNS": "120", "LINES": "50"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Driver Version: 580." in done.stdout
    assert re.search(rf"\b{child.pid}\b", done.stdout)


def test_threads_work_without_errors_despite_repeated_suspends(emulated):
    machine = emulated("1x1GiB")
    child, worker = machine.target(), machine.target()
    child.do(
        dedent("""
        from threading import Thread
        c = context()
        stop, bad, done = [], [], []
        def work(seed):
            ok(D.cuCtxSetCurrent(c))
            data = bytes_of(100_000, seed)
            want = hashlib.sha256(data).hexdigest()
            while not stop:
                try:
                    p = ok(D.cuMemAlloc(data.nbytes))
                    put(p, data)
                    e = ok(D.cuEventCreate(0))
                    ok(D.cuEventRecord(e, 0)); ok(D.cuEventSynchronize(e)); ok(D.cuEventDestroy(e))
                    if get(p, data.nbytes) != want:
                        bad.append("bytes")
                    ok(D.cuMemFree(p))
                    done.append(1)
                except BaseException as error:
                    bad.append(repr(error))
                    return
        threads = [Thread(target=work, args=(i,)) for i in range(4)]
        for t in threads: t.start()
        """)
    )
    rounds = """
    from cuda.core.checkpoint import Process
    p = Process({})
    for _ in range(50):
        p.lock(10000); p.checkpoint(); p.restore(); p.unlock()
    """
    worker.do(dedent(rounds).format(child.pid))
    code = "stop.append(1); [t.join() for t in threads]; _ = (bad, len(done) > 0)"
    assert child.do(code) == ([], True)


def test_libraries_have_the_names_of_the_real_ones():
    lib = SOURCES.parent / "lib"
    for soname in libraries():
        if soname.endswith(".1"):
            assert (lib / soname.removesuffix(".1")).resolve() == (lib / soname).resolve()
        dynamic = subprocess.run(
            ["readelf", "-d", lib / soname], capture_output=True, text=True, timeout=30, check=True
        ).stdout
        assert f"[{soname}]" in dynamic
        assert "TEXTREL" not in dynamic


def test_source_files_stay_small():
    for path in [*Path(SOURCES).rglob("*.[ch]"), *SOURCES.parent.glob("*.py")]:
        assert len(path.read_text().splitlines()) <= 600, path
