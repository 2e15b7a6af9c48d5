# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Suspends and resumes under random load from many threads (``stress.c``).

The test acts as the broker: it closes the gate, waits until no call is inside, and suspends the
processes from another process, with the driver's own calls. It checks that the device is empty,
resumes the processes, and opens the gate. It also answers the guard's requests for the lease and
for growth, and refuses some growth.
"""

import signal
import subprocess
import time

import pytest
from suspender import Suspender

from jupyter_gpupool.guard import build as guard_build
from tests.emulated import PTX
from tests.emulated import build as emulator_build

MIB = 1 << 20
CONTEXT = 32 * MIB
THREADS = 6


@pytest.fixture
def ptx(tmp_path):
    path = tmp_path / "kernels.ptx"
    path.write_text(PTX)
    return str(path)


def _stress(session, until, commands, cycles, **variables):
    """Run programs together during ``cycles`` suspends; print what the programs did."""
    suspender = Suspender(session, seed=cycles)
    children = [session.child(command, **variables) for command in commands]
    for child in children:
        assert child.line(60) == f"ready {child.pid}"
    pids = [child.pid for child in children]
    for _ in range(cycles):
        suspender.suspend(pids, until)
        time.sleep(suspender.chance.random() * 0.003)  # the resume comes at a random moment
        suspender.resume(pids, until)
        if suspender.chance.random() < 0.25:
            suspender.pause()
        time.sleep(suspender.chance.random() * 0.01)
    for child in children:
        child.process.stdin.write(b"\n")
        child.process.stdin.flush()
    lines = [child.line(60).split() for child in children]
    assert [word for word, *_ in lines] == ["done"] * len(children)
    operations, checks, refused = (sum(int(line[i]) for line in lines) for i in (1, 2, 3))
    page = session.page.read()
    assert page.used[0] == CONTEXT * len(children)  # only the contexts are left
    # The other slots belong to children of these processes.
    mine = [slot for slot in page.slots if slot.pid in pids]
    assert len(mine) == len(pids)
    assert (page.inflight, page.waiting, page.pins) == (0, 0, "")
    assert [child.end() for child in children] == [0] * len(children)
    assert not [slot for slot in session.page.read().slots if slot.pid in pids]
    assert operations > cycles
    assert checks > 0
    assert suspender.grants > 0
    assert suspender.refusals > 0 or cycles < 30
    assert any(m["type"] == "attach" for m in session.broker.messages)
    print(f"{cycles} cycles: {operations} operations, {checks} buffers compared, "
          f"{suspender.grants} growths, {refused} refusals")  # fmt: skip


def _command(program, ptx, mode="all", seed=1):
    return [str(program), mode, str(THREADS), str(seed), ptx]


def test_suspends_under_load_lose_nothing(make_session, compiled, ptx, until):
    program = compiled("stress", "-pthread", "-ldl")
    _stress(make_session(), until, [_command(program, ptx)], 30)


def test_suspends_of_two_processes_under_load_lose_nothing(make_session, compiled, ptx, until):
    program = compiled("stress", "-pthread", "-ldl")
    commands = [_command(program, ptx, seed=seed) for seed in (4, 5)]
    _stress(make_session(), until, commands, 20)


def test_garbage_is_collected_while_suspended(make_session, compiled, ptx, until, tmp_path):
    """A garbage collector may free memory while the session has no lease.

    The collector holds a lock during the free. Other threads need this lock, so the free must not
    wait for a lease.
    """
    session = make_session()
    counter = tmp_path / "collected"
    counter.write_bytes(bytes(8))
    suspender = Suspender(session, seed=6)
    program = compiled("stress", "-pthread", "-ldl")
    child = session.child(_command(program, ptx, "collect"), COLLECTED=str(counter))
    assert child.line(60) == f"ready {child.pid}"

    def collected():
        return int.from_bytes(counter.read_bytes(), "little")

    suspended = 0
    for _ in range(20):
        suspender.suspend([child.pid], until)
        before, charged = collected(), session.page.read().used
        time.sleep(suspender.chance.random() * 0.01)
        suspended += collected() - before
        assert session.page.read().used == charged  # the suspended state still has the freed bytes
        suspender.resume([child.pid], until)
        time.sleep(suspender.chance.random() * 0.02)
    while not suspended:  # on a busy machine: repeat until garbage is collected in a suspend
        suspender.suspend([child.pid], until)
        before = collected()
        time.sleep(0.1)
        suspended += collected() - before
        suspender.resume([child.pid], until)
    child.process.stdin.write(b"\n")
    child.process.stdin.flush()
    assert child.line(60).startswith("done ")
    page = session.page.read()
    assert page.used[0] == CONTEXT
    assert suspender.used() == CONTEXT
    assert (page.inflight, page.waiting) == (0, 0)
    assert child.end() == 0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_thousand_suspends_under_load_lose_nothing(make_session, compiled, ptx, until):
    program = compiled("stress", "-pthread", "-ldl")
    _stress(make_session(), until, [_command(program, ptx, seed=2)], 1000)


# ---- with sanitizers in the program, the guard and the emulated driver


@pytest.fixture(scope="session")
def instrumented(tmp_path_factory, compiled):
    """Return a function that builds the program and its libraries with a kind of sanitizer.

    The function returns the program and its environment variables.
    """
    made = {}

    def get(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            guard_build.compile(folder / "guard", sanitize=kind)
            emulator_build.compile(folder / "driver", sanitize=kind, only=["libcuda.so.1"])
            program = compiled("stress", f"-fsanitize={kind}", "-pthread", "-ldl")
            runtime = {"address": "libasan.so", "thread": "libtsan.so"}[kind]
            found = subprocess.run(
                ["cc", f"-print-file-name={runtime}"],
                capture_output=True, text=True, timeout=30, check=True,
            ).stdout.strip()  # fmt: skip
            guard = folder / "guard"
            made[kind] = (
                program,
                {
                    "LD_PRELOAD": f"{found}:{guard / 'libcuda.so.1'}",
                    "LD_LIBRARY_PATH": f"{guard}:{folder / 'driver'}",
                    "ASAN_OPTIONS": "halt_on_error=1:detect_leaks=1",
                    "TSAN_OPTIONS": "halt_on_error=1",
                },
            )
        return made[kind]

    return get


@pytest.mark.parametrize("kind", [pytest.param("address", marks=pytest.mark.long), "thread"])
def test_suspends_under_load_pass_the_sanitizers(make_session, instrumented, ptx, until, kind):
    program, variables = instrumented(kind)
    _stress(make_session(), until, [_command(program, ptx, "collect")], 10, **variables)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["address", "thread"])
def test_a_thousand_suspends_pass_the_sanitizers(make_session, instrumented, ptx, until, kind):
    program, variables = instrumented(kind)
    _stress(make_session(), until, [_command(program, ptx, seed=3)], 1000, **variables)


# ---- proof that these tests can fail


def test_suspended_process_without_the_guard_crashes(make_session, compiled, ptx):
    """A synchronise in a suspended process causes a segmentation fault in the driver."""
    session = make_session()
    suspender = Suspender(session, seed=0, open_gate=False)
    program = compiled("stress", "-pthread", "-ldl")
    child = session.child(
        _command(program, ptx, "sync"),
        LD_PRELOAD=None,
        LD_LIBRARY_PATH=session.machine_env["LD_LIBRARY_PATH"],
        GPUPOOL_PAGE=None,
    )
    assert child.line() == f"ready {child.pid}"
    suspender.worker.do(f"_ = suspend([{child.pid}])")
    assert child.process.wait(30) == -signal.SIGSEGV


def test_suspended_process_under_the_guard_does_not_crash(make_session, compiled, ptx, until):
    session = make_session()
    suspender = Suspender(session, seed=0)
    child = session.child(_command(compiled("stress", "-pthread", "-ldl"), ptx, "sync"))
    assert child.line() == f"ready {child.pid}"
    suspender.suspend([child.pid], until)
    until(lambda: session.page.read().waiting == THREADS)  # no thread is in the driver
    suspender.resume([child.pid], until)
    child.process.stdin.write(b"\n")
    child.process.stdin.flush()
    assert child.line().startswith("done ")
    assert child.end() == 0


def test_stress_program_finds_a_wrong_byte(make_session, compiled, ptx, capfd):
    session = make_session()
    session.broker.answer = session.attach_on_request
    child = session.child(_command(compiled("stress", "-pthread", "-ldl"), ptx, "corrupt"))
    assert child.process.wait(30) == 3
    assert "the bytes are not those that were written" in capfd.readouterr().err
