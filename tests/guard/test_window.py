# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The launch window: while the slice is contended, a process has little unfinished work queued."""

import time

import pytest

from jupyter_gpupool.guard import page as pages
from tests.emulated import PTX

#: SLOW_MS: how long a slow GPU kernel runs, in milliseconds. MANY: how many slow GPU kernels a test
#: launches. Together they run for two seconds.
SLOW_MS, MANY = 5, 400

#: The most seconds of work that a contended process may have queued. Usually it has about 20 ms.
SHORT = 0.3

LAUNCH = """
Z, U = ctypes.c_size_t, ctypes.c_uint64

def handle(call, *args):
    found = ctypes.c_void_p()
    error = call(ctypes.byref(found), *args)
    assert error == 0, error
    return found

module = handle(C.cuModuleLoadData, PTX)
spin = handle(C.cuModuleGetFunction, module, b"emucuda_spin_ns")
stream = handle(C.cuStreamCreate, 1)

kept = []

def params(ms):
    value = U(int(ms * 1e6))
    kept.append(value)
    return (ctypes.c_void_p * 1)(ctypes.addressof(value))

def launches(count, ms, on=None):
    given = params(ms)
    for _ in range(count):
        error = C.cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, on or stream, given, None)
        assert error == 0, error

def left():
    "Seconds until what was submitted is done."
    begun = time.monotonic()
    assert C.cuCtxSynchronize() == 0
    return time.monotonic() - begun
"""


@pytest.fixture
def child(session):
    made = session.child()
    made.do(f"PTX = {PTX.encode()!r}")
    assert made.do("_ = context()") == 0
    made.do(LAUNCH)
    return made


def test_uncontended_program_submits_without_a_limit(child):
    assert child.do(f"launches({MANY}, {SLOW_MS}); _ = left()") > MANY * SLOW_MS / 1000 / 2


def test_contended_program_has_little_work_in_flight(session, child):
    session.page.set_contended(True)
    assert child.do(f"launches({MANY}, {SLOW_MS}); _ = left()") < SHORT
    session.page.set_contended(False)
    assert child.do(f"launches({MANY}, {SLOW_MS}); _ = left()") > MANY * SLOW_MS / 1000 / 2


def test_window_grows_while_kernels_are_short(session, child):
    """Each short wait doubles the window.

    After a few short waits, hundreds of launches need no wait.
    """
    session.page.set_contended(True)
    child.do("launches(2100, 0.001); assert C.cuCtxSynchronize() == 0")
    assert child.do("launches(300, 5); _ = left()") > 0.5
    # The next wait is long, so it makes the window small again.
    assert child.do(f"launches(2100, 1); launches(100, {SLOW_MS}); _ = left()") < SHORT


def test_window_limits_each_stream(session, child):
    session.page.set_contended(True)
    child.do("streams = [handle(C.cuStreamCreate, 1) for _ in range(3)]")
    seconds = child.do("""
for _ in range(100):
    for one in streams:
        launches(1, 5, one)
_ = left()
""")
    assert seconds < SHORT


@pytest.mark.parametrize("launch", ["graph", "per-thread", "extended", "cooperative"])
def test_window_limits_every_way_to_launch(session, child, launch):
    child.do("""
class Config(ctypes.Structure):
    _fields_ = [("sizes", ctypes.c_uint * 7), ("stream", ctypes.c_void_p),
                ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint)]

given = params(5)
config = Config((1, 1, 1, 1, 1, 1, 0), stream, None, 0)
assert C.cuStreamBeginCapture_v2(stream, 0) == 0
launches(1, 5)
graph = ctypes.c_void_p()
assert C.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0
run = handle(C.cuGraphInstantiateWithFlags, graph, U(0))
six = 1, 1, 1, 1, 1, 1, 0
ways = {
    "graph": lambda: C.cuGraphLaunch(run, stream),
    "per-thread": lambda: C.cuLaunchKernel_ptsz(spin, *six, None, given, None),
    "extended": lambda: C.cuLaunchKernelEx(ctypes.byref(config), spin, given, None),
    "cooperative": lambda: C.cuLaunchCooperativeKernel(spin, *six, stream, given),
}
""")
    code = f"_ = [ways[{launch!r}]() for _ in range(200)] == [0] * 200, left()"
    assert child.do(code)[0]
    session.page.set_contended(True)
    good, seconds = child.do(code)
    assert good
    assert seconds < SHORT


def test_launch_does_not_wait_while_a_graph_is_recorded(session, child):
    """A launch does not wait while any stream records a graph.

    A synchronise would end the recording with an error (nvshare#22).
    """
    session.page.set_contended(True)
    child.do("""
assert C.cuStreamBeginCapture_v2(stream, 0) == 0
launches(100, 1)
graph = ctypes.c_void_p()
_ = C.cuStreamEndCapture(stream, ctypes.byref(graph))
assert _ == 0, _
run = handle(C.cuGraphInstantiateWithFlags, graph, U(0))
assert C.cuGraphLaunch(run, stream) == 0
""")
    assert 0.05 < child.do("_ = left()") < 10


def test_launches_do_not_disturb_a_recording_in_another_thread(session, child):
    session.page.set_contended(True)
    child.do("""
problems, go_on = [], True
c = ctypes.c_void_p()
C.cuCtxGetCurrent(ctypes.byref(c))

def record():
    C.cuCtxSetCurrent(c)
    mine, given = handle(C.cuStreamCreate, 1), params(0.01)
    for _ in range(200):
        errors = [C.cuStreamBeginCapture_v2(mine, 0)]
        errors.append(C.cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, mine, given, None))
        graph = ctypes.c_void_p()
        errors.append(C.cuStreamEndCapture(mine, ctypes.byref(graph)))
        if any(errors):
            problems.append(errors)

t = threading.Thread(target=record)
t.start()
while t.is_alive():
    launches(20, 0.1)
t.join()
""")
    assert child.do("_ = problems") == []


def test_other_threads_of_the_interpreter_run_during_a_wait(session, child):
    """During a wait, the guard releases the caller's interpreter lock.

    A host function in the stream may need this lock.
    """
    session.page.set_contended(True)
    ticks = child.do("""
ticks, stop = 0, False
def tick():
    global ticks
    while not stop:
        time.sleep(0.001)
        ticks += 1
given = params(1000)
t = threading.Thread(target=tick); t.start()
errors = [P.cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, stream, given, None) for _ in range(3)]
_ = set(errors), ticks
stop = True
""")
    assert ticks[0] == {0}
    # If the launches kept the lock, the thread could tick only before each of them and after the
    # last. The wait takes seconds.
    assert ticks[1] > 10


def test_launch_does_not_wait_for_work_on_another_stream(session, child):
    """The work on the other stream may wait for work that this thread submits now."""
    session.page.set_contended(True)
    child.do("other = handle(C.cuStreamCreate, 1); launches(1, 4000, other)")
    begun = time.monotonic()
    child.do("launches(50, 0.1)")
    assert time.monotonic() - begun < 3
    assert child.do("_ = left()") > 0


def test_launch_stops_counting_as_inside_when_the_gate_closes(session, child, until):
    """When the gate closes, a waiting launch soon stops counting as a call inside.

    So the launch does not delay the suspend.
    """
    session.page.set_contended(True)
    child.do("launches(1, 1)")
    child.send("launches(4, 2000); _ = left()")
    until(lambda: session.page.read().inflight)
    session.page.set_gate(pages.CLOSED)
    begun = time.monotonic()
    until(lambda: not session.page.read().inflight)
    assert time.monotonic() - begun < 1.5
    session.broker.asked(1)
    session.page.set_gate(pages.UNUSED)
    assert child.reply() >= 0


def test_forked_child_of_a_contended_process_can_call_cuinit(session, child):
    session.page.set_contended(True)
    child.do(f"launches({MANY}, 1)")
    assert (
        child.do("""
pid = os.fork()
if not pid:
    os._exit(C.cuInit(0) not in (0, 3))
_ = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
""")
        == 0
    )
