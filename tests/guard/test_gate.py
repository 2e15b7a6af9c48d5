# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The gate, the count of calls inside, slots, and the devices that a process sees."""

import os
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jupyter_gpupool.guard import build
from jupyter_gpupool.guard import page as pages
from tests.emulated import library_dir

NOT_READY = 802
CHOICES = [
    # An item has a value of CUDA_VISIBLE_DEVICES, and the devices that the process sees with this
    # value. 0 is the session's first device. In a value, {0} and {1} are the UUIDs of the session's
    # devices. {h0} and {h1} are the UUIDs of its home devices, which it had before the lease.
    (None, [0, 1]),
    ("{h0},{h1}", [0, 1]),
    ("{0},{1}", [0, 1]),
    ("{1}", [1]),
    ("{h1}", [1]),
    ("{h1},{h0}", [1, 0]),
    ("0", [0]),
    ("1", [1]),
    ("1,0", [1, 0]),
    ("0,-1,1", [0]),
    ("", []),
    ("-1", []),
    ("NoDevFiles", []),
    ("0,0", []),  # a device that is named twice hides all devices
    ("rubbish", []),
    ("0,rubbish,1", [0]),
    (" 1 , 0 ", [1, 0]),
    ("1st", [1]),  # strtoul() reads this as 1
]
#: Values that name GPUs outside the session. The guard leaves these GPUs out. If no GPU is left,
#: the process sees the whole slice.
OTHERS = [
    ("7", [0, 1]),
    ("2,3", [0, 1]),
    ("0,7,1", [0, 1]),
    ("5,1", [1]),
    ("GPU-00000000-0000-0000-0000-000000000000", [0, 1]),
    ("MIG-00000000-0000-0000-0000-000000000000", [0, 1]),
    ("MIG-GPU-00000000-0000-0000-0000-000000000000/1/0", [0, 1]),
    ("{0},GPU-00000000-0000-0000-0000-000000000000", [0]),
]


def test_first_call_after_a_sample_marks_the_gate_as_used(session):
    child = session.child()
    assert child.do("_ = context()") == 0
    session.page.set_gate(pages.UNUSED)
    assert child.do("_ = number(C.cuDeviceGetCount)") == 2
    assert session.page.gate() == pages.UNUSED  # a query about devices does not count as use
    assert child.do("_ = C.cuCtxSynchronize()") == 0
    assert session.page.gate() == pages.OPEN
    session.page.set_gate(pages.UNUSED)
    assert child.do("s = ctypes.c_void_p(); _ = C.cuStreamCreate(ctypes.byref(s), 0)") == 0
    assert session.page.gate() == pages.OPEN
    assert session.broker.messages == []


def test_closed_gate_asks_for_the_lease_and_waits(session):
    session.page.set_gate(pages.CLOSED)
    child = session.child()
    assert child.do("_ = C.cuInit(0)") == 0
    assert child.do("_ = number(C.cuDeviceGetCount)") == 2
    assert session.broker.messages == []
    child.send("_ = context()")
    session.broker.asked(1)
    message = session.broker.messages[0]
    assert message["type"] == "attach"
    assert (message["v"], message["id"], message["session"], message["token"]) == (
        1, 1, "s-1", 't"1',
    )  # fmt: skip
    assert message["pid"] == child.pid
    assert isinstance(message["tid"], int)
    reading = session.page.read()
    assert (reading.waiting, reading.inflight) == (1, 0)
    assert not child.answers(0.1)
    session.page.set_gate(pages.UNUSED)  # the gate opens, and the broker does not answer
    assert child.reply() == 0
    session.broker.wait(lambda b: b.open == 0)  # the guard has closed its connection
    reading = session.page.read()
    assert (reading.waiting, reading.inflight) == (0, 0)


def test_wait_ends_when_the_broker_answers_with_an_open_gate(session):
    session.page.set_gate(pages.CLOSED)
    session.broker.answer = session.attach_on_request
    child = session.child()
    assert child.do("_ = context()") == 0
    assert child.do("_ = C.cuCtxSynchronize()") == 0
    assert len(session.broker.messages) == 1


def test_calls_before_cuinit_ask_for_no_lease(session):
    session.page.set_gate(pages.CLOSED)
    child = session.child()
    assert child.do("_ = C.cuCtxSynchronize(), C.cuMemFreeHost(None)") == (3, 3)
    assert session.broker.messages == []


def test_several_threads_wait_at_the_same_time(session, until):
    child = session.child()
    assert child.do("_ = context()") == 0
    session.page.set_gate(pages.CLOSED)
    child.do("""
results = []
def wait():
    c = ctypes.c_void_p()
    results.append((C.cuCtxSynchronize(), C.cuStreamQuery(None)))
threads = [threading.Thread(target=wait) for _ in range(8)]
for t in threads: t.start()
""")
    session.broker.asked(8)
    until(lambda: session.page.read().waiting == 8)
    assert len({m["tid"] for m in session.broker.messages}) == 8
    session.page.set_gate(pages.UNUSED)
    child.do("for t in threads: t.join()")
    # These threads have no current context.
    assert child.do("_ = results") == [(201, 201)] * 8
    assert session.page.read().waiting == 0


def test_long_call_is_counted_until_it_returns(make_session, until):
    """A long copy counts as a call inside until it returns, even if the gate closes before."""
    session = make_session("1x1GiB,context=32MiB,bandwidth=20MB/s")
    child = session.child()
    assert child.do("_ = context()") == 0
    child.do("p, data = alloc(64 << 20), ctypes.create_string_buffer(64 << 20)")
    child.send("_ = C.cuMemcpyHtoD_v2(ctypes.c_uint64(p), data, ctypes.c_size_t(64 << 20))")
    until(lambda: session.page.read().inflight == 1)
    session.page.set_gate(pages.CLOSED)
    assert not child.answers(0.1)
    assert session.page.read().inflight == 1
    assert child.reply() == 0
    assert session.page.read().inflight == 0
    assert session.broker.messages == []


@pytest.mark.parametrize(
    "call",
    [
        "cuMemcpyHtoDAsync_v2(u64(p), data, size(32 << 20), None)",
        "cuMemcpyAsync(u64(p), u64(ctypes.addressof(data)), size(32 << 20), None)",
        "cuMemsetD8Async(u64(p), 7, size(32 << 20), None)",
    ],
)
def test_asynchronous_copies_are_counted(session, until, call):
    """A copy from pageable memory may take seconds: it returns when it has read all bytes."""
    child = session.child()
    assert child.do("_ = context()") == 0
    child.do(
        "p, data = alloc(32 << 20), ctypes.create_string_buffer(32 << 20)\n"
        "u64, size, stop, results = ctypes.c_uint64, ctypes.c_size_t, [], set()\n"
        f"def work():\n    context()\n    while not stop: results.add(C.{call})\n"
        "thread = threading.Thread(target=work); thread.start()"
    )
    until(lambda: session.page.read().inflight == 1)
    assert child.do("stop.append(1); thread.join(); _ = results") == {0}
    assert session.page.read().inflight == 0


def test_device_queries_need_no_lease_while_suspended(session):
    """The guard answers from its cache. The driver could block while the process is suspended."""
    child = session.child()
    look = """
name = ctypes.create_string_buffer(64); uuid = ctypes.create_string_buffer(16)
major, minor = ctypes.c_int(), ctypes.c_int()
_ = (C.cuInit(0), number(C.cuDriverGetVersion), number(C.cuDeviceGetCount),
     number(C.cuDeviceGet, 1), number(C.cuDeviceGet, 2), number(C.cuDeviceGetAttribute, 75, 0),
     number(C.cuDeviceGetAttribute, 75, 5), C.cuDeviceGetName(name, 64, 0), name.value,
     C.cuDeviceGetUuid_v2(uuid, 1), uuid.raw, C.cuDeviceGetUuid(uuid, 0), uuid.raw,
     C.cuDeviceComputeCapability(ctypes.byref(major), ctypes.byref(minor), 0), major.value,
     C.cuDeviceGetName(name, 5, 0), name.value)
"""
    assert child.do("_ = context()") == 0
    true = child.do(look)
    assert true[2] == 2
    session.page.set_gate(pages.CLOSED)
    assert child.do(look) == true
    assert session.broker.messages == []
    # A query that the guard cannot answer waits for the lease.
    session.broker.answer = session.attach_on_request
    assert child.do("_ = number(C.cuDeviceCanAccessPeer, 0, 1)") == 1
    assert len(session.broker.messages) == 1


def test_cached_device_facts_are_read_again_for_a_new_lease(session):
    child = session.child()
    assert child.do("_ = context()") == 0
    assert child.do("_ = number(C.cuDeviceGetCount)") == 2
    session.page.set_grant([1 << 20] * 2, 1 << 30, 2)  # a new epoch
    assert child.do("_ = number(C.cuDeviceGetCount)") == 2
    session.page.set_gate(pages.CLOSED)
    assert child.do("_ = number(C.cuDeviceGetCount)") == 2
    assert session.broker.messages == []


def test_call_waits_during_a_pause_without_asking_the_broker(session):
    child = session.child()
    assert child.do("_ = context()") == 0
    until = time.monotonic_ns() + 300_000_000
    session.page.set_gate(pages.PAUSED, pause_until=until)
    assert child.do("_ = C.cuCtxSynchronize()") == 0
    assert time.monotonic_ns() >= until
    session.page.set_gate(pages.PAUSED, pause_until=time.monotonic_ns() + 60_000_000_000)
    child.send("_ = C.cuCtxSynchronize()")
    assert not child.answers(0.1)
    session.page.set_gate(pages.OPEN)
    assert child.reply() == 0
    # Now the pause becomes a suspend.
    session.page.set_gate(pages.PAUSED, pause_until=time.monotonic_ns() + 60_000_000_000)
    child.send("_ = C.cuCtxSynchronize()")
    assert not child.answers(0.1)
    assert session.broker.messages == []
    session.broker.answer = session.attach_on_request
    session.page.set_gate(pages.CLOSED)
    assert child.reply() == 0
    assert len(session.broker.messages) == 1


# ---------------------------------------------------------------------- slots


def test_process_has_a_slot_from_its_first_call_to_its_end(session):
    child = session.child()
    child.do("_ = 1")
    assert session.slots() == ()
    assert child.do("_ = number(C.cuDriverGetVersion)") == 13000
    (slot,) = session.slots()
    start = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
    assert (slot.pid, slot.start_time, slot.flags) == (child.pid, start, 0)
    child.do("C.cuInit(0)")
    assert session.slots()[0].flags == pages.SLOT_CUDA
    child.do("context()")
    assert session.slots()[0].flags == pages.SLOT_CUDA | pages.SLOT_CONTEXT
    assert child.end() == 0
    assert session.slots() == ()


def test_killed_process_is_reaped_when_a_slot_is_needed(session):
    dead = session.child()
    assert dead.do("_ = context()") == 0
    dead.kill()
    (slot,) = session.slots()
    assert slot.pid == dead.pid
    # Fill all other slots with pids that no process can have.
    data = bytearray(session.page_path.read_bytes())
    for i in range(1, pages.SLOTS):
        at = pages.HEADER_BYTES + i * pages.SLOT_BYTES
        struct.pack_into("<IIQ", data, at, 1, (1 << 22) + i, 5)
    session.page_path.write_bytes(data)
    child = session.child()
    assert child.do("_ = context()") == 0
    assert [slot.pid for slot in session.slots()] == [child.pid]


def test_guard_notices_a_context_made_without_it(session):
    """The process makes a context by a direct call of the driver. The guard notices the context at
    the first allocation. After that, the process's calls wait at a closed gate.
    """
    child = session.child()
    path = str(library_dir() / "libcuda.so.1")
    child.do(f"D = ctypes.CDLL({path!r}); c = ctypes.c_void_p()")
    child.do("D.cuInit(0); D.cuDevicePrimaryCtxRetain(ctypes.byref(c), 0); D.cuCtxSetCurrent(c)")
    assert child.do("p = alloc(1 << 20); _ = p > 1 << 20")
    assert session.slots()[0].flags == pages.SLOT_CUDA | pages.SLOT_CONTEXT
    session.page.set_gate(pages.CLOSED)
    child.send("_ = C.cuCtxSynchronize()")
    assert not child.answers(0.3)
    session.page.set_gate(pages.UNUSED)
    assert child.reply() == 0


def test_process_without_descriptors_reaps_no_living_process(session):
    """Without a free descriptor, a process cannot read /proc.

    It must then assume that all processes are alive.
    """
    other, child = session.child(), session.child()
    assert other.do("_ = context()") == child.do("_ = context()") == 0
    before = session.slots()
    look = "free, total = ctypes.c_size_t(), ctypes.c_size_t()\n"
    look += "_ = C.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))"
    child.do("import resource; limits = resource.getrlimit(resource.RLIMIT_NOFILE)")
    child.do("resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))")
    assert child.do(look) == 0
    assert session.slots() == before
    child.do("resource.setrlimit(resource.RLIMIT_NOFILE, limits)")
    assert child.do(look) == 0
    assert session.slots() == before


def test_process_whose_first_thread_has_ended_is_alive(session, until):
    odd, child = session.child(), session.child()
    assert odd.do("_ = context()") == child.do("_ = context()") == 0
    odd.do("threading.Thread(target=time.sleep, args=(600,), daemon=True).start()")
    odd.send("ctypes.PyDLL(None).syscall(60, 0)")  # exit(2) ends only this thread
    stat = Path(f"/proc/{odd.pid}/stat")
    until(lambda: stat.read_text().rpartition(") ")[2].startswith("Z"))
    child.do("n = ctypes.c_size_t(); C.cuMemGetInfo_v2(ctypes.byref(n), ctypes.byref(n))")
    assert {slot.pid for slot in session.slots()} == {odd.pid, child.pid}


def test_process_that_ends_during_a_call_keeps_its_slot(make_session, until):
    """A call writes to its slot when it ends. No other process may get the slot before."""
    session = make_session("1x1GiB,context=32MiB,bandwidth=10MB/s")
    ending = session.child()
    assert ending.do("_ = context()") == 0
    ending.do("p, data = alloc(64 << 20), ctypes.create_string_buffer(64 << 20)")
    ending.do(
        "copy = lambda: (context(), C.cuMemcpyHtoD_v2(ctypes.c_uint64(p), data, 64 << 20))\n"
        "threading.Thread(target=copy, daemon=True).start()"
    )
    until(lambda: session.slots()[0].inflight)
    assert ending.end() == 0
    assert [slot.pid for slot in session.slots()] == [ending.pid]
    child = session.child()
    assert child.do("_ = context()") == 0
    child.do("n = ctypes.c_size_t(); C.cuMemGetInfo_v2(ctypes.byref(n), ctypes.byref(n))")
    assert [slot.pid for slot in session.slots()] == [child.pid]


def test_slot_of_a_process_with_other_threads_is_reaped_later(session):
    """Other threads may still write to the slot when a process ends. So its slot is freed later."""
    ending = session.child()
    assert ending.do("_ = context()") == 0
    ending.do("""
called = threading.Event()
def work():
    context()
    called.set()
    time.sleep(600)
threading.Thread(target=work, daemon=True).start()
called.wait()
""")
    assert ending.end() == 0
    assert [slot.pid for slot in session.slots()] == [ending.pid]
    child = session.child()
    assert child.do("_ = context()") == 0
    child.do("n = ctypes.c_size_t(); C.cuMemGetInfo_v2(ctypes.byref(n), ctypes.byref(n))")
    assert [slot.pid for slot in session.slots()] == [child.pid]


def test_without_a_free_slot_every_call_fails_with_a_reason(session):
    """All 256 slots are in use. Calls of one more process fail and never reach the driver."""
    pid = os.getpid()
    start = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    data = bytearray(session.page_path.read_bytes())
    for i in range(pages.SLOTS):
        at = pages.HEADER_BYTES + i * pages.SLOT_BYTES
        struct.pack_into("<IIQ", data, at, 1, pid, start)
    session.page_path.write_bytes(data)
    done = session.run(
        sys.executable, "-c",
        "import ctypes; C = ctypes.CDLL('libcuda.so.1')\n"
        "print(C.cuInit(0), C.cuCtxSynchronize(), C.cuStreamCreate(None, 0), C.cuInit(0))",
    )  # fmt: skip
    assert done.stdout.split() == [str(NOT_READY)] * 4
    assert done.stderr.count("has no room for more than 256 processes") == 1


def test_lock_of_a_dead_process_is_taken_over(session):
    holder = session.child(["/bin/sleep", "60"])
    start = int(Path(f"/proc/{holder.pid}/stat").read_text().rpartition(")")[2].split()[19])
    with session.page_path.open("r+b") as file:
        file.seek(48)
        file.write(struct.pack("<Q", holder.pid | (start & 0xFFFFFFFF) << 32))
    child = session.child()
    child.send("_ = context()")
    assert not child.answers(0.3)  # the process that holds the lock lives
    holder.kill()
    assert child.reply() == 0


def test_forked_child_gets_its_own_slot_at_its_first_call(session):
    child = session.child()
    assert child.do("_ = context()") == 0
    found = child.do("""
r, w = os.pipe(); r2, w2 = os.pipe()
pid = os.fork()
if not pid:
    os.read(r2, 1)
    error = C.cuCtxSynchronize()  # the driver says that a forked child has no CUDA
    os.write(w, b"%d" % error)
    os.read(r2, 1)
    os._exit(0)
_ = pid
""")
    assert [slot.pid for slot in session.slots()] == [child.pid]
    assert child.do("os.write(w2, b'1'); _ = os.read(r, 9)") == b"3"
    slots = {slot.pid: slot for slot in session.slots()}
    assert set(slots) == {child.pid, found}
    assert slots[found].flags == 0
    # The child's end does not change the parent's slot.
    child.do("os.write(w2, b'1'); os.waitpid(pid, 0)")
    assert slots[child.pid].flags == pages.SLOT_CUDA | pages.SLOT_CONTEXT
    assert child.do("_ = C.cuCtxSynchronize()") == 0


def test_both_processes_can_use_cuda_if_the_fork_came_first(session):
    child = session.child()
    assert child.do("""
r, w = os.pipe()
pid = os.fork()
if not pid:
    os.write(w, b"%d" % context())
    os._exit(0)
os.waitpid(pid, 0)
_ = os.read(r, 9), context()
""") == (b"0", 0)  # fmt: skip


def test_forks_are_safe_while_threads_wait_and_call(session):
    """A child never inherits a lock that another thread holds."""
    child = session.child()
    assert child.do("_ = context()") == 0
    session.broker.answer = lambda message: None
    child.do("""
stop = False
def work():
    while not stop:
        C.cuCtxSynchronize(); number(C.cuDeviceGetCount)
        p = ctypes.c_void_p()
        C.cuGetProcAddress_v2(b"cuMemAlloc", ctypes.byref(p), 12000, ctypes.c_uint64(0), None)
threads = [threading.Thread(target=work) for _ in range(3)]
for t in threads: t.start()
""")
    for i in range(10):
        session.page.set_gate(pages.CLOSED if i % 2 else pages.OPEN)
        assert child.do("""
r, w = os.pipe()
pid = os.fork()
if not pid:
    n = ctypes.c_int()
    os.write(w, b"%d" % C.cuDriverGetVersion(ctypes.byref(n)))
    os._exit(0)
_ = os.read(r, 9), os.waitpid(pid, 0)[1]
os.close(r); os.close(w)
""")[1] == 0  # fmt: skip
    session.page.set_gate(pages.OPEN)
    child.do("stop = True\nfor t in threads: t.join()")
    assert [s.pid for s in session.slots() if s.pid == child.pid] == [child.pid]


def test_slots_of_ended_processes_are_used_again(session):
    """os._exit() does not free the slot of a process.

    The guard frees such a slot when it needs one.
    """
    found = session.python("""
import ctypes, os
C = ctypes.CDLL("libcuda.so.1")
wrong = 0
for i in range(300):
    pid = os.fork()
    if not pid:
        n = ctypes.c_int()
        os._exit(C.cuDriverGetVersion(ctypes.byref(n)) != 0)
    wrong += os.waitpid(pid, 0)[1] != 0
print(wrong)
""")
    assert found == "0"


def test_exec_resets_the_slot(session):
    child = session.child()
    assert child.do("_ = context()") == 0
    before = session.slots()[0]
    child.send(f"""
os.execv(sys.executable, [sys.executable, "-c", {CODE!r}])
""")
    assert child.line() == "ready"
    (slot,) = session.slots()
    assert (slot.pid, slot.start_time) == (before.pid, before.start_time)
    assert (slot.flags, slot.used, slot.inflight) == (0, (0,) * pages.DEVICES, 0)


CODE = """
import ctypes, sys
n = ctypes.c_int()
ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(n))
print("ready", flush=True)
sys.stdin.read()
"""

# ---------------------------------------------------------------------- the page


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda p: p.unlink(), "is gone: the session has ended"),
        (lambda p: os.truncate(p, 4096), "is not a file, or is too short"),
        (lambda p: p.write_bytes(b"\0" * pages.SIZE), "and the guard are from different versions"),
        (lambda p: (p.unlink(), p.symlink_to("/dev/null")), "cannot be opened"),
        (lambda p: (p.unlink(), p.mkdir()), "cannot be opened"),
        (lambda p: (p.unlink(), os.mkfifo(p)), "is not a file, or is too short"),
    ],
)
def test_unusable_page_fails_calls_with_a_clear_error(session, spoil, why):
    """The gate is in the page. Without a gate, calls could reach the driver during a suspend."""
    spoil(session.page_path)
    done = session.run(
        sys.executable, "-c",
        "import ctypes; C = ctypes.CDLL('libcuda.so.1'); n = ctypes.c_int()\n"
        "print(C.cuInit(0), C.cuCtxSynchronize(), C.cuDeviceGetCount(ctypes.byref(n)))",
    )  # fmt: skip
    assert done.stdout.split() == [str(NOT_READY)] * 3
    assert why in done.stderr
    assert done.stderr.count("\n") == 1


def test_guard_asks_the_broker_for_a_deleted_page(session, tmp_path):
    """A logout deletes the page's file, but the broker still has the page open.

    When the guard asks for the page, the broker puts a link to its descriptor in the place of the
    file.
    """
    first = session.child()
    assert first.do("_ = context()") == 0
    session.page_path.unlink()

    def back():
        session.page.restore()
        return True

    session.broker.page = back
    second = session.child()
    assert second.do("_ = context()") == 0
    third = session.child()  # this process finds the link
    assert third.do("_ = context()") == 0
    assert len(session.broker.pages) == 1
    assert {slot.pid for slot in session.page.read().slots} == {first.pid, second.pid, third.pid}


def test_guard_asks_for_the_page_if_its_link_leads_elsewhere(session):
    session.page_path.unlink()
    session.page_path.symlink_to(f"/proc/{os.getpid()}/fd/0")  # descriptor 0 is not the page

    def back():
        session.page_path.unlink()
        session.page.restore()
        return True

    session.broker.page = back
    child = session.child()
    assert child.do("_ = context()") == 0
    assert len(session.page.read().slots) == 1


def put_back(session):
    """Restore the page's name, as the broker does."""
    link = session.page_path.with_name(f"link-{threading.get_ident()}")
    link.symlink_to(f"/proc/{os.getpid()}/fd/{session.page._fd}")
    link.replace(session.page_path)  # atomic, because another thread may read the name
    return True


def test_two_threads_that_need_the_gil_can_ask_for_a_lost_page(session, until):
    """Each of two threads releases the GIL while it waits for the page.

    A thread needs the GIL again before it can return.
    """
    session.page_path.unlink()
    answer = threading.Event()
    session.broker.page = lambda: answer.wait(60) and put_back(session)
    child = session.child()
    child.do("""
results = []
thread = threading.Thread(target=lambda: results.append(P.cuInit(0)), daemon=True)
thread.start()
""")
    until(lambda: len(session.broker.pages) == 1)
    child.send("results.append(P.cuInit(0)); thread.join(); _ = results")
    until(lambda: len(session.broker.pages) == 2)
    answer.set()
    assert child.reply() == [0, 0]
    (slot,) = session.page.read().slots
    assert (slot.pid, slot.waiting, slot.inflight) == (child.pid, 0, 0)


def test_fork_during_a_request_for_a_lost_page_works(session, until):
    session.page_path.unlink()
    answer = threading.Event()
    session.broker.page = lambda: answer.wait(60) and put_back(session)
    child = session.child()
    child.do("""
results = []
thread = threading.Thread(target=lambda: results.append(P.cuInit(0)), daemon=True)
thread.start()
""")
    until(lambda: len(session.broker.pages) == 1)
    child.send("""
pid = os.fork()
if not pid:
    os._exit(P.cuInit(0))
_ = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
""")
    until(lambda: len(session.broker.pages) == 2)  # the child sends its own request
    answer.set()
    assert child.reply() == 0
    assert child.do("thread.join(); _ = results") == [0]


def test_interrupted_wait_for_a_lost_page_is_repeated(session, until):
    session.page_path.unlink()
    answer = threading.Event()
    session.broker.page = lambda: answer.wait(60) and put_back(session)
    child = session.child()
    child.do("seen = []; signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))")
    child.send("_ = P.cuInit(0), seen")
    until(lambda: len(session.broker.pages) == 1)
    child.process.send_signal(signal.SIGINT)
    assert child.reply() == (NOT_READY, [signal.SIGINT])
    answer.set()
    assert child.do("_ = context()") == 0


def test_guard_requests_a_lost_page_again_after_a_refusal(session, until):
    """The broker may refuse the first request, for example because it has no room for the link.

    A later request succeeds, so the kernel needs no restart.
    """
    session.page_path.unlink()
    child = session.child()
    assert child.do("_ = [C.cuInit(0) for _ in range(100)]") == [NOT_READY] * 100
    asked = len(session.broker.pages)
    assert asked < 50  # fewer requests than calls
    session.broker.page = lambda: put_back(session)
    until(lambda: child.do("_ = C.cuInit(0)") == 0)
    assert child.do("_ = context()") == 0


def test_guard_asks_for_a_lost_page_with_back_off(session, until):
    """A request takes seconds. Without back-off, each call in a loop would wait that long."""
    session.page_path.unlink()
    session.broker.stop()
    child = session.child()
    child.do("""
def timed():
    begun = time.monotonic()
    while time.monotonic() - begun < 10:
        t = time.monotonic()
        assert C.cuInit(0) == 802
        yield time.monotonic() - t
        time.sleep(0.05)
""")
    # The calls go on for 20 s. At most three of these calls send a request and wait. The guard
    # pauses for 1 s after the first request, and for 2 s after the second request.
    waits = child.do("_ = [s for _ in range(2) for s in timed() if s > 1]", timeout=60)
    assert 1 <= len(waits) <= 3
    # A forked child sends its own request at once, also during a pause of its parent.
    forked = child.do("""
r, w = os.pipe()
if not os.fork():
    t = time.monotonic()
    C.cuInit(0)
    os.write(w, repr(time.monotonic() - t).encode())
    os._exit(0)
_ = os.read(r, 100).decode()
""")
    assert float(forked) > 1
    # The guard finds the restored page at once, without the broker.
    put_back(session)
    until(lambda: child.do("_ = C.cuInit(0)") == 0)
    assert child.do("_ = context()") == 0


def test_process_without_descriptors_gets_its_slot_later(session, until):
    child = session.child()
    child.do("import resource; limits = resource.getrlimit(resource.RLIMIT_NOFILE)")
    # This call loads the driver.
    assert child.do("_ = C.cuGetErrorName(0, ctypes.byref(ctypes.c_void_p()))") == 0
    child.do("resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))")
    assert child.do("_ = C.cuInit(0)") == NOT_READY
    child.do("resource.setrlimit(resource.RLIMIT_NOFILE, limits)")
    until(lambda: child.do("_ = C.cuInit(0)") == 0)
    assert child.do("_ = context()") == 0


@pytest.mark.parametrize("way", ["link", "file"])
def test_page_of_another_session_is_not_used(session, way):
    """The broker may reuse a descriptor's number.

    An old link with this number then leads to the page of another session.
    """
    other = pages.Page.create(session.folder / "other", "s-2", os.getuid())
    other.set_devices(session.uuids)
    other.set_gate(pages.OPEN)
    session.page_path.unlink()
    if way == "link":
        session.page_path.symlink_to(f"/proc/{os.getpid()}/fd/{other._fd}")
    else:
        other.path.rename(session.page_path)
    session.broker.page = lambda: put_back(session)
    child = session.child()
    assert child.do("_ = context()") == 0
    assert len(session.broker.pages) == 1
    assert [slot.pid for slot in session.page.read().slots] == [child.pid]
    assert other.read().slots == ()
    other.close()


def test_process_keeps_the_page_open_for_the_next_broker(session):
    child = session.child()
    assert child.do("_ = context()") == 0
    session.page_path.unlink()
    names = child.do("_ = [os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') "
                     "if int(n) >= 200]")  # fmt: skip
    assert names == [f"{session.page_path} (deleted)"]


def test_deleted_page_still_serves_its_processes(session):
    child = session.child()
    assert child.do("_ = context()") == 0
    session.page_path.unlink()
    session.page.set_gate(pages.CLOSED)
    session.broker.answer = session.attach_on_request
    assert child.do("_ = C.cuCtxSynchronize()") == 0
    assert len(session.broker.messages) == 1


def test_guard_without_a_session_only_forwards_calls(session):
    child = session.child(GPUPOOL_PAGE=None)
    session.page.set_gate(pages.CLOSED)
    assert child.do("_ = context(), number(C.cuDeviceGetCount)") == (0, 2)
    assert child.do("p = alloc(600 << 20); _ = C.cuMemFree_v2(ctypes.c_uint64(p))") == 0
    assert session.slots() == ()


# ---------------------------------------------------------------------- devices


def seen_by(session, visible, **variables):
    """Run a process; return its devices as numbers in the session, cuInit's result, and stderr."""
    mine, home = [session.uuids[3], session.uuids[2]], session.uuids[:2]
    session.grant(mine)
    if visible is not None:
        visible = visible.format(*mine, h0=home[0], h1=home[1])
    code = (
        "import ctypes, uuid; C = ctypes.CDLL('libcuda.so.1'); n = ctypes.c_int()\n"
        "error = C.cuInit(0); C.cuDeviceGetCount(ctypes.byref(n))\n"
        "b = ctypes.create_string_buffer(16)\n"
        "for i in range(n.value):\n"
        "    C.cuDeviceGetUuid_v2(b, i); print('GPU-%s' % uuid.UUID(bytes=b.raw))\n"
        "C.cuInit(0); print(error)"
    )
    done = session.run(
        sys.executable, "-c", code, CUDA_VISIBLE_DEVICES=visible,
        GPUPOOL_VISIBLE=",".join(home), **variables,
    )  # fmt: skip
    *found, error = done.stdout.split()
    return [mine.index(uuid) for uuid in found], error, done.stderr


@pytest.mark.parametrize(("visible", "expected"), CHOICES)
def test_process_sees_the_devices_of_its_session(make_session, visible, expected):
    session = make_session("4x1GiB,context=32MiB")
    error = "0" if expected else "100"
    assert seen_by(session, visible) == (expected, error, "")


@pytest.mark.parametrize(("visible", "expected"), OTHERS)
def test_guard_leaves_out_visible_gpus_outside_the_session(make_session, visible, expected):
    session = make_session("4x1GiB,context=32MiB")
    found, error, said = seen_by(session, visible)
    assert (found, error) == (expected, "0")
    assert said.count("\n") == 1
    assert "names a GPU that this session does not have" in said


@pytest.mark.parametrize("order", ["FASTEST_FIRST", "PCI_BUS_ID", "rubbish"])
def test_cuda_device_order_does_not_change_the_slices_order(make_session, order):
    session = make_session("4x1GiB,context=32MiB")
    assert seen_by(session, "1,0", CUDA_DEVICE_ORDER=order) == ([1, 0], "0", "")


def test_cuinit_reads_a_variable_set_after_the_guard_is_loaded(session):
    """The guard reads the variable at cuInit. The program changes os.environ before cuInit."""
    child = session.child()
    assert child.do("_ = number(C.cuDriverGetVersion) > 0")
    code = "os.environ['CUDA_VISIBLE_DEVICES'] = '1'; _ = C.cuInit(0), number(C.cuDeviceGetCount)"
    assert child.do(code) == (0, 1)


def test_devices_are_fixed_at_the_first_cuinit(session):
    child = session.child(GPUPOOL_VISIBLE=session.uuids[0], CUDA_VISIBLE_DEVICES=session.uuids[0])
    session.grant(session.uuids[1:])
    assert child.do("_ = C.cuInit(0), number(C.cuDeviceGetCount)") == (0, 1)
    session.grant(session.uuids)
    assert child.do("_ = C.cuInit(0), number(C.cuDeviceGetCount)") == (0, 1)


def test_cuinit_without_a_lease_asks_once_for_the_home_devices(session):
    home, better = session.uuids[0], session.uuids[1:]
    session.page.set_devices([home])
    session.page.set_gate(pages.CLOSED)
    session.broker.home = lambda: session.page.set_devices(better)
    child = session.child(GPUPOOL_VISIBLE=home, CUDA_VISIBLE_DEVICES=home)
    assert child.do("_ = C.cuInit(0), C.cuInit(0), number(C.cuDeviceGetCount)") == (0, 0, 1)
    assert [m["pid"] for m in session.broker.homes] == [child.process.pid]
    assert session.slots()[0].flags & pages.SLOT_CUDA
    session.grant(better)
    assert child.do("_ = context()") == 0  # the process sees the slice
    assert session.broker.messages == []


def test_cuinit_with_a_lease_or_without_a_broker_sends_nothing(session):
    session.grant(session.uuids)
    assert session.child().do("_ = C.cuInit(0)") == 0
    assert session.broker.homes == []
    session.page.set_gate(pages.CLOSED)
    session.broker.stop()
    assert session.child().do("_ = C.cuInit(0)") == 0
    assert session.broker.homes == []


def test_context_is_never_made_on_a_gpu_without_a_grant(session, capfd):
    """The lease is on another GPU than at cuInit, and the broker refuses every move.

    The broker can move neither the process to the new GPU nor the lease to the old GPU.
    """
    home = session.uuids[0]
    refused = {"message": 'GPU "1" is paused – now.', "next_step": "Ask later."}
    session.broker.answer = lambda _: {"type": "error", "code": "not-moved", **refused}
    child = session.child(GPUPOOL_VISIBLE=home, CUDA_VISIBLE_DEVICES=home)
    session.grant(session.uuids[:1])
    assert child.do("_ = C.cuInit(0)") == 0
    session.grant(session.uuids[1:])
    assert child.do("_ = context()") == 46
    assert [m["step"] for m in session.broker.messages] == ["begin", "stay"]
    said = 'cannot use the GPU of its session: GPU "1" is paused ? now. Ask later.\n'
    assert capfd.readouterr().err == f"jupyter_gpupool: process {child.pid} {said}"
    assert session.slots()[0].used[0] == 0
    assert session.slots()[0].landing == pages.LANDING_NONE
    session.grant(session.uuids[:1])
    assert child.do("_ = context()") == 0


def test_process_with_a_context_moves_with_its_session(session):
    child = session.child()
    session.grant(session.uuids[:1])
    assert child.do("_ = context()") == 0
    session.grant(session.uuids[1:])
    assert child.do("x = ctypes.c_void_p(); _ = C.cuCtxCreate_v2(ctypes.byref(x), 0, 0)") == 0


def test_child_started_after_a_move_sees_the_current_slice(session):
    """Children of a C program see the new slice after a move.

    No agent updates the environment of a C program, so the guard updates it.
    """
    first, second = session.uuids
    child = session.child(GPUPOOL_VISIBLE="GPU-home", CUDA_VISIBLE_DEVICES="GPU-home")
    session.grant([first])
    assert child.do("_ = context()") == 0
    session.grant([second])
    found = child.do(
        "import subprocess; code = 'import ctypes, uuid; C = ctypes.CDLL(\"libcuda.so.1\");'"
        "'b = ctypes.create_string_buffer(16); C.cuInit(0); C.cuDeviceGetUuid_v2(b, 0);'"
        "'print(\"GPU-%s\" % uuid.UUID(bytes=b.raw))'\n"
        "libc = ctypes.CDLL(None); libc.getenv.restype = ctypes.c_char_p\n"
        "names = ('CUDA_VISIBLE_DEVICES', 'GPUPOOL_VISIBLE')\n"
        "env = {**os.environ, **{n: libc.getenv(n.encode()).decode() for n in names}}\n"
        "_ = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True"
        ").stdout.strip()"
    )
    assert found == second


def test_bytes_are_counted_on_the_devices_of_the_session(session):
    """The process sees only the second device: its device 0 is the session's device 1."""
    child = session.child(CUDA_VISIBLE_DEVICES="1")
    assert child.do("_ = context()") == 0
    assert child.do("_ = alloc(4 << 20)") > 1000
    (slot,) = session.slots()
    assert slot.used[:2] == (0, (32 + 4) << 20)


# ---------------------------------------------------------------------- races at the gate


@pytest.mark.parametrize("thread", [[], ["first"]], ids=["any thread", "first thread"])
def test_call_notices_a_gate_that_closes_at_any_moment(tmp_path, compiled, thread):
    """A call first counts itself and then checks the gate. So the broker can miss no call."""
    generator = build.generator
    (tmp_path / "entries_gen.h").write_text(generator.header(generator.read(build.ENTRIES)))
    gate = str(build.SOURCES / "gate.c")
    program = compiled("gate_alone", f"-I{tmp_path}", f"-I{build.SOURCES}", gate)
    done = subprocess.run(
        [program, *thread], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "right\n"
    assert done.returncode == 0


@pytest.mark.parametrize("thread", [[], ["first"]], ids=["any thread", "first thread"])
def test_every_call_through_a_closing_gate_is_counted(tmp_path, compiled, thread):
    """A call counts itself before it reads the gate.

    With a plain store, the processor could read the gate first.
    """
    generator = build.generator
    (tmp_path / "entries_gen.h").write_text(generator.header(generator.read(build.ENTRIES)))
    gate = str(build.SOURCES / "gate.c")
    program = compiled(
        "gate_crossing", f"-I{tmp_path}", f"-I{build.SOURCES}", "-O2", "-pthread", gate
    )
    done = subprocess.run(
        [program, *thread], capture_output=True, text=True, timeout=60, check=False
    )
    print(done.stderr)
    assert done.stdout == "right\n"
    assert done.returncode == 0


#: Which thread or process calls CUDA first.
FIRST = {
    "the other thread": "context()",
    "this thread": "call('context')",
    "a thread that has ended": """
ending = threading.Thread(target=context); ending.start(); ending.join()
context()
""",
    "the other thread before a fork": """
assert number(C.cuDriverGetVersion) > 0
if os.fork():
    os.wait()
    os._exit(0)
""",
}


@pytest.mark.parametrize("first", FIRST)
def test_call_remains_counted_when_another_threads_call_ends(make_session, until, first):
    """One thread counts its calls in its own word, and sets the word to zero when a call ends.

    No other thread uses this word. Otherwise the zero would remove the call of another thread.
    """
    # At this bandwidth, the copy takes longer than the test.
    session = make_session("1x1GiB,context=32MiB,bandwidth=1MB/s")
    child = session.child()
    child.do("""
import queue
asked, answers, thread = queue.Queue(), queue.Queue(), None
def work():
    while asked.get() != "copy":
        answers.put(context())
    p, data = alloc(64 << 20), ctypes.create_string_buffer(64 << 20)
    answers.put(p)
    C.cuMemcpyHtoD_v2(ctypes.c_uint64(p), data, ctypes.c_size_t(64 << 20))
def call(what):
    global thread
    if thread is None:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
    asked.put(what)
    return answers.get()
""")
    child.do(FIRST[first])
    assert len(session.slots()) == 1
    assert child.do("_ = call('context')") == 0
    assert child.do("_ = call('copy')") > 2
    until(lambda: session.page.read().inflight == 1)
    assert child.do("_ = {context() for _ in range(100)}") == {0}
    assert session.page.read().inflight == 1
    assert child.do("_ = thread.is_alive()") is True


def test_no_call_reaches_the_driver_while_the_gate_is_closed(session, until):
    """When the gate is closed and the count is zero, no call gets inside until the gate opens."""
    child = session.child()
    assert child.do("_ = context()") == 0
    child.do("""
stop, calls = False, [0] * 4
def work(i):
    c = ctypes.c_void_p()
    C.cuDevicePrimaryCtxRetain(ctypes.byref(c), 0); C.cuCtxSetCurrent(c)
    sync = C.cuCtxSynchronize
    while not stop:
        assert sync() == 0
        calls[i] += 1
threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
for t in threads: t.start()
""")
    for _ in range(20):
        session.page.set_gate(pages.CLOSED)
        until(lambda: session.page.read().inflight == 0)
        until(lambda: session.page.read().waiting == 4)
        counted = child.do("_ = calls[:]")
        assert session.page.read().inflight == 0
        assert child.do("_ = calls[:]") == counted
        session.page.set_gate(pages.UNUSED)
        until(lambda: session.page.read().waiting == 0)
        until(lambda counted=counted: min(map(int.__sub__, child.do("_ = calls[:]"), counted)) > 0)
    child.do("stop = True\nfor t in threads: t.join()")
    reading = session.page.read()
    assert (reading.inflight, reading.waiting) == (0, 0)
