# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Frees, destroys and queries of a suspended session: the guard answers without a lease."""

import threading
import time

import pytest
from suspender import MIB, Suspender

from jupyter_gpupool.guard import page as pages

CONTEXT = 32 * MIB
DEINITIALIZED, NOT_DONE, NOT_READY = 4, 600, 802

#: Statements of a child. make() makes one object of each kind, and returns the calls that destroy
#: these objects, with their arguments.
MAKE = r"""
import gc
V, U, Z = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t

def good(error):
    assert error == 0, error

def handle(call, *args):
    made = V()
    good(call(ctypes.byref(made), *args))
    return made

def number(call, *args):
    made = U()
    good(call(ctypes.byref(made), *args))
    return made

class Prop(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handles", ctypes.c_int), ("where", ctypes.c_int),
                ("device", ctypes.c_int), ("rest", ctypes.c_byte * 16)]

class PoolProps(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handles", ctypes.c_int), ("where", ctypes.c_int),
                ("device", ctypes.c_int), ("rest", ctypes.c_byte * 72)]

class Array(ctypes.Structure):
    _fields_ = [("width", Z), ("height", Z), ("format", ctypes.c_int), ("channels", ctypes.c_uint)]

def make():
    stream, event = handle(C.cuStreamCreate, 1), handle(C.cuEventCreate, 0)
    graph = handle(C.cuGraphCreate, 0)
    run = handle(C.cuGraphInstantiateWithFlags, graph, U(0))
    good(C.cuEventRecord(event, stream))
    plain = number(C.cuMemAlloc_v2, Z(8 << 20))
    ordered = number(C.cuMemAllocAsync, Z(8 << 20), stream)
    pool = handle(C.cuMemPoolCreate, ctypes.byref(PoolProps(1, 0, 1, 0)))
    block = number(C.cuMemCreate, Z(2 << 20), ctypes.byref(Prop(1, 0, 1, 0)), U(0))
    at = number(C.cuMemAddressReserve, Z(2 << 20), Z(0), U(0), U(0))
    good(C.cuMemMap(at, Z(2 << 20), Z(0), block, U(0)))
    array = handle(C.cuArrayCreate_v2, ctypes.byref(Array(1024, 1024, 0x20, 1)))
    module, host = handle(C.cuModuleLoadData, PTX), handle(C.cuMemAllocHost_v2, Z(4096))
    return [
        (C.cuMemFreeAsync, ordered, stream), (C.cuEventDestroy_v2, event),
        (C.cuStreamDestroy_v2, stream), (C.cuGraphExecDestroy, run), (C.cuGraphDestroy, graph),
        (C.cuMemFree_v2, plain), (C.cuMemPoolDestroy, pool), (C.cuMemUnmap, at, Z(2 << 20)),
        (C.cuMemRelease, block), (C.cuMemAddressFree, at, Z(2 << 20)), (C.cuArrayDestroy, array),
        (C.cuModuleUnload, module), (C.cuMemFreeHost, host), (C.cuDeviceGraphMemTrim, 0),
    ]
"""

#: A child's queries until the work is done. The guard answers "not ready" only if the thread has
#: waited for a second. `early` counts earlier answers.
ASK = """
begun, early = time.monotonic(), 0
while (error := {}.cuStreamQuery(None)) == 600:
    early += time.monotonic() - begun < 1
_ = error, early
"""


@pytest.fixture
def child(session):
    """A child with a context."""
    from tests.emulated import PTX

    made = session.child()
    made.do(f"PTX = {PTX.encode()!r}")
    made.do(MAKE)
    assert made.do("_ = context()") == 0
    return made


@pytest.fixture
def suspender(session):
    made = Suspender(session, seed=1, open_gate=False)
    session.broker.answer = lambda message: None  # no request gets a lease
    return made


def test_frees_return_at_once_and_are_made_after_the_resume(session, child, suspender, until):
    child.do("calls = make()")
    taken = session.page.read().used[0]
    assert taken > CONTEXT + 20 * MIB
    suspender.suspend([child.pid], until)
    assert child.do("_ = [call(*rest) for call, *rest in calls]") == [0] * 14
    # The guard still counts the freed bytes: they are a part of the suspended state, and the resume
    # needs room for them.
    assert session.page.read().used[0] == taken
    suspender.resume([child.pid], until, used=False)
    assert suspender.used() > CONTEXT + 20 * MIB
    assert child.do("_ = C.cuCtxSynchronize()") == 0
    assert session.page.read().used[0] == CONTEXT
    assert suspender.used() == CONTEXT
    assert session.broker.messages == []
    # The guard has made each call, so another call to destroy the same object is an error.
    assert child.do("_ = [call(*rest) != 0 for call, *rest in calls[1:3]]") == [True] * 2
    assert session.page.read().used[0] == CONTEXT


def test_noted_calls_are_made_before_the_next_gated_call(session, child, suspender, until):
    child.do("p = alloc(8 << 20)")
    suspender.suspend([child.pid], until)
    assert child.do("_ = C.cuMemFree_v2(U(p))") == 0
    suspender.resume([child.pid], until, used=False)
    assert child.do("n = Z(); _ = C.cuCtxGetLimit(ctypes.byref(n), 1)") == 0
    assert session.page.read().used[0] == CONTEXT
    assert suspender.used() == CONTEXT
    # No noted call is left to make. So the next call only checks the gate.
    session.page.set_gate(pages.OPEN)
    assert child.do("_ = C.cuCtxGetLimit(ctypes.byref(n), 1)") == 0


def test_buffers_keep_their_bytes_when_freed_memory_is_reused(session, child, suspender, until):
    """New buffers reuse the memory freed during the suspend. The other buffers keep their bytes."""
    child.do("""
data = os.urandom(1 << 20)
def buffer():
    p = U(alloc(1 << 20))
    good(C.cuMemcpyHtoD_v2(p, data, Z(1 << 20)))
    return p
def is_right(p):
    back = ctypes.create_string_buffer(1 << 20)
    good(C.cuMemcpyDtoH_v2(back, p, Z(1 << 20)))
    return back.raw == data
mine = [buffer() for _ in range(16)]
""")
    for _ in range(3):
        suspender.suspend([child.pid], until)
        assert child.do("_ = [C.cuMemFree_v2(p) for p in mine[::2]]") == [0] * 8
        suspender.resume([child.pid], until, used=False)
        child.do("mine = mine[1::2] + [buffer() for _ in range(8)]")
        assert child.do("_ = len({p.value for p in mine}), all(map(is_right, mine))") == (16, True)
        assert session.page.read().used[0] == CONTEXT + 32 * MIB


def test_queries_about_finished_work_are_answered(session, child, suspender, until):
    child.do("calls = make(); s, e = calls[2][1], calls[1][1]; never = handle(C.cuEventCreate, 0)")
    suspender.suspend([child.pid], until)
    assert child.do("""
_ = (C.cuStreamQuery(s), C.cuStreamQuery(None), C.cuStreamQuery_ptsz(None), C.cuEventQuery(e),
     C.cuEventQuery(never))
""") == (0,) * 5  # fmt: skip
    assert session.broker.messages == []
    # A synchronise waits for the lease, unlike a query: it reports errors of earlier work, and
    # programs use it to measure time.
    child.send("_ = C.cuStreamSynchronize(s)")
    session.broker.asked(1)
    assert session.broker.messages[0]["type"] == "attach"
    suspender.resume([child.pid], until)
    assert child.reply() == 0


def test_event_can_be_recorded_during_a_suspend(session, child, suspender, until):
    """A caching allocator records an event when it frees memory that several streams have used."""
    child.do("calls = make(); s, e = calls[2][1], calls[1][1]; new = handle(C.cuEventCreate, 0)")
    suspender.suspend([child.pid], until)
    calls = "C.cuEventRecord(new, s), C.cuEventQuery(new), C.cuEventRecordWithFlags(e, s, 0)"
    assert child.do(f"_ = {calls}") == (0,) * 3
    assert session.broker.messages == []
    suspender.resume([child.pid], until, used=False)
    # The guard has made the noted calls, so the driver has recorded both events. Without a record,
    # cuEventElapsedTime would return an error.
    child.do("ms = ctypes.c_float(-1)")
    assert child.do("_ = C.cuEventSynchronize(e)") == 0
    assert child.do("_ = C.cuEventElapsedTime(ctypes.byref(ms), new, e), ms.value >= 0") == (
        0,
        True,
    )


def test_noted_event_is_not_ready_before_earlier_work_ends(session, child):
    """The gate is closed, but the process is not suspended. Its work on the device continues."""
    child.do("""
calls = make(); s, module = calls[2][1], calls[11][1]
spin, new = handle(C.cuModuleGetFunction, module, b"emucuda_spin_ns"), handle(C.cuEventCreate, 2)
time_ns = U(3_000_000_000)
args = (V * 1)(ctypes.addressof(time_ns))
good(C.cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, s, args, None))
""")
    session.page.set_gate(pages.CLOSED)
    assert child.do("_ = C.cuEventRecord(new, s)") == 0
    session.page.set_gate(pages.UNUSED)
    assert child.do("_ = C.cuEventQuery(new)") == 600  # not ready
    assert child.do("_ = C.cuEventSynchronize(new), C.cuEventQuery(new)") == (0, 0)
    assert session.broker.messages == []


def test_query_waits_for_the_end_of_a_suspend(session, child, suspender):
    """A query waits until the suspend is complete or has failed.

    After a complete suspend, the driver has finished all work, so the guard knows the answer.
    """
    session.page.set_gate(pages.CLOSED)
    child.send(ASK.format("C"))
    assert not child.answers(0.2)
    session.page.set_grant([], 1 << 30, 1)
    assert child.reply() == (0, 0)
    session.grant(session.uuids)
    session.page.set_gate(pages.CLOSED)
    child.send(ASK.format("C"))
    assert not child.answers(0.2)
    session.page.set_gate(pages.UNUSED)  # the suspend has failed
    assert child.reply() == (0, 0)
    assert session.broker.messages == []


def test_query_during_a_long_suspend_answers_not_ready(session, child):
    """The caller keeps the interpreter's lock. Other threads run only after the query's return."""
    child.do("""
ticks, stop = 0, False
def tick():
    global ticks
    while not stop:
        time.sleep(0.001)
        ticks += 1
thread = threading.Thread(target=tick); thread.start()
""")
    session.page.set_gate(pages.CLOSED)
    assert child.do("_ = P.cuStreamQuery(None)") == NOT_DONE
    answers = "{P.cuStreamQuery(None) for _ in range(200)}"
    found = child.do(f"before = ticks; _ = {answers}, ticks - before")
    assert found[0] == {NOT_DONE}
    assert found[1] > 5
    session.page.set_grant([], 1 << 30, 1)
    assert child.do("_ = P.cuStreamQuery(None)") == 0
    session.grant(session.uuids)
    assert child.do("_ = P.cuStreamQuery(None)") == 0
    # In the next suspend the query waits again.
    session.page.set_gate(pages.CLOSED)
    child.send(ASK.format("P"))
    assert not child.answers(0.2)
    session.page.set_grant([], 1 << 30, 2)
    assert child.reply() == (0, 0)
    child.do("stop = True; thread.join()")
    assert session.broker.messages == []


@pytest.mark.parametrize("call", ["cuMemFree_v2(p)", "cuEventDestroy_v2(e)", "cuEventQuery(e)"])
def test_destructor_that_holds_locks_continues(session, child, suspender, until, call):
    """A framework holds its mutex and the interpreter's lock when it frees memory.

    Another thread needs both locks, so the call must not wait.
    """
    child.do("p = U(alloc(4 << 20)); e = handle(C.cuEventCreate, 0)")
    suspender.suspend([child.pid], until)
    assert child.do(f"""
sys.setswitchinterval(1000)  # no thread switch between two calls
libc, mutex, turn, done = ctypes.PyDLL(None), ctypes.create_string_buffer(64), threading.Event(), []
def other():
    turn.wait()
    libc.pthread_mutex_lock(mutex)
    done.append(2)
    libc.pthread_mutex_unlock(mutex)
thread = threading.Thread(target=other, daemon=True)
thread.start()
libc.pthread_mutex_lock(mutex)
turn.set()
error = P.{call}
done.append(1)
libc.pthread_mutex_unlock(mutex)
thread.join()
_ = error, done
""") == (0, [1, 2])  # fmt: skip
    assert session.broker.messages == []


def test_noted_calls_are_made_before_another_threads_next_call(session, child, suspender, until):
    """Before the next call of any thread, the guard makes all noted calls.

    It makes each noted call in the context that was current when the program made the call.
    """
    child.do("""
second = handle(C.cuCtxCreate_v2, 0, 0)
p = alloc(8 << 20)
good(C.cuCtxPopCurrent_v2(ctypes.byref(V())))
""")
    assert session.page.read().used[0] == CONTEXT + 8 * MIB
    suspender.suspend([child.pid], until)
    child.do("""
def free():
    results.append((C.cuCtxSetCurrent(second), C.cuMemFree_v2(U(p)), C.cuCtxDestroy_v2(second)))
results = []
t = threading.Thread(target=free); t.start(); t.join()
""")
    assert child.do("_ = results") == [(0, 0, 0)]
    suspender.resume([child.pid], until, used=False)
    assert child.do("q = alloc(2 << 20); _ = q > 1 << 20") is True
    assert session.page.read().used[0] == CONTEXT + 2 * MIB
    assert suspender.used() == CONTEXT + 2 * MIB
    assert child.do("_ = C.cuCtxGetDevice(ctypes.byref(ctypes.c_int())), C.cuMemFree_v2(U(q))") == (
        0, 0,
    )  # fmt: skip
    assert session.broker.messages == []


@pytest.mark.parametrize(
    "end",
    [
        "cuCtxDestroy_v2(second)",
        "cuDevicePrimaryCtxReset_v2(0)",
        "cuDevicePrimaryCtxRelease_v2(0)",
    ],
)
def test_end_of_a_context_waits_while_host_memory_is_registered(
    session, child, suspender, until, end
):
    """The driver must unpin the memory before the call returns. The program may then unmap it."""
    child.do("""
import mmap
second = handle(C.cuCtxCreate_v2, 0, 0)
buffer = mmap.mmap(-1, 1 << 20)
at = V(ctypes.addressof(ctypes.c_char.from_buffer(buffer)))
""")
    assert child.do("_ = C.cuMemHostRegister_v2(at, Z(1 << 20), 0)") == 0
    suspender.suspend([child.pid], until)
    child.send(f"_ = C.{end}")
    session.broker.asked(1)  # like cuMemHostUnregister, the call asks for the lease
    assert [message["type"] for message in session.broker.messages] == ["attach"]
    suspender.resume([child.pid], until)
    assert child.reply() == 0


def test_end_of_a_context_is_noted_if_no_memory_is_registered(session, child, suspender, until):
    """Memory counts as registered until the program unregisters it or its context ends."""
    assert child.do("""
import mmap
buffer, gone = mmap.mmap(-1, 1 << 20), mmap.mmap(-1, 1 << 20)
at, there = (V(ctypes.addressof(ctypes.c_char.from_buffer(m))) for m in (buffer, gone))
second, third = handle(C.cuCtxCreate_v2, 0, 0), handle(C.cuCtxCreate_v2, 0, 0)
good(C.cuMemHostRegister_v2(there, Z(1 << 20), 0))
good(C.cuCtxDestroy_v2(third))
good(C.cuCtxSetCurrent(second))
good(C.cuMemHostRegister_v2(at, Z(1 << 20), 0))
again = C.cuMemHostRegister_v2(at, Z(1 << 20), 0)
good(C.cuMemHostUnregister(at))
twice = C.cuMemHostUnregister(at)
_ = again, twice
""") == (712, 713)
    suspender.suspend([child.pid], until)
    assert child.do("_ = C.cuCtxDestroy_v2(second)") == 0
    assert session.broker.messages == []
    suspender.resume([child.pid], until, used=False)
    assert child.do("good(C.cuDevicePrimaryCtxRetain(ctypes.byref(V()), 0)); _ = 0") == 0


def test_current_context_is_known_while_suspended(session, child, suspender, until):
    """A destructor makes its context current and then restores the previous context."""
    child.do("""
first, device, seen = V(), ctypes.c_int(), V()
good(C.cuCtxGetCurrent(ctypes.byref(first)))
second = handle(C.cuCtxCreate_v2, 0, 1)
p = alloc(1 << 20)
def current():
    good(C.cuCtxGetCurrent(ctypes.byref(seen))); good(C.cuCtxGetDevice(ctypes.byref(device)))
    return ["first", "second"][seen.value == second.value], device.value
good(C.cuCtxPopCurrent_v2(ctypes.byref(seen))); q = alloc(1 << 20)
""")
    suspender.suspend([child.pid], until)
    assert child.do("_ = current()") == ("first", 0)
    assert child.do("""
good(C.cuCtxPushCurrent_v2(second)); a = current()
good(C.cuMemFree_v2(U(p))); good(C.cuCtxPopCurrent_v2(ctypes.byref(seen)))
_ = a, current()
""") == (("second", 1), ("first", 0))
    assert child.do("good(C.cuCtxSetCurrent(second)); _ = current()") == ("second", 1)
    assert session.broker.messages == []
    suspender.resume([child.pid], until, used=False)
    # After the resume the driver has the same current context.
    child.do("r = alloc(1 << 20)")
    assert child.do("_ = current()") == ("second", 1)
    assert session.page.read().used == (CONTEXT + 2 * MIB, CONTEXT + 2 * MIB)
    child.do("good(C.cuCtxSetCurrent(first))")
    assert child.do("_ = current()") == ("first", 0)


def test_primary_context_is_known_while_suspended(session, child, suspender, until):
    """PyTorch reads the primary context's state in destructors, and after an interrupted wait.

    If this query waited too, the user would have to interrupt again.
    """
    child.do("""
flags, active = ctypes.c_uint(), ctypes.c_int()
def state(device):
    good(C.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)))
    return flags.value, active.value
good(C.cuDevicePrimaryCtxSetFlags_v2(0, 4)); good(C.cuDevicePrimaryCtxSetFlags_v2(1, 2))
""")
    before = child.do("_ = state(0), state(1)")
    assert before == ((4, 1), (2, 0))
    suspender.suspend([child.pid], until)
    assert child.do("_ = state(0), state(1)") == before
    assert session.broker.messages == []
    suspender.resume([child.pid], until, used=False)
    assert child.do("""
good(C.cuDevicePrimaryCtxRetain(ctypes.byref(V()), 1)); good(C.cuDevicePrimaryCtxSetFlags_v2(1, 1))
_ = state(1)
""") == (1, 1)
    suspender.suspend([child.pid], until)
    assert child.do("_ = state(1)") == (1, 1)
    # The guard notes the release, and does not know whether it ends the context. So the next query
    # of the state waits for the driver.
    assert child.do("_ = C.cuDevicePrimaryCtxRelease_v2(1)") == 0
    child.send("_ = state(1)")
    until(lambda: session.broker.messages)
    suspender.resume([child.pid], until, used=False)
    assert child.reply() == (1, 0)


def test_invalid_free_while_suspended_keeps_the_accounts_right(session, child, suspender, until):
    child.do("p = alloc(8 << 20)")
    suspender.suspend([child.pid], until)
    assert child.do("""
_ = [C.cuMemFree_v2(U(p)), C.cuMemFree_v2(U(p)), C.cuMemFree_v2(U(12345)),
     C.cuMemRelease(U(99)), C.cuMemUnmap(U(4096), Z(4096))]
""") == [0] * 5  # fmt: skip
    suspender.resume([child.pid], until, used=False)
    assert child.do("_ = C.cuCtxSynchronize()") == 0
    assert session.page.read().used[0] == CONTEXT
    assert suspender.used() == CONTEXT


def test_large_number_of_frees_is_noted(session, child, suspender, until):
    count = 50_000
    child.do("events = [handle(C.cuEventCreate, 2) for _ in range(2000)]; p = alloc(8 << 20)")
    suspender.suspend([child.pid], until)
    assert child.do(f"""
wrong = sum(C.cuEventDestroy_v2(e) for e in events) + C.cuMemFree_v2(U(p))
for _ in range({count}):
    wrong += C.cuMemFree_v2(U(4096))
_ = wrong
""", 60) == 0  # fmt: skip
    suspender.resume([child.pid], until, used=False)
    assert child.do("_ = C.cuCtxSynchronize()", 60) == 0
    assert session.page.read().used[0] == CONTEXT
    assert child.do("_ = C.cuEventQuery(events[0])") != 0  # the event was destroyed


def test_forked_child_has_no_noted_calls(session, child, suspender, until):
    child.do("p = alloc(8 << 20)")
    suspender.suspend([child.pid], until)
    assert (
        child.do("""
good(C.cuMemFree_v2(U(p)))
pid = os.fork()
if not pid:
    os._exit(C.cuCtxSynchronize() == 3 and C.cuMemFree_v2(U(p)) == 3)
_ = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
""")
        == 1
    )
    suspender.resume([child.pid], until, used=False)
    assert child.do("_ = C.cuCtxSynchronize()") == 0
    assert session.page.read().used[0] == CONTEXT


def test_interpreter_can_end_while_its_process_is_suspended(session, child, suspender, until):
    child.do("""
class Tensor:
    def __init__(self):
        self.at, self.free, self.query = U(alloc(1 << 20)), C.cuMemFree_v2, C.cuStreamQuery
        self.say = os.write
    def __del__(self):
        self.say(1, b"%d %d\\n" % (self.free(self.at), self.query(None)))
import builtins
builtins.tensor, tensors = Tensor(), [Tensor(), Tensor()]
""")
    suspender.suspend([child.pid], until)
    child.process.stdin.close()
    assert [child.line() for _ in range(3)] == ["0 0"] * 3
    assert child.process.wait(30) == 0
    assert session.broker.messages == []
    assert [slot for slot in session.slots() if slot.pid == child.pid] == []


def test_free_during_a_pause_reaches_the_driver_at_once(session, child):
    """A pause suspends no process, so a free goes to the driver.

    The free does not disturb the neighbour that uses the device.
    """
    child.do("p = alloc(8 << 20); e = handle(C.cuEventCreate, 0)")
    session.page.set_gate(pages.PAUSED, pause_until=time.monotonic_ns() + 600_000_000_000)
    assert (
        child.do("_ = C.cuMemFree_v2(U(p)), C.cuEventQuery(e), C.cuEventDestroy_v2(e)") == (0,) * 3
    )
    assert session.page.read().used[0] == CONTEXT
    assert session.page.gate() == pages.PAUSED
    assert session.broker.messages == []


def test_driver_answers_calls_without_a_context(session):
    session.page.set_gate(pages.CLOSED)
    session.page.set_grant([], 1 << 30, 0)
    child = session.child()
    assert child.do("_ = C.cuInit(0)") == 0
    found = child.do("""
_ = [C.cuMemFree_v2(ctypes.c_uint64(4096)), C.cuEventQuery(None), C.cuStreamDestroy_v2(None),
     C.cuModuleUnload(None)]
""")
    assert all(error in (1, 201, 400) for error in found), found
    assert session.broker.messages == []


def test_free_during_a_refused_suspend_is_made_afterwards(session, child):
    child.do("p = [U(alloc(2 << 20)) for _ in range(4)]")
    session.page.set_gate(pages.CLOSED)
    assert child.do("_ = [C.cuMemFree_v2(a) for a in p[:3]]") == [0] * 3
    assert session.page.read().used[0] == CONTEXT + 8 * MIB
    session.page.set_gate(pages.UNUSED)
    # Before the next free, the guard makes the noted frees.
    assert child.do("_ = C.cuMemFree_v2(p[3])") == 0
    assert session.page.read().used[0] == CONTEXT
    assert session.broker.messages == []


def test_threads_wait_until_all_noted_calls_are_made(session, child, suspender, until):
    """One thread makes the noted calls. The other threads wait until the last of them is made."""
    child.do("p = [U(alloc(512 << 10)) for _ in range(600)]")
    taken = session.page.read().used[0]
    suspender.suspend([child.pid], until)
    assert child.do("_ = sum(C.cuMemFree_v2(a) for a in p)") == 0
    assert session.page.read().used[0] == taken
    answer = threading.Event()
    session.broker.answer = lambda message: answer.wait(60) and {"type": "ok"}
    child.do("""
results = []
def work():
    results.append((C.cuCtxSetCurrent(current), C.cuStreamSynchronize(None), len(slot_used())))
current = V(); good(C.cuCtxGetCurrent(ctypes.byref(current)))
def slot_used():
    free, total = Z(), Z()
    good(C.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
    seen.append(total.value - free.value)
    return seen
seen = []
threads = [threading.Thread(target=work) for _ in range(6)]
for t in threads: t.start()
""")
    session.broker.asked(6)
    suspender.resume([child.pid], until, used=False)
    answer.set()
    child.do("for t in threads: t.join()")
    assert child.do("_ = sorted({r[:2] for r in results})") == [(0, 0)]
    assert session.page.read().used[0] == CONTEXT
    reading = session.page.read()
    assert (reading.inflight, reading.waiting) == (0, 0)
