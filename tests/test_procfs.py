# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The code that reads /proc, tested with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from jupyter_gpupool import procfs
from jupyter_gpupool.broker.pages.translation import Translation
from jupyter_gpupool.devices.nvidia.members import maps_libcuda, session_members
from jupyter_gpupool.procfs import ProcessId
from tests import namespaces

#: A program that prints its process id. If its first argument, the depth, is not 0, it starts
#: itself as a child with a depth one less. Each process then waits until its stdin ends.
CHAIN = """
import os, subprocess, sys
depth = int(sys.argv[1])
print(os.getpid(), flush=True)
child = None
if depth:
    child = subprocess.Popen([sys.executable, "-c", sys.argv[2], str(depth - 1), sys.argv[2]])
sys.stdin.read()
if child:
    child.wait()
"""


@pytest.fixture
def spawn():
    """Return a function that starts Python code with pipes as its stdin and stdout.

    After the test, the fixture kills all these processes.
    """
    with ExitStack() as stack:

        def start(code, *arguments, env=None, count=1):
            process = subprocess.Popen(
                [sys.executable, "-c", code, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
            stack.callback(end, process)
            return process, [int(process.stdout.readline()) for _ in range(count)]

        def end(process):
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
            process.stdin.close()
            process.stdout.close()

        yield start


def wait_state(pid, states):
    """Wait until the process is in one of ``states``."""
    while (stat := procfs.read_stat(pid)) is None or stat.state not in states:
        time.sleep(0.002)


def test_a_name_with_blanks_and_brackets_is_parsed():
    rest = "S 7 3 3 0 -1 4 0 0 0 0 1 2 3 4 20 0 9 0 123456 99 88"
    stat = procfs.parse_stat(f"42 (a) (b c) {rest}\n")
    assert (stat.pid, stat.state, stat.parent, stat.threads, stat.start_time) == (
        42,
        "S",
        7,
        9,
        123456,
    )


def test_own_process_is_alive():
    me = procfs.identify(os.getpid())
    assert me is not None
    assert procfs.presence(me) == "alive"


def test_reused_pid_is_another_process():
    me = procfs.identify(os.getpid())
    assert procfs.presence(ProcessId(me.pid, me.start_time - 1)) == "gone"


def test_stopped_process_is_not_alive(spawn):
    _, (pid,) = spawn(CHAIN, "0", CHAIN)
    identity = procfs.identify(pid)
    os.kill(pid, signal.SIGSTOP)
    wait_state(pid, "T")
    assert procfs.presence(identity) == "stopped"
    os.kill(pid, signal.SIGCONT)
    wait_state(pid, "RS")
    assert procfs.presence(identity) == "alive"


def test_zombie_counts_as_ended(spawn):
    process, (pid,) = spawn(CHAIN, "0", CHAIN)
    identity = procfs.identify(pid)
    process.kill()
    wait_state(pid, "Z")
    assert procfs.presence(identity) == "gone"
    assert procfs.identify(pid) is None


def test_killed_process_counts_as_ending(spawn):
    process, (pid,) = spawn(CHAIN, "0", CHAIN)
    identity = procfs.identify(pid)
    assert not procfs.ending(identity)
    os.kill(pid, signal.SIGKILL)
    assert procfs.ending(identity)
    process.wait()
    assert procfs.ending(identity)


def test_children_come_before_their_parents(spawn):
    _, pids = spawn(CHAIN, "2", CHAIN, count=3)
    root = procfs.identify(pids[0])
    members = session_members(root, "s")
    assert [member.process.pid for member in members] == pids[::-1]
    assert {member.libcuda for member in members} == {False}


def test_background_process_is_in_the_session_of_its_environ(spawn):
    _, (root,) = spawn(CHAIN, "0", CHAIN, env={"GPUPOOL_SESSION": "mine"})
    _, (orphan,) = spawn(CHAIN, "0", CHAIN, env={"GPUPOOL_SESSION": "mine"})
    spawn(CHAIN, "0", CHAIN, env={"GPUPOOL_SESSION": "other"})
    members = session_members(procfs.identify(root), "mine")
    assert [member.process.pid for member in members] == [orphan, root]


def test_kernel_started_by_a_notebook_has_its_own_session(spawn):
    nested = (
        "import os, subprocess, sys; print(os.getpid(), flush=True);"
        "subprocess.Popen([sys.executable, '-c', sys.argv[2], '0', ''],"
        " env={**os.environ, 'GPUPOOL_SESSION': 'inner'}).wait()"
    )
    _, (outer, inner) = spawn(nested, "", CHAIN, env={"GPUPOOL_SESSION": "outer"}, count=2)
    members = session_members(procfs.identify(outer), "outer")
    assert [member.process.pid for member in members] == [outer]
    members = session_members(procfs.identify(inner), "inner")
    assert [member.process.pid for member in members] == [inner]


def test_broker_of_a_notebook_is_not_in_its_session(spawn):
    _, pids = spawn(CHAIN, "2", CHAIN, count=3, env={"GPUPOOL_SESSION": "mine"})
    root, broker, _ = pids
    members = session_members(procfs.identify(root), "mine", broker)
    assert [member.process.pid for member in members] == [root]
    # If the parent of a broker has ended, only the environment of the broker still names the
    # session. Even then, the broker is no member of the session.
    _, (other,) = spawn(CHAIN, "0", CHAIN, env={"GPUPOOL_SESSION": "mine"})
    members = session_members(procfs.identify(other), "mine", root)
    assert [member.process.pid for member in members] == [other]
    # If the broker is an ancestor of the kernel, the session keeps all its members.
    members = session_members(procfs.identify(broker), "mine", root)
    assert len(members) >= 2


def test_a_session_whose_root_ended_has_no_members():
    assert session_members(ProcessId(os.getpid(), 1), "s") == []


def test_a_session_without_a_name_is_refused():
    with pytest.raises(ValueError, match="name"):
        session_members(procfs.identify(os.getpid()), "")


def test_unreadable_environment_is_unknown_and_not_empty():
    assert procfs.session_of(2**22 + 1) is None
    assert maps_libcuda(2**22 + 1) is None


def test_driver_library_is_found_in_the_memory_map(spawn, tmp_path):
    library = tmp_path / "libcuda.so.1"
    library.write_bytes(Path(sys.executable).read_bytes()[:8192])
    code = (
        "import mmap, os, sys; f = open(sys.argv[1], 'rb');"
        "m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ);"
        "print(os.getpid(), flush=True); sys.stdin.read()"
    )
    _, (pid,) = spawn(code, str(library))
    assert maps_libcuda(pid) is True


def test_guard_is_not_mistaken_for_the_driver(monkeypatch, tmp_path):
    (tmp_path / "7").mkdir()
    monkeypatch.setattr("jupyter_gpupool.devices.nvidia.members.PROC", tmp_path)
    maps = tmp_path / "7" / "maps"
    guard = "7f00-7f01 r-xp 00000000 08:01 42  /opt/x/jupyter_gpupool/guard/lib/libcuda.so.1\n"
    maps.write_text(guard)
    assert maps_libcuda(7) is False
    for driver in (
        "/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05",
        "/opt/x/emucuda/lib/libcuda.so.1",
    ):
        maps.write_text(f"{guard}7f02-7f03 r-xp 00000000 08:01 43  {driver}\n")
        assert maps_libcuda(7) is True


@pytest.mark.skipif(bool(namespaces.refusal()), reason=namespaces.refusal() or "none")
def test_process_numbers_of_another_namespace_are_translated():
    code = "import os; print(os.getpid(), flush=True); os.read(0, 1)"
    boxes = [
        subprocess.Popen(
            [*namespaces.OWN_NUMBERS, sys.executable, "-c", code],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        assert [box.stdout.readline() for box in boxes] == ["1\n", "1\n"]
        first, second = (procfs.identify(namespaces.child(box.pid)) for box in boxes)
        assert procfs.number_inside(first.pid) == 1
        assert procfs.translated(1, beside=first.pid) == first.pid
        assert procfs.translated(1, beside=second.pid) == second.pid
        # ``os.getpid()`` is the test's number in the outer namespace. No process in the namespace
        # of ``first`` has this number.
        assert procfs.translated(os.getpid(), beside=first.pid) == 0
        assert procfs.translated(os.getpid(), beside=os.getpid()) == os.getpid()
        assert procfs.apart(first.pid, second.pid)
        assert procfs.apart(first.pid, os.getpid())
        assert not procfs.apart(os.getppid(), os.getpid())

        session = SimpleNamespace(id="s", uid="ada", process=first)
        there = ProcessId(1, first.start_time)
        false = ProcessId(1, first.start_time + 1)
        translation, named = Translation(), {there, false, second, procfs.identify(os.getpid())}
        for _ in range(2):  # the second time, the answer comes from memory
            assert translation.here(session, named) == {there: first}
    finally:
        for box in boxes:
            box.communicate("x", timeout=60)
    assert translation.here(session, {there}) == {}


def test_page_with_false_processes_causes_few_look_ups(monkeypatch):
    own, looks, now = procfs.identify(os.getpid()), [], [0.0]
    child = ProcessId(7, own.start_time)
    monkeypatch.setattr(procfs, "other_space", lambda _: 1)
    monkeypatch.setattr(procfs, "insiders", lambda _: looks.append(1) or {child: own})
    session = SimpleNamespace(id="s", uid="ada", process=own)
    translation = Translation(lambda: now[0])
    kernel = ProcessId(procfs.number_inside(own.pid), own.start_time)
    assert translation.here(session, {kernel}) == {kernel: own}
    assert not looks  # a kernel without children needs no look-up
    for false in range(10):
        assert translation.here(session, {kernel, ProcessId(9, false)}) == {kernel: own}
        assert translation.number(session, 1 << 22, own.pid) == 0
    assert len(looks) == 8
    assert translation.here(session, {child}) == {}
    now[0] = 1.0
    assert translation.here(session, {child}) == {child: own}

    # All sessions of one user share one limit of look-ups. Each user has a separate limit.
    many = [SimpleNamespace(id=f"{n}", uid="mallory", process=own) for n in range(100)]
    looks.clear()
    for one in many * 2:
        translation.here(one, {kernel, ProcessId(9, id(one))})
    assert len(looks) == 32
    # Look-ups for a message have a separate limit.
    translation.number(many[0], 1 << 22, own.pid)
    assert len(looks) == 33
    now[0] = 2.0
    assert translation.here(session, {child, ProcessId(9, 1)}) == {child: own}
    for one in many:
        translation.forget(one)
    # Look-ups count for the user's limit even after their session has ended.
    assert translation.here(many[0], {child}) == {child: own}
    assert len(looks) == 35
