# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""NVML calls of a suspended process: the main thread waits for the slice, as with a CUDA call."""

import os
import signal
import sys

import pytest
from suspender import Suspender

from jupyter_gpupool.guard import build
from jupyter_gpupool.guard import page as pages
from tests.emulated import Faults

#: poll() asks NVML repeatedly in a second thread. `polls` counts the answers.
NVML = """
import pynvml as n
polls = 0
def poll():
    global polls
    while True:
        n.nvmlDeviceGetCount()
        polls += 1
        time.sleep(0.001)
"""
COUNT = "_ = n.nvmlDeviceGetCount()"
MEMORY = "_ = n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(0)).total >> 20"


@pytest.fixture
def session(guard_dir, make_session):
    for name in ("libnvidia-ml.so.1", "libnvidia-ml.so"):
        if not (guard_dir / name).is_symlink():
            (guard_dir / name).symlink_to(build.DEFAULT_OUT / "libnvidia-ml.so.1")
    return make_session()


def with_context(session):
    child = session.child()
    assert child.do(NVML + "n.nvmlInit(); _ = context()") == 0
    return child


def counted(session):
    """Return for each process how many NVML calls are inside; a suspend waits for these calls."""
    return [slot.nvml for slot in session.slots()]


@pytest.mark.parametrize("code", [COUNT, MEMORY, "n.nvmlInit()"])
def test_call_of_the_main_thread_asks_for_the_slice_and_waits(session, until, code):
    child = with_context(session)
    want = child.do(code)
    session.page.set_gate(pages.CLOSED)
    child.send(code)
    session.broker.asked(1)
    (message,) = session.broker.messages
    assert (message["type"], message["pid"], message["tid"]) == ("attach", child.pid, child.pid)
    until(lambda: session.page.read().waiting == 1)
    assert counted(session) == [0]  # a suspend does not wait for this call
    session.page.set_gate(pages.UNUSED)
    assert child.reply() == want
    until(lambda: session.page.read().waiting == 0)
    assert counted(session) == [0]


def test_suspended_process_is_resumed_for_its_nvml_call(session, until):
    """An NVML call waits at the gate and sends a request.

    Inside the driver, the call would block, and no request would resume the process.
    """
    child, suspender = with_context(session), Suspender(session, 1)
    suspender.suspend([child.pid], until)
    child.send(COUNT)
    session.broker.asked(1)
    assert not child.answers(0.1)
    suspender.resume([child.pid], until, used=False)
    assert child.reply() == 2


def test_other_threads_block_in_the_driver_without_a_request(session, until):
    child, suspender = with_context(session), Suspender(session, 1)
    child.do("threading.Thread(target=poll, daemon=True).start()")
    until(lambda: child.do("_ = polls"))
    session.page.set_gate(pages.UNUSED)
    until(lambda: child.do("_ = polls") > 5)
    assert session.page.gate() == pages.UNUSED
    suspender.suspend([child.pid], until)
    before = child.do("_ = polls")
    assert child.do("time.sleep(0.1); _ = polls") <= before + 1
    assert session.broker.messages == []
    assert session.page.read().waiting == 0
    suspender.resume([child.pid], until, used=False)
    until(lambda: child.do("_ = polls") > before + 1)


def test_nvml_calls_do_not_count_as_use_of_the_device(session):
    child = with_context(session)
    session.page.set_gate(pages.UNUSED)
    assert child.do(COUNT) == 2
    assert child.do(MEMORY) == 1024
    reading = session.page.read()
    assert (reading.gate, reading.inflight) == (pages.UNUSED, 0)
    # In a pause the process is not suspended.
    session.page.set_gate(pages.PAUSED, pause_until=1 << 62)
    assert child.do(COUNT) == 2
    assert session.broker.messages == []


def test_nvml_calls_inside_are_counted_apart_from_cuda_calls(session, until):
    """The fault nvml-waits keeps the call inside the driver while another process is suspended."""
    child, other = with_context(session), session.child()
    assert other.do("_ = context()") == 0
    other.do("C.cuMemsetD8_v2(ctypes.c_uint64(alloc(16 << 20)), 1, ctypes.c_size_t(16 << 20))")
    suspender = Suspender(session, 1, open_gate=False)
    faults = Faults(session.folder / "machine")
    faults.set("nvml-waits")
    faults.set("slow-copies", bandwidth="4MiB/s")
    child.do("h = n.nvmlDeviceGetHandleByIndex(0)")
    suspender.worker.send(f"_ = suspend([{other.pid}])")
    child.send("""
took, end = 0, time.monotonic() + 30
while took < 0.1 and time.monotonic() < end:  # until a call has waited for the copy
    took = -time.monotonic()
    n.nvmlDeviceGetName(h)
    took += time.monotonic()
_ = took >= 0.1
""")
    until(lambda: 1 in counted(session))
    assert session.page.read().inflight == 0
    assert child.reply() is True
    assert not any(counted(session))
    suspender.worker.reply()


def test_session_without_a_context_answers_without_a_slice(session):
    """torch.cuda.device_count() works in a kernel that has never had a slice."""
    session.page.set_gate(pages.CLOSED)
    child = session.child()
    assert child.do(NVML + "n.nvmlInit();" + COUNT) == 2
    assert session.slots() == ()
    assert child.do("C.cuInit(0);" + COUNT) == 2
    assert session.broker.messages == []


def test_process_without_cuda_waits_if_its_session_is_suspended(session):
    """A suspend includes each process of the session that has opened the device, even by NVML."""
    nvml_only, other = session.child(), with_context(session)
    assert nvml_only.do(NVML + "n.nvmlInit();" + COUNT) == 2
    assert [slot.pid for slot in session.slots()] == [other.pid]
    session.page.set_gate(pages.CLOSED)
    nvml_only.send(COUNT)
    session.broker.asked(1)
    session.page.set_gate(pages.UNUSED)
    assert nvml_only.reply() == 2
    # A killed process has no state that the driver could have suspended.
    session.page.set_gate(pages.CLOSED)
    other.kill()
    assert nvml_only.do(COUNT) == 2
    assert len(session.broker.messages) == 1


@pytest.mark.parametrize("first", ["", "C.cuInit(0);", "C.cuDriverGetVersion(ctypes.byref(v));"])
def test_process_started_after_the_suspend_needs_no_slice(session, until, first):
    """A process that starts after the suspend is not suspended.

    So the queries of a tool like nvidia-smi resume no session.
    """
    child, suspender = with_context(session), Suspender(session, 1)
    suspender.suspend([child.pid], until)
    late = session.child()
    late.do("v = ctypes.c_int();" + first + NVML + "n.nvmlInit()")
    assert late.do(COUNT) == 2
    late.do("C.cuDriverGetVersion(ctypes.byref(v))")  # NVML makes this call for nvidia-smi
    assert late.do(COUNT) == 2
    assert not any(counted(session))
    assert session.broker.messages == []
    # The next suspend may include this process.
    session.page.set_grant([64 << 20], 1 << 30, 2)
    session.page.set_gate(pages.UNUSED)
    session.page.set_gate(pages.CLOSED)
    session.page.set_grant([], 1 << 30, 2)
    session.broker.answer = session.attach_on_request
    assert late.do(COUNT) == 2
    assert len(session.broker.messages) == 1


def test_process_started_after_the_suspend_takes_no_slot(session, until):
    child, suspender = with_context(session), Suspender(session, 1)
    suspender.suspend([child.pid], until)
    late = session.child()
    assert late.do(NVML + "n.nvmlInit();" + COUNT) == 2
    assert [slot.pid for slot in session.slots()] == [child.pid]
    # The process makes a call while the gate is open. From then on, a suspend may include the
    # process, even in the same epoch.
    session.page.set_gate(pages.UNUSED)
    assert late.do(COUNT) == 2
    session.page.set_gate(pages.CLOSED)
    session.broker.answer = session.attach_on_request
    assert late.do(COUNT) == 2
    assert len(session.broker.messages) == 1


def test_suspend_does_not_wait_for_a_call_that_cannot_return(session, until):
    """A call never returns if a signal handler leaves it by siglongjmp, or if its thread ends."""
    child = with_context(session)
    enter = "C.gpupool_nvml_enter(None, ctypes.c_bool(True))"
    child.do(enter)
    assert counted(session) == [1]
    child.do(COUNT)
    assert counted(session) == [0]
    child.do("threading.Thread(target=time.sleep, args=(600,)).start()")
    child.send(f"{enter}; ctypes.CDLL(None).pthread_exit(None)")
    until(lambda: main_thread_ended(child.pid))
    assert counted(session) == [0]


def main_thread_ended(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "Z"


def test_interrupt_ends_the_wait(session):
    child = with_context(session)
    session.page.set_gate(pages.CLOSED)
    child.do("L, results = ctypes.CDLL('libnvidia-ml.so.1'), []; c = ctypes.byref(ctypes.c_uint())")
    # extend() and map() are one step of the interpreter. So the result is in the list before the
    # interpreter raises KeyboardInterrupt.
    child.send("results.extend(map(L.nvmlDeviceGetCount_v2, [c]))")
    session.broker.asked(1)
    # The broker gives no answer, so only the interrupt can end the wait.
    os.kill(child.pid, signal.SIGINT)
    assert child.reply()[:2] == ("raised", "KeyboardInterrupt")
    assert child.do("_ = results") == [27]  # NVML_ERROR_NOT_READY
    session.page.set_gate(pages.UNUSED)
    assert child.do(COUNT) == 2


def test_other_threads_of_the_interpreter_run_during_the_wait(session, until):
    child = with_context(session)
    child.do("L = ctypes.PyDLL('libnvidia-ml.so.1'); c = ctypes.c_uint(); ran = 0")
    child.do(
        """
def run():
    global ran
    while True:
        ran += 1
        os.utime(MARK)
        time.sleep(0.01)
""".replace("MARK", repr(str(session.page_path.with_name("mark"))))
    )
    mark = session.page_path.with_name("mark")
    mark.touch()
    child.do("threading.Thread(target=run, daemon=True).start()")
    session.page.set_gate(pages.CLOSED)
    child.send("_ = L.nvmlDeviceGetCount_v2(ctypes.byref(c))")
    session.broker.asked(1)
    before = mark.stat().st_mtime_ns
    until(lambda: mark.stat().st_mtime_ns > before)
    session.page.set_gate(pages.UNUSED)
    assert child.reply() == 0


def test_suspended_process_ends_without_waiting(session):
    child = with_context(session)
    child.do("import atexit; atexit.register(n.nvmlShutdown)")
    session.page.set_gate(pages.CLOSED)
    assert child.do("n.nvmlShutdown(); _ = 1") == 1
    assert child.end() == 0
    assert session.broker.messages == []


def test_wait_for_events_delays_no_suspend(session, until):
    child, suspender = with_context(session), Suspender(session, 1)
    child.do("s = n.nvmlEventSetCreate()")
    child.send("""
try:
    n.nvmlEventSetWait_v2(s, 1000)
except n.NVMLError_Timeout:
    _ = "timeout"
""")
    suspender.suspend([child.pid], until)
    assert counted(session) == [0]
    suspender.resume([child.pid], until, used=False)
    assert child.reply() == "timeout"


def test_forked_child_sends_its_own_request(session):
    child = with_context(session)
    session.page.set_gate(pages.CLOSED)
    code = """
import pynvml as n
r, w = os.pipe()
pid = os.fork()
if not pid:
    try:
        os.write(w, b"%d" % n.nvmlDeviceGetCount())
    finally:
        os._exit(0)
_ = pid
"""
    pid = child.do(code)
    session.broker.asked(1)
    assert session.broker.messages[0]["pid"] == pid
    session.page.set_gate(pages.UNUSED)
    assert child.do("_ = os.read(r, 9)") == b"2"
    child.do("os.waitpid(pid, 0)")


def test_facade_without_the_preloaded_guard_does_not_wait(session):
    with_context(session)
    session.page.set_gate(pages.CLOSED)
    code = "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetCount())"
    assert session.run(sys.executable, "-c", code, LD_PRELOAD=None).stdout.strip() == "2"
