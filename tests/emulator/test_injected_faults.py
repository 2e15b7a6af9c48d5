# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Each injected fault, as NVIDIA's clients see it."""

import re
import time

import pytest

from emucuda import FAULTS, EmulatorError, Faults
from tests.emulator.asking import WORKER


@pytest.fixture
def trio(emulated):
    machine = emulated("2x1GiB")
    target, worker = machine.target(), machine.target()
    worker.do(WORKER)
    target.do("import time; context(); p = ok(D.cuMemAlloc(8 << 20)); put(p, bytes_of(8 << 20))")
    return machine, target, worker


def call(worker, target, name, *args, timeout=30):
    return worker.do(f"_ = call({target.pid}, {name!r}, *{args!r})", timeout)


def state(worker, target):
    return worker.do(f"_ = Process({target.pid}).state")


def test_slow_copies_limit_bandwidth_in_their_scope(trio):
    machine, target, worker = trio
    timed = "start = time.monotonic(); put(p, bytes_of(4_000_000)); _ = time.monotonic() - start"
    machine.faults.set("slow-copies", bandwidth="20MB/s")
    assert target.do(timed) >= 0.2
    machine.faults.set("slow-copies", bandwidth=20_000_000, device=1)
    assert target.do(timed) >= 0.2  # the fault for device 1 does not replace the first
    machine.faults.clear()
    machine.faults.set("slow-copies", bandwidth=1, device=1)
    target.do(timed)  # on device 0, so it is not slow: at one byte a second, it would not end
    machine.faults.clear()
    machine.faults.set("slow-copies", bandwidth="40MB/s", pid=target.pid)
    start = time.monotonic()
    call(worker, target, "lock", 1000)
    call(worker, target, "checkpoint")
    assert time.monotonic() - start >= 0.2


def test_lock_timeout_fault_is_limited_to_a_pid_and_a_count(trio):
    machine, target, worker = trio
    machine.faults.set("lock-timeout", pid=target.pid + 1)
    assert call(worker, target, "lock", 50) is None
    assert call(worker, target, "unlock") is None
    machine.faults.clear("lock-timeout")
    machine.faults.set("lock-timeout", pid=target.pid, count=2)
    assert call(worker, target, "lock", 50) == "CUDA_ERROR_NOT_READY"
    machine.faults.set("nvml-missing-pids")  # the rewrite of the file keeps the remaining count
    assert call(worker, target, "lock", 50) == "CUDA_ERROR_NOT_READY"
    assert state(worker, target) == "running"
    assert call(worker, target, "lock", 50) is None
    assert state(worker, target) == "locked"


def test_refused_checkpoint_leaves_the_process_running(trio):
    machine, target, worker = trio
    machine.faults.set("checkpoint-refused", count=1)
    call(worker, target, "lock", 1000)
    text = call(worker, target, "checkpoint")
    assert "not supported" in text
    assert state(worker, target) == "locked"
    assert call(worker, target, "unlock") is None
    assert target.do("_ = len(get(p, 100))") == 64  # the process still works
    machine.faults.set("checkpoint-refused", code=999)
    call(worker, target, "lock", 1000)
    assert call(worker, target, "checkpoint") == "CUDA_ERROR_UNKNOWN"


def test_failed_restore_is_permanent(trio):
    machine, target, worker = trio
    machine.faults.set("restore-failed", device=0, count=1)
    call(worker, target, "lock", 1000)
    call(worker, target, "checkpoint")
    assert call(worker, target, "restore") == "CUDA_ERROR_OPERATING_SYSTEM"
    assert state(worker, target) == "failed"
    assert call(worker, target, "restore") == "CUDA_ERROR_OPERATING_SYSTEM"


def test_lost_device_ends_its_contexts(trio):
    machine, target, worker = trio
    worker.do("events = n.nvmlEventSetCreate()")
    worker.do("n.nvmlDeviceRegisterEvents(handle(0), n.nvmlEventTypeXidCriticalError, events)")
    worker.send("e = n.nvmlEventSetWait_v2(events, 30000); _ = (e.eventType, e.eventData)")
    assert worker.hangs(0.1)
    machine.faults.set("device-lost", device=0)
    assert worker.reply() == (8, 79)
    kind, text = worker.attempt("_ = n.nvmlEventSetWait_v2(events, 10)")
    assert (kind, text) == ("raised", "NVMLError_Timeout: Timeout")
    assert "GPU is lost" in worker.attempt("_ = handle(0)")[1]
    assert worker.do("_ = n.nvmlDeviceGetName(handle(1))").startswith("EMULATED")
    assert target.attempt("_ = get(p, 100)") == ("failed", 719)
    assert target.attempt("context(1)") == ("failed", 719)  # its contexts stay unusable
    other = machine.target()
    assert other.attempt("context(0)") == ("failed", 46)
    assert other.do("context(1); _ = 1") == 1
    machine.faults.clear("device-lost")
    assert target.attempt("_ = get(p, 100)") == ("failed", 719)
    assert worker.do("_ = n.nvmlDeviceGetIndex(handle(0))") == 0


def test_each_lost_device_reports_its_own_xid(trio):
    machine, _, worker = trio
    worker.do("events = n.nvmlEventSetCreate()")
    for device in (0, 1):
        xids = f"handle({device}), n.nvmlEventTypeXidCriticalError, events"
        worker.do(f"n.nvmlDeviceRegisterEvents({xids})")
    for device, code, xid in ((0, 48, 48), (1, 0, 79)):
        worker.send("_ = n.nvmlEventSetWait_v2(events, 30000).eventData")
        assert worker.hangs(0.1)
        machine.faults.set("device-lost", device=device, **({"code": code} if code else {}))
        assert worker.reply() == xid


def test_a_suspended_process_survives_the_loss_of_its_device(trio):
    machine, target, worker = trio
    want = target.do("_ = get(p, 8 << 20)")
    call(worker, target, "lock", 1000)
    call(worker, target, "checkpoint")
    uuids = worker.do("_ = [n.nvmlDeviceGetUUID(handle(i))[4:] for i in range(2)]")
    machine.faults.set("device-lost", device=0)
    assert call(worker, target, "restore", dict(zip(uuids, uuids[::-1], strict=True))) is None
    assert call(worker, target, "unlock") is None
    assert target.do("_ = get(p, 8 << 20)") == want


def test_a_restore_onto_a_lost_device_is_fatal(trio):
    machine, target, worker = trio
    call(worker, target, "lock", 1000)
    call(worker, target, "checkpoint")
    machine.faults.set("device-lost", device=0)
    assert call(worker, target, "restore") == "CUDA_ERROR_UNKNOWN"
    assert state(worker, target) == "failed"


def test_fault_makes_nvml_omit_the_processes_of_a_device(trio):
    machine, target, worker = trio
    assert worker.do("_ = pids()") == [target.pid]
    machine.faults.set("nvml-missing-pids", device=1)
    assert worker.do("_ = pids()") == [target.pid]
    machine.faults.set("nvml-missing-pids", device=0)
    assert worker.do("_ = pids()") == []
    machine.faults.clear()
    assert worker.do("_ = pids()") == [target.pid]


@pytest.mark.parametrize("name", ["lock", "checkpoint"])
def test_hang_blocks_the_call_permanently(trio, name):
    machine, target, worker = trio
    machine.faults.set("hang", op=name, count=1)
    if name == "checkpoint":
        call(worker, target, "lock", 1000)
    worker.send(f"_ = call({target.pid}, {name!r})")
    assert worker.is_hung()
    machine.faults.clear()
    assert worker.hangs()  # the call hangs even after the fault is cleared
    other = machine.target()
    other.do(WORKER)
    assert state(other, target) == ("locked" if name == "checkpoint" else "running")


def test_faults_are_read_from_the_environment(emulated):
    machine = emulated()
    worker = machine.target()
    worker.do(WORKER)
    target = machine.target(EMUCUDA_FAULTS="nothing-known; lock-timeout count=1 code=999")
    target.do("context()")
    assert call(worker, target, "lock", 10) == "CUDA_ERROR_UNKNOWN"
    assert call(worker, target, "lock", 10) is None


def test_a_fault_file_written_by_hand_is_read(trio):
    machine, target, worker = trio
    (machine.state_dir / "faults").write_text(f"lock-timeout pid={target.pid}\n")
    assert call(worker, target, "lock", 10) == "CUDA_ERROR_NOT_READY"
    (machine.state_dir / "faults").unlink()
    assert call(worker, target, "lock", 10) is None


def test_faults_of_several_writers_all_apply(trio):
    machine, target, worker = trio
    machine.faults.set("lock-timeout")
    Faults(machine.state_dir).set("nvml-missing-pids")
    assert call(worker, target, "lock", 10) == "CUDA_ERROR_NOT_READY"
    assert worker.do("_ = pids()") == []
    Faults(machine.state_dir).clear("lock-timeout")
    assert call(worker, target, "lock", 10) is None
    assert worker.do("_ = pids()") == []
    Faults(machine.state_dir).clear()
    assert worker.do("_ = pids()") == [target.pid]


def test_faults_may_be_set_before_the_machine_exists(emulated):
    machine = emulated()
    machine.faults.set("device-lost", device=0)
    assert machine.target().attempt("context(0)") == ("failed", 46)


@pytest.mark.parametrize(
    ("name", "params", "near"),
    [
        ("slow-copy", {"bandwidth": 1}, "slow-copies"),
        ("lock-timeouts", {}, "lock-timeout"),
        ("lock-timeout", {"pids": 1}, "pid"),
        ("device-lost", {"devise": 1}, "device"),
        ("hang", {"op": "stop"}, "checkpoint"),
        ("lock-timeout", {"count": "x"}, "number"),
        ("lock-timeout", {"count": True}, "number"),
        ("slow-copies", {"bandwidth": "fast"}, "number"),
        ("slow-copies", {"pid": 1}, "bandwidth="),
        ("residue", {"device": 1}, "bytes="),
        ("residue", {"bytes": "much"}, "number"),
        ("nvml-lag", {"pid": 1}, "ms="),
    ],
)
def test_unknown_faults_are_refused(tmp_path, name, params, near):
    with pytest.raises(EmulatorError, match=near):
        Faults(tmp_path / "state").set(name, **params)
    assert not (tmp_path / "state").exists()


def test_python_and_c_know_the_same_faults():
    from emucuda.build import SOURCES

    names = re.findall(r'\[FAULT_\w+\] = "([a-z-]+)"', (SOURCES / "faults.c").read_text())
    assert set(names) == set(FAULTS)
