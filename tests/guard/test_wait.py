# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""How a call waits for the lease: interrupts, the interpreter's lock, a missing broker."""

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from jupyter_gpupool.guard import page as pages

NOT_READY, OUT_OF_MEMORY, DEINITIALIZED = 802, 2, 4

#: AWAY: seconds after which a call stops waiting for a missing broker. BUSY: the seconds that a
#: busy machine may add before the child answers.
AWAY, BUSY = 4.5, 20

#: Statements of a child that record an interrupt instead of raising it.
NOTE = "seen = []; signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))"


@pytest.fixture
def waiting(session):
    """Return a child with a context whose gate is closed."""
    child = session.child()
    assert child.do("_ = context()") == 0
    session.page.set_gate(pages.CLOSED)
    return child


# ---------------------------------------------------------------------- interrupts


@pytest.mark.parametrize("library", ["C", "P"], ids=["lock released", "lock held"])
def test_interrupt_ends_the_wait_with_an_error(session, waiting, library):
    waiting.do(NOTE)
    for attempt in range(2):
        waiting.send(f"_ = {library}.cuCtxSynchronize(), len(seen)")
        session.broker.asked(attempt + 1)
        waiting.process.send_signal(signal.SIGINT)
        assert waiting.reply() == (NOT_READY, attempt + 1)
    session.broker.wait(lambda b: b.open == 0)
    reading = session.page.read()
    assert (reading.waiting, reading.inflight) == (0, 0)
    # The next call waits again and gets the lease.
    session.broker.answer = session.attach_on_request
    assert waiting.do("_ = C.cuCtxSynchronize()") == 0


@pytest.mark.parametrize("library", ["C", "P"], ids=["lock released", "lock held"])
def test_python_raises_the_interrupt_when_the_call_returns(session, waiting, library):
    waiting.send(f"""
try:
    {library}.cuCtxSynchronize()
    time.sleep(60)
except KeyboardInterrupt:
    _ = "interrupted"
""")
    session.broker.asked(1)
    waiting.process.send_signal(signal.SIGINT)
    assert waiting.reply() == "interrupted"


def test_interrupt_ends_the_waits_of_all_threads(session, waiting):
    waiting.do(NOTE)
    waiting.do("""
results = []
threads = [threading.Thread(target=lambda: results.append(C.cuCtxSynchronize())) for _ in range(4)]
for t in threads: t.start()
""")
    session.broker.asked(4)
    waiting.process.send_signal(signal.SIGINT)
    assert waiting.do("for t in threads: t.join()\n_ = results") == [NOT_READY] * 4


@pytest.fixture
def foreign(session, waiting, compiled):
    """Return the child ``waiting`` with one more waiting thread.

    A C library made this thread, and the interpreter does not know the thread.
    """
    library = compiled("foreign", "-shared", "-fPIC", "-pthread", "-ldl")
    waiting.do(NOTE)
    waiting.do(f"F = ctypes.CDLL({str(library)!r})")
    assert waiting.do("_ = F.begin()") == 0
    session.broker.asked(1)
    return waiting


def held(session):
    return [slot.held for slot in session.slots()]


def test_first_interrupt_does_not_end_another_threads_call(session, foreign, until):
    """A failed call may lose data: JAX gives arrays away to a call, and loses them if it fails."""
    foreign.do("import pty; terminal, end = pty.openpty(); os.dup2(end, 2)")
    foreign.process.send_signal(signal.SIGINT)
    until(lambda: held(session) == [1])
    told = foreign.do("_ = os.read(terminal, 4096).decode()")
    assert "Interrupt once more to end the call." in told, "a script has no line of a wait"
    assert foreign.do("_ = seen") == [], "the exception would drop the result"
    session.page.set_gate(pages.OPEN)
    assert foreign.do("_ = F.join()") == 0
    until(lambda: held(session) == [0])
    foreign.process.send_signal(signal.SIGINT)
    until(lambda: foreign.do("_ = len(seen)") == 1)


def test_second_interrupt_ends_the_call_of_a_librarys_thread(session, foreign, until):
    foreign.process.send_signal(signal.SIGINT)
    until(lambda: held(session) == [1])
    foreign.process.send_signal(signal.SIGINT)
    assert foreign.do("_ = F.join()") == 1
    assert foreign.do("_ = len(seen)") == 1
    assert held(session) == [0]


def test_first_interrupt_ends_only_the_waits_of_known_threads(session, foreign, until):
    foreign.send("_ = C.cuCtxSynchronize(), len(seen)")
    session.broker.asked(2)
    foreign.process.send_signal(signal.SIGINT)
    assert foreign.reply() == (NOT_READY, 1)
    assert held(session) == [1]
    foreign.process.send_signal(signal.SIGINT)
    assert foreign.do("_ = F.join(), len(seen)") == (1, 2)


def test_other_signals_do_not_end_the_wait(session, waiting):
    waiting.do("""
seen = []
for number in (signal.SIGALRM, signal.SIGCHLD, signal.SIGWINCH, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: seen.append(number))
""")
    waiting.send("_ = C.cuCtxSynchronize(), sorted(seen)")
    session.broker.asked(1)
    numbers = [signal.SIGALRM, signal.SIGCHLD, signal.SIGWINCH, signal.SIGUSR1]
    for number in numbers:
        waiting.process.send_signal(number)
        assert not waiting.answers(0.1)
    session.page.set_gate(pages.OPEN)
    assert waiting.reply() == (0, sorted(map(int, numbers)))
    assert len(session.broker.messages) == 1


def test_guard_calls_and_restores_the_interrupt_handler(session, compiled):
    program = compiled("waiter", "-ldl")
    session.page.set_gate(pages.CLOSED)
    child = session.child([str(program), "handler"])
    assert child.line() == "ready"
    session.broker.asked(1)
    child.process.send_signal(signal.SIGINT)
    assert child.line() == f"{NOT_READY} {int(signal.SIGINT)} 1"


def test_process_that_ignores_interrupts_keeps_waiting(session, compiled):
    program = compiled("waiter", "-ldl")
    session.page.set_gate(pages.CLOSED)
    child = session.child([str(program), "ignore"])
    assert child.line() == "ready"
    session.broker.asked(1)
    child.process.send_signal(signal.SIGINT)
    assert not child.answers(0.2)
    session.page.set_gate(pages.OPEN)
    assert child.line() == "0 0 1"


def test_interrupt_ends_a_process_without_a_handler(session, compiled):
    program = compiled("waiter", "-ldl")
    session.page.set_gate(pages.CLOSED)
    child = session.child([str(program), "default"])
    assert child.line() == "ready"
    session.broker.asked(1)
    child.process.send_signal(signal.SIGINT)
    assert child.process.wait(60) == -signal.SIGINT


def test_guard_keeps_a_handler_that_is_set_during_a_wait(session, waiting):
    waiting.do("""
t = threading.Thread(target=lambda: C.cuCtxSynchronize()); t.start()
""")
    session.broker.asked(1)
    waiting.do(NOTE)
    session.page.set_gate(pages.OPEN)
    waiting.do("t.join()")
    assert waiting.do("os.kill(os.getpid(), signal.SIGINT); time.sleep(0); _ = seen") == [2]


def test_interrupt_with_a_new_handler_also_ends_the_wait(session, waiting, until):
    """An IPython kernel sets an interrupt handler for each cell.

    Threads of earlier cells may be waiting at this moment.
    """
    waiting.do("""
results = []
t = threading.Thread(target=lambda: results.append(C.cuCtxSynchronize())); t.start()
""")
    session.broker.asked(1)
    waiting.do(NOTE)

    def interrupted():
        waiting.process.send_signal(signal.SIGINT)
        return waiting.do("_ = results")

    assert until(interrupted) == [NOT_READY]
    waiting.do("t.join()")
    assert set(waiting.do("_ = seen")) == {signal.SIGINT}
    before = waiting.do("_ = len(seen)")
    waiting.process.send_signal(signal.SIGINT)
    until(lambda: waiting.do("_ = len(seen)") == before + 1)


def test_handlers_that_call_each_other_do_not_loop(session, waiting, compiled):
    """During a wait, a library sets its own handler, which then calls the guard's handler."""
    library = compiled("foreign", "-shared", "-fPIC", "-pthread", "-ldl")
    waiting.do(f"F = ctypes.CDLL({str(library)!r}); called = ctypes.c_int.in_dll(F, 'called')")
    waiting.do(NOTE)
    for calls in (1, 2, 3):
        waiting.send("_ = C.cuCtxSynchronize(), len(seen), called.value")
        session.broker.asked(calls)
        waiting.process.send_signal(signal.SIGINT)
        assert waiting.reply() == (NOT_READY, calls, calls - 1)
        if calls == 1:
            waiting.do("""
t = threading.Thread(target=lambda: C.cuCtxSynchronize()); t.start()
""")
            session.broker.asked(2)
            waiting.do("F.chain()")
            session.page.set_gate(pages.OPEN)
            waiting.do("t.join()")
            session.page.set_gate(pages.CLOSED)
            session.broker.messages.clear()
            session.broker.messages.append("the one before")


def test_interrupt_also_ends_a_wait_during_a_pause(session, waiting, until):
    session.page.set_gate(pages.PAUSED, pause_until=time.monotonic_ns() + 60_000_000_000)
    waiting.do(NOTE)
    waiting.send("_ = C.cuCtxSynchronize()")
    until(lambda: session.page.read().waiting == 1)
    waiting.process.send_signal(signal.SIGINT)
    assert waiting.reply() == NOT_READY


# ---------------------------------------------------------------------- the interpreter


def test_other_threads_of_the_interpreter_run_during_a_wait(session, waiting, until):
    """The other threads run even if the caller held the interpreter's lock."""
    mark = session.page_path.with_name("mark")
    mark.touch()
    waiting.send(f"""
stop = False
def tick():
    while not stop:
        os.utime({str(mark)!r})
        time.sleep(0.01)
t = threading.Thread(target=tick); t.start()
_ = P.cuCtxSynchronize()
stop = True
""")
    session.broker.asked(1)
    # Three changes of the time, because the first may come from a call that began before the wait.
    times = set()
    until(lambda: times.add(mark.stat().st_mtime_ns) or len(times) > 3)
    session.page.set_gate(pages.OPEN)
    assert waiting.reply() == 0


def test_thread_unknown_to_the_interpreter_can_wait(session, waiting, compiled):
    """The interpreter does not know this thread. So the guard has no thread state to save."""
    library = compiled("foreign", "-shared", "-fPIC", "-pthread", "-ldl")
    waiting.do(f"F = ctypes.PyDLL({str(library)!r})")
    assert waiting.do("_ = F.begin()") == 0
    session.broker.asked(1)
    assert waiting.do("_ = F.begin()") == 0
    session.broker.asked(2)
    session.page.set_gate(pages.OPEN)
    assert waiting.do("_ = F.join()") == 0


def test_suspended_kernel_shuts_down_without_a_lease(session, waiting):
    """When the interpreter ends, the CUDA calls of destructors fail at once.

    They need not wait for a lease, because the end of the process frees all memory.
    """
    waiting.do("""
class Tensor:
    def __del__(self, write=os.write, free=C.cuCtxSynchronize):
        write(1, b"%d\\n" % free())
import builtins
builtins.tensor = Tensor()
""")
    waiting.process.stdin.close()
    assert waiting.line() == str(DEINITIALIZED)
    assert waiting.process.wait(60) == 0
    assert session.broker.messages == []
    assert session.slots() == ()


def test_suspended_program_exits_without_a_lease(session, compiled):
    child = session.child([str(compiled("waiter", "-ldl")), "exit"])
    assert child.line() == "ready"
    session.page.set_gate(pages.CLOSED)
    child.process.stdin.close()
    assert child.line() == str(DEINITIALIZED)
    assert child.process.wait(60) == 0
    assert session.broker.messages == []


# ---------------------------------------------------------------------- the broker


def test_call_without_a_broker_fails_after_five_seconds(session, waiting):
    session.broker.stop()
    begun = time.monotonic()
    assert waiting.do("_ = C.cuCtxSynchronize()") == NOT_READY
    assert AWAY - 0.1 < time.monotonic() - begun < AWAY + BUSY


def test_call_fails_if_its_broker_dies_during_the_wait(session, waiting):
    waiting.send("_ = C.cuCtxSynchronize()")
    session.broker.asked(1)
    begun = time.monotonic()
    session.broker.stop()
    assert waiting.reply() == NOT_READY
    assert time.monotonic() - begun < AWAY + BUSY


def test_restarted_broker_is_asked_again(session, waiting):
    waiting.send("_ = C.cuCtxSynchronize()")
    session.broker.asked(1)
    session.broker.stop()
    session.broker.answer = session.attach_on_request
    session.broker.start()
    assert waiting.reply() == 0
    assert len(session.broker.messages) == 2


@pytest.fixture
def service(session):
    """Return the socket path of a machine-wide service.

    The path is a link to the socket of the session's broker.
    """
    folder = Path(f"/run/gpupool-test-{os.getpid()}")
    try:
        folder.mkdir()
    except PermissionError:
        pytest.skip("only root may write below /run")
    path = folder / "b.sock"
    path.symlink_to(session.broker.path)
    yield path
    shutil.rmtree(folder)


def test_guard_waits_for_a_service_and_never_starts_it(session, service):
    """The call waits, because only the service manager may start the broker of a service.

    Such a start may take long.
    """
    Path(f"{service}.start.json").write_text("{}")
    called = session.folder / "called"
    child = session.child(GPUPOOL_SOCKET=str(service), GPUPOOL_REVIVE=f"touch {called}")
    assert child.do("_ = context()") == 0
    session.page.set_gate(pages.CLOSED)
    session.broker.stop()
    child.send("_ = C.cuCtxSynchronize()")
    assert not child.answers(AWAY + 1)
    session.broker.answer = session.attach_on_request
    session.broker.start()
    assert child.reply() == 0
    assert not called.exists()


def test_waiting_threads_start_a_dead_broker_only_once(session, until):
    """The command that starts the broker gets a clean environment.

    The broker does not become a child of this process.
    """
    out = session.folder / "out"
    command = f"{{ echo $PPID; env; }} >> {out}; sleep 5 &"
    child = session.child(GPUPOOL_REVIVE=command)
    assert child.do("_ = context()") == 0
    session.page.set_gate(pages.CLOSED)
    record = Path(f"{session.broker.path}.start.json")
    record.write_text("{}")
    session.broker.stop()
    child.do(
        "waits = [threading.Thread(target=C.cuCtxSynchronize) for _ in range(4)]\n"
        "for w in waits: w.start()\n_ = None"
    )
    until(lambda: out.exists() and "PATH=" in out.read_text())
    lines = out.read_text().splitlines()
    assert lines[0] == str(child.pid)
    assert sum(line.startswith("PATH=") for line in lines) == 1
    assert not any(line.startswith(("LD_PRELOAD", "GPUPOOL_")) for line in lines)
    # The shell has ended, and its background process is not a child of this process.
    assert child.do("_ = open('/proc/self/task/%d/children' % os.getpid()).read()") == ""
    session.broker.answer = session.attach_on_request
    session.broker.start()
    assert child.do("for w in waits: w.join()\n_ = C.cuCtxSynchronize()") == 0


def test_call_fails_at_once_if_broker_starts_have_failed(session, waiting):
    failed = Path(f"{session.broker.path}.start.failed")
    child = session.child(GPUPOOL_REVIVE="true")
    session.page.set_gate(pages.UNUSED)
    assert child.do("_ = context()") == 0
    session.page.set_gate(pages.CLOSED)
    Path(f"{session.broker.path}.start.json").write_text("{}")
    failed.write_text(json.dumps({"count": 3, "due": time.time() + 60, "message": "no"}))
    session.broker.stop()
    timed = "t = time.monotonic(); e = C.cuCtxSynchronize(); _ = e, time.monotonic() - t"
    answers = [child.do(timed) for _ in range(3)]
    assert {error for error, _ in answers} == {NOT_READY}
    assert min(seconds for _, seconds in answers) < AWAY / 2
    # The next attempt is due, so the guard starts the broker and waits for it.
    failed.write_text(json.dumps({"count": 3, "due": time.time() - 1, "message": "no"}))
    child.send("_ = C.cuCtxSynchronize()")
    assert not child.answers(AWAY + 1)
    session.broker.answer = session.attach_on_request
    session.broker.start()
    assert child.reply() == 0


def test_broker_that_closes_each_connection_counts_as_missing(session, waiting):
    def hang_up(message):
        raise OSError

    session.broker.answer = hang_up
    begun = time.monotonic()
    assert waiting.do("_ = C.cuCtxSynchronize()") == NOT_READY
    assert AWAY - 0.1 < time.monotonic() - begun < AWAY + BUSY
    assert 1 < len(session.broker.messages) < 200


def test_refused_attach_fails_the_call(session, waiting):
    session.broker.answer = lambda message: {
        "type": "error", "code": "quota", "message": 'says "type":"ok" ' + "and more " * 2000
    }  # fmt: skip
    assert waiting.do("_ = C.cuCtxSynchronize()") == NOT_READY
    assert waiting.do("_ = C.cuMemHostUnregister(None)") == NOT_READY
    assert waiting.do("_ = alloc(1 << 20)") == NOT_READY


def test_guard_asks_again_if_an_answer_leaves_the_gate_closed(session, waiting):
    asked = threading.Event()

    def answer(message):
        if len(session.broker.messages) == 3:
            session.page.set_gate(pages.OPEN)
            asked.set()
        return {"type": "ok"}

    session.broker.answer = answer
    assert waiting.do("_ = C.cuCtxSynchronize()") == 0
    assert asked.is_set()
    assert len(session.broker.messages) == 3


# ---------------------------------------------------------------------- growth


def test_request_for_growth_has_the_sessions_device_number(session):
    child = session.child(CUDA_VISIBLE_DEVICES="1")
    assert child.do("_ = context()") == 0
    session.broker.answer = lambda message: {"type": "error", "code": "limit", "message": "no"}
    assert child.do("_ = alloc(600 << 20)") == OUT_OF_MEMORY
    (message,) = session.broker.messages
    assert (message["type"], message["device"]) == ("grow", 1)
    assert message["bytes"] >= (600 + 32 - 512) << 20
    assert (message["session"], message["token"]) == ("s-1", 't"1')


def test_refused_growth_is_requested_again_only_after_a_change(session):
    """While the page has a refused total, the guard asks the broker only for a smaller total."""
    child = session.child()
    assert child.do("_ = context()") == 0
    session.broker.answer = lambda message: {"type": "error", "code": "limit", "message": "no"}
    an_hour = time.monotonic_ns() + 3_600_000_000_000
    session.page.set_vain([700 << 20], an_hour)
    assert child.do("_ = [alloc(700 << 20) for _ in range(50)]") == [OUT_OF_MEMORY] * 50
    assert session.broker.messages == []
    # The sum of this request and the context is exactly the refused total.
    assert child.do("_ = alloc(668 << 20)") == OUT_OF_MEMORY
    assert session.broker.messages == []
    # The sum of this request and the context is less than the refused total.
    assert child.do("_ = alloc(660 << 20)") == OUT_OF_MEMORY
    assert len(session.broker.messages) == 1
    assert child.do("_ = alloc(400 << 20) > 1 << 20") is True  # this fits in the grant
    session.page.set_vain([], 0)
    assert child.do("_ = alloc(700 << 20)") == OUT_OF_MEMORY
    assert len(session.broker.messages) == 2
    session.page.set_vain([1 << 20], time.monotonic_ns() - 1)  # the refused total has expired
    assert child.do("_ = alloc(700 << 20)") == OUT_OF_MEMORY
    assert len(session.broker.messages) == 3


def test_dead_processes_are_reaped_despite_an_earlier_refusal(session):
    child, other = session.child(), session.child()
    assert child.do("_ = context()") == other.do("_ = context()") == 0
    assert other.do("_ = alloc(300 << 20) > 1 << 20") is True
    session.page.set_vain([513 << 20], time.monotonic_ns() + 3_600_000_000_000)
    assert child.do("_ = alloc(300 << 20)") == OUT_OF_MEMORY
    other.kill()
    assert child.do("_ = alloc(300 << 20) > 1 << 20") is True
    assert session.broker.messages == []


def test_wait_for_growth_delays_no_suspend(session, until):
    """A call that waits for growth does not count as inside. So a suspend does not wait for it."""
    child = session.child()
    assert child.do("_ = context()") == 0
    asked, go = threading.Event(), threading.Event()

    def answer(message):
        if message["type"] == "attach":
            return session.attach_on_request(message)
        asked.set()
        go.wait(30)
        session.page.set_grant([800 << 20] * 2, 1 << 30, 1)
        return {"type": "ok", "granted": 800 << 20}

    session.broker.answer = answer
    child.send("_ = alloc(600 << 20) > 1000")
    assert asked.wait(30)
    reading = session.page.read()
    assert (reading.inflight, reading.waiting) == (0, 1)
    session.page.set_gate(pages.CLOSED)
    go.set()
    assert child.reply() is True
    assert [m["type"] for m in session.broker.messages] == ["grow", "attach"]
    reading = session.page.read()
    assert (reading.inflight, reading.waiting) == (0, 0)


@pytest.mark.parametrize("way", ["interrupted", "no broker"])
def test_failed_request_for_growth_returns_not_ready(session, way):
    child = session.child()
    assert child.do("_ = context()") == 0
    if way == "no broker":
        session.broker.stop()
        assert child.do("_ = alloc(600 << 20)") == NOT_READY
    else:
        child.do(NOTE)
        child.send("_ = alloc(600 << 20)")
        session.broker.asked(1)
        os.kill(child.pid, signal.SIGINT)
        assert child.reply() == NOT_READY
    assert session.page.read().used[0] == 32 << 20


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize(
    "call",
    [
        "cuDevicePrimaryCtxRetain(ctypes.byref(x), 0)",
        "cuCtxCreate_v2(ctypes.byref(x), 0, 0)",
        "cuMemAlloc_v2(ctypes.byref(x), ctypes.c_size_t(4096))",
    ],
)
def test_calls_without_cuinit_neither_wait_nor_ask_the_broker(session, call, hidden):
    """A user who hides all GPUs, or forgets cuInit, gets the driver's own error."""
    session.page.set_gate(pages.CLOSED)
    child = session.child(**({"CUDA_VISIBLE_DEVICES": ""} if hidden else {}))
    if hidden:
        assert child.do("_ = C.cuInit(0)") == 100
    assert child.do(f"x = ctypes.c_void_p(); _ = C.{call}") in (3, 201)
    assert session.broker.messages == []


# ---------------------------------------------------------------------- a crowded broker


def test_call_asks_again_when_the_broker_is_busy(session, waiting):
    """The broker answers "busy" if a user has too many connections. The CUDA call must not fail."""
    answers = [{"type": "error", "id": None, "code": "busy", "message": "M."}] * 3
    session.broker.answer = lambda message: (
        answers.pop() if answers else session.attach_on_request(message)
    )
    assert waiting.do("_ = C.cuCtxSynchronize()") == 0
    assert not answers
