# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Suspend and resume through NVIDIA's own client, cuda.core.checkpoint."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.emulator.asking import on_devices

MIB = 1 << 20
GIB = 1 << 30

#: A process that suspends and resumes other processes.
WORKER = """
from cuda.core.checkpoint import Process
import pynvml as n
n.nvmlInit()
handles = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]
uuids = [n.nvmlDeviceGetUUID(h)[4:] for h in handles]
def used(i=0):
    return n.nvmlDeviceGetMemoryInfo(handles[i], version=n.nvmlMemory_v2).used
def pids(i=0):
    return [p.pid for p in n.nvmlDeviceGetComputeRunningProcesses(handles[i])]
def suspend(pid):
    p = Process(pid); p.lock(5000); p.checkpoint()
def resume(pid, mapping=None):
    p = Process(pid); p.restore(mapping); p.unlock()
def shift(by):
    return {u: uuids[(i + by) % len(uuids)] for i, u in enumerate(uuids)}
_ = 1
"""

FILL = """
c = context()
s = ok(D.cuStreamCreate(1))
def vmm(n):
    prop = D.CUmemAllocationProp()
    prop.type = D.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = D.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = 0
    va = ok(D.cuMemAddressReserve(n, 0, 0, 0))
    handle = ok(D.cuMemCreate(n, prop, 0))
    ok(D.cuMemMap(va, n, 0, handle, 0))
    access = D.CUmemAccessDesc()
    access.location = prop.location
    access.flags = D.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    ok(D.cuMemSetAccess(va, n, [access], 1))
    return va
def pool(n):
    props = D.CUmemPoolProps()
    props.allocType = D.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    props.location.type = D.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    props.location.id = 0
    return ok(D.cuMemAllocFromPoolAsync(n, ok(D.cuMemPoolCreate(props)), s))
makers = [lambda n: ok(D.cuMemAlloc(n)), lambda n: ok(D.cuMemAllocAsync(n, s)), pool, vmm]
sizes = [8 << 20, 3 << 20, 12345678, 4 << 20]
pointers = [make(n) for make, n in zip(makers, sizes)]
for i, (p, n) in enumerate(zip(pointers, sizes)):
    put(p, bytes_of(n, i))
small = [ok(D.cuMemAlloc(1000)) for _ in range(50)]
for i, p in enumerate(small):
    put(p, bytes_of(1000, 100 + i))
def digest():
    return [get(p, n) for p, n in zip(pointers, sizes)] + [get(p, 1000) for p in small]
_ = digest()
"""

ALL_SIZES = "sum(sizes)"


@pytest.fixture
def pair(emulated):
    """Return a machine, a target, a worker that suspends the target, and the digests.

    The machine has two devices of 1 GiB. The target has each kind of device memory.
    """
    machine = emulated()
    target, worker = machine.target(), machine.target()
    worker.do(WORKER)
    digest = target.do(FILL)
    assert len(set(digest)) == 54
    return machine, target, worker, digest


def status(pid, field):
    """Return a field of /proc/<pid>/status in bytes."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(rf"^{field}:\s+(\d+) kB", text, re.M)[1]) * 1024


def test_memory_contents_survive_a_suspend(pair):
    _, target, worker, digest = pair
    before = worker.do("_ = used()")
    worker.do(f"suspend({target.pid})")
    assert worker.do("_ = (used(), pids())") == (0, [])
    assert worker.do(f"_ = Process({target.pid}).state") == "checkpointed"
    worker.do(f"resume({target.pid})")
    assert worker.do(f"_ = (used(), pids() == [{target.pid}])") == (before, True)
    assert target.do("_ = digest()") == digest


def test_nvml_calls_of_a_suspended_process_wait_for_the_unlock(pair):
    """From its lock to its unlock, a process waits in each NVML call, as with driver 580.159.04."""
    _, target, worker, _ = pair
    count = "_ = n.nvmlDeviceGetCount()"
    assert target.do("import pynvml as n; n.nvmlInit();" + count) == 2
    worker.do(f"p = Process({target.pid}); p.lock(5000)")
    target.send(count)
    assert target.hangs(0.1)
    worker.do("p.checkpoint()")
    assert target.hangs(0.1)
    assert worker.do(count) == 2  # NVML calls of other processes do not wait
    worker.do("p.restore()")
    assert target.hangs(0.1)
    worker.do("p.unlock()")
    assert target.reply() == 2
    worker.do(f"suspend({target.pid})")
    target.send("n.nvmlInit()")
    assert target.hangs(0.1)
    worker.do(f"resume({target.pid})")
    assert target.reply() is None


def test_suspended_bytes_are_host_memory_of_the_target(pair):
    _, target, worker, _ = pair
    target.do("big = ok(D.cuMemAlloc(256 << 20)); put(big, bytes_of(200 << 20))")
    target.do("import gc; gc.collect(); ctypes.CDLL(None).malloc_trim(0)")
    anonymous, stored = status(target.pid, "RssAnon"), on_devices(target.pid)
    assert stored > 200 * MIB
    worker.do(f"suspend({target.pid})")
    assert status(target.pid, "RssAnon") - anonymous > 200 * MIB
    assert on_devices(target.pid) == 0  # the host holds one copy, not two
    worker.do(f"resume({target.pid})")
    assert status(target.pid, "RssAnon") - anonymous < 16 * MIB
    assert on_devices(target.pid) == stored


def test_suspended_device_memory_is_poisoned(pair):
    _, target, worker, _ = pair
    links = Path(f"/proc/{target.pid}/fd")
    device = next(x for x in links.iterdir() if "emucuda-device" in x.readlink().name)
    assert device.stat().st_blocks * 512 >= 24 * MIB
    worker.do(f"suspend({target.pid})")
    assert device.stat().st_blocks == 0
    maps = Path(f"/proc/{target.pid}/maps").read_text().splitlines()
    modes = {line.split()[1] for line in maps if "emucuda-device" in line}
    assert modes == {"---s"}
    worker.do(f"resume({target.pid})")


def test_a_restore_can_move_to_another_device(pair):
    _, target, worker, digest = pair
    before = worker.do("_ = used()")
    uuid = target.do("_ = bytes(ok(D.cuDeviceGetUuid(0)).bytes).hex()")
    worker.do(f"suspend({target.pid}); resume({target.pid}, shift(1))")
    assert worker.do("_ = (used(0), used(1))") == (0, before)
    assert target.do("_ = digest()") == digest
    assert target.do("_ = bytes(ok(D.cuDeviceGetUuid(0)).bytes).hex()") != uuid
    target.do("ok(D.cuMemAlloc(64 << 20))")
    assert worker.do("_ = (used(0), used(1))") == (0, before + 64 * MIB)
    # Then the process moves back to the first device.
    worker.do(f"suspend({target.pid}); resume({target.pid}, shift(1))")
    assert worker.do("_ = (used(0), used(1))") == (before + 64 * MIB, 0)


def test_a_restore_can_swap_two_devices(emulated):
    machine = emulated("2x1GiB,context=0")
    target, worker = machine.target(), machine.target()
    worker.do(WORKER)
    target.do(
        dedent("""
        memory = []
        for device, mib in ((0, 100), (1, 900)):
            context(device)
            p = ok(D.cuMemAlloc(mib << 20))
            put(p, bytes_of(5000, device))
            memory.append(p)
        """)
    )
    want = target.do("_ = [get(p, 5000) for p in memory]")
    worker.do(f"suspend({target.pid}); resume({target.pid}, shift(1))")
    assert worker.do("_ = (used(0), used(1))") == (900 * MIB, 100 * MIB)
    assert target.do("_ = [get(p, 5000) for p in memory]") == want


def test_a_device_map_must_name_invisible_devices_too(emulated):
    machine = emulated("3x1GiB")
    worker = machine.target()
    worker.do(WORKER)
    target = machine.target(CUDA_VISIBLE_DEVICES="2")
    want = target.do(FILL)
    worker.do(f"suspend({target.pid})")
    kind, text = worker.attempt(f"resume({target.pid}, {{uuids[2]: uuids[0]}})")
    assert kind == "raised"
    assert "INVALID_VALUE" in text
    worker.do(f"resume({target.pid}, shift(1))")
    assert target.do("_ = digest()") == want
    assert worker.do("_ = (used(0) > 0, used(2))") == (True, 0)


def test_a_restore_without_room_is_fatal(pair):
    machine, target, worker, _ = pair
    worker.do(f"suspend({target.pid})")
    hog = machine.target()
    hog.do("context(); ok(D.cuMemAlloc(970 << 20))")
    kind, text = worker.attempt(f"resume({target.pid})")
    assert kind == "raised"
    assert "CUDA_ERROR_OPERATING_SYSTEM" in text
    assert worker.do(f"_ = Process({target.pid}).state") == "failed"
    assert worker.do("_ = used()") == GIB  # the process keeps the memory allocated so far
    hog.kill()
    assert worker.attempt(f"resume({target.pid})")[0] == "raised"  # the failure is permanent
    assert worker.attempt(f"_ = Process({target.pid}).unlock()")[0] == "raised"
    target.send("_ = digest()")
    assert target.hangs()
    target.kill()
    assert worker.do("_ = used()") == 0


@pytest.mark.parametrize("copies", [False, True], ids=["before the copy", "during the copy"])
def test_a_killed_target_ends_the_call(emulated, until, copies):
    machine = emulated("1x1GiB")
    target, worker = machine.target(), machine.target()
    worker.do(WORKER)
    target.do("context(); p = ok(D.cuMemAlloc(64 << 20)); put(p, bytes_of(64 << 20))")
    worker.do(f"Process({target.pid}).lock(5000)")
    before = on_devices(target.pid)
    if copies:
        machine.faults.set("slow-copies", bandwidth="1MB/s")
    else:
        target.signal(signal.SIGSTOP)  # so the checkpoint hangs before its copy
    worker.send(f"Process({target.pid}).checkpoint()")
    if copies:
        until(lambda: on_devices(target.pid) < before)
    assert worker.hangs(0 if copies else 0.2)
    target.kill()
    kind, _ = worker.reply()
    assert kind == "raised"
    assert worker.do("_ = used()") == 0


def test_a_checkpoint_completes_without_its_caller(emulated, until):
    machine = emulated("1x1GiB")
    target, worker, dying = (machine.target() for _ in range(3))
    worker.do(WORKER)
    dying.do(WORKER)
    want = target.do(
        "context(); n = 32 << 20; p = ok(D.cuMemAlloc(n)); put(p, bytes_of(n)); _ = get(p, n)"
    )
    worker.do(f"Process({target.pid}).lock(5000)")
    machine.faults.set("slow-copies", bandwidth="20MB/s")
    before = on_devices(target.pid)
    dying.send(f"Process({target.pid}).checkpoint()")
    until(lambda: on_devices(target.pid) < before)
    dying.kill()
    assert worker.do(f"_ = Process({target.pid}).state") == "checkpointed"  # now the copy is done
    restoring = machine.target()
    restoring.do(WORKER)
    restoring.send(f"Process({target.pid}).restore()")
    until(lambda: on_devices(target.pid) > 0)
    restoring.kill()
    assert worker.do(f"_ = Process({target.pid}).state") == "locked"
    machine.faults.clear()
    worker.do(f"Process({target.pid}).unlock()")
    assert target.do("_ = get(p, n)") == want


def test_copies_take_the_time_of_the_bandwidth(emulated):
    machine = emulated("1x1GiB,bandwidth=200MB/s")
    target, worker = machine.target(), machine.target()
    worker.do(WORKER + "import time\n")
    target.do("context(); import time; data = bytes_of(40_000_000); p = ok(D.cuMemAlloc(1 << 26))")
    took = "start = time.monotonic(); {}; _ = time.monotonic() - start"
    assert target.do(took.format("put(p, data)")) >= 0.2
    assert worker.do(took.format(f"suspend({target.pid})")) >= 0.2
    assert worker.do(took.format(f"resume({target.pid})")) >= 0.2


@pytest.mark.parametrize(
    ("profile", "copies", "memory", "suspends", "resumes"),
    [
        ("rtx4090", 32e9, 1.008e12, (0, 4e9), (0, 7e9)),
        ("h200", 55e9, 4.8e12, (0.18, 5.1e9), (0.25, 8.5e9)),
    ],
)
def test_copies_and_suspends_take_the_times_of_the_profile(
    emulated, profile, copies, memory, suspends, resumes
):
    machine = emulated(f"1x1GiB,profile={profile}")
    target, worker = machine.target(), machine.target()
    worker.do(WORKER + "import time\n")
    target.do("context(); a, b = ok(D.cuMemAlloc(1 << 26)), ok(D.cuMemAlloc(1 << 26))")
    target.do("put(a, bytes_of(1 << 26)); e = [ok(D.cuEventCreate(0)) for _ in range(3)]")
    target.do("host = ok(D.cuMemHostAlloc(1 << 26, 0))")
    target.do(
        "ok(D.cuEventRecord(e[0], 0)); ok(D.cuMemcpyDtoDAsync(b, a, 1 << 26, 0));"
        "ok(D.cuEventRecord(e[1], 0)); ok(D.cuMemcpyDtoHAsync(host, a, 1 << 26, 0));"
        "ok(D.cuEventRecord(e[2], 0)); ok(D.cuCtxSynchronize())"
    )
    inside, out = target.do("_ = [ok(D.cuEventElapsedTime(*pair)) for pair in zip(e, e[1:])]")
    assert inside >= (2 << 26) / memory * 1e3
    assert out >= (1 << 26) / copies * 1e3
    took = "start = time.monotonic(); {}; _ = time.monotonic() - start"
    for way, (begins, rate) in (("suspend", suspends), ("resume", resumes)):
        assert worker.do(took.format(f"{way}({target.pid})")) >= begins + (1 << 26) / rate


def test_a_call_hangs_while_its_target_is_stopped(pair):
    _, target, worker, digest = pair
    target.signal(signal.SIGSTOP)
    worker.send(f"_ = Process({target.pid}).state")
    assert worker.hangs()
    target.signal(signal.SIGCONT)
    assert worker.reply() == "running"
    assert target.do("_ = digest()") == digest


def test_process_can_suspend_itself(pair):
    _, target, _, digest = pair
    target.do(
        dedent("""
        from cuda.core.checkpoint import Process
        me = Process(os.getpid())
        me.lock(); me.checkpoint(); me.restore(); me.unlock()
        """)
    )
    assert target.do("_ = digest()") == digest


def test_two_large_processes_take_turns_on_one_device(emulated):
    """Each process has 600 MiB, on a device of 1 GiB."""
    machine = emulated("1x1GiB,context=0")
    a, b, worker = (machine.target() for _ in range(3))
    worker.do(WORKER)
    want = []
    for seed, target in enumerate((a, b)):
        code = f"context(); p = ok(D.cuMemAlloc(600 << 20)); put(p, bytes_of(1 << 20, {seed}))"
        assert target.do(code) is None
        want.append(target.do("_ = get(p, 1 << 20)"))
        worker.do(f"suspend({target.pid})")
    for _ in range(3):
        for target, digest in zip((a, b), want, strict=True):
            worker.do(f"resume({target.pid})")
            assert target.do("_ = get(p, 1 << 20)") == digest
            worker.do(f"suspend({target.pid})")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_suspend_by_another_user_is_refused(pair):
    machine, target, worker, digest = pair
    machine.state_dir.chmod(0o777)
    for folder in [machine.state_dir, *machine.state_dir.parents]:
        if folder.owner() == "root" and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    code = """
    import ctypes, os, sys
    os.setuid(65534)
    driver = ctypes.CDLL("libcuda.so.1")
    pid = int(sys.argv[1])
    print(driver.cuCheckpointProcessLock(pid, None), driver.cuInit(0))
    """
    done = subprocess.run(
        [sys.executable, "-c", dedent(code), str(target.pid)],
        env={**os.environ, **machine.env},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.split() == ["304", "0"], done.stderr
    worker.do(f"suspend({target.pid}); resume({target.pid})")  # root may suspend any process
    assert target.do("_ = digest()") == digest
