# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Kernels still run when their user's last login ends, and logind then deletes files of the user.

The tests delete the same files. logind removes ``/run/user/UID`` with everything in it. With
``RemoveIPC=yes``, it also removes each file of the user in ``/dev/shm``, including empty folders.
Processes continue after the logout, for example in tmux with ``KillUserProcesses=no``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from jupyter_gpupool import starting, startrecord
from jupyter_gpupool.broker.pages.control import SHARED_MEMORY, folder_name
from jupyter_gpupool.client import Client
from jupyter_gpupool.guard import page as layout
from jupyter_gpupool.procfs import identify
from jupyter_gpupool.starting import ensure_broker
from jupyter_gpupool.startrecord import kernel_environment

from . import kit
from .guardkit import Guarded, GuardedBroker
from .kit import LATE, MiB, wait_until
from .test_autostart import clean, settings, with_pid  # noqa: F401 (a fixture)
from .test_guarded import BIG, Program


class Found(kit.Broker):
    """The broker that ``ensure_broker`` starts in the runtime folder of a login."""

    def __init__(self, folder, path):
        self.folder, self.socket = folder, path
        self.log = path.with_suffix(".log")


pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture
def runtime(clean, monkeypatch):  # noqa: F811
    """Make the runtime folder of a login in the test's folder. A logout removes it."""
    (clean / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(clean / "run"))
    return clean / "run"


def log_out(broker):
    """Delete what logind deletes."""
    kit.remove(broker.folder / "run")
    kit.remove(SHARED_MEMORY / folder_name(broker.socket))


def spawn(program):
    """Let the program start a process that calls CUDA; return its pid."""
    found = program.do("spawn", bytes=8 * MiB)
    assert [answer["ok"] for answer in found["answers"]] == [None, None], found
    return found["pid"]


def pool(clean):  # noqa: F811
    return settings(
        clean, emulate=kit.MACHINE, attach="lazy", quiet_after=0.3, linger=3600, idle_timeout=3600
    )


@pytest.fixture
def broker(clean, runtime):  # noqa: F811
    path = ensure_broker(pool(clean))
    broker = Found(clean, path)
    yield broker
    print(broker.tail())
    kit.remove(SHARED_MEMORY / folder_name(path))


@pytest.fixture
def program(broker):
    made = []

    def make(**kwargs):
        made.append(Program(broker, **{"memory": BIG, **kwargs}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_kernels_in_every_state_continue_after_a_logout(
    broker,
    program,
    clean,  # noqa: F811
):
    pid = broker.status()["pid"]
    idle, other = program(), program()
    idle.begin(32 * MiB, byte=1)
    other.begin(32 * MiB, byte=2)
    for one in (idle, other):
        one.wait_state("idle")
    third = program()
    third.begin(32 * MiB, byte=3)
    suspended = idle if idle.state() == "detached" else other
    running = other if suspended is idle else idle
    for one in (running, third):
        assert one.do("storm") is None
    waiting = program()
    waiting.tell("context")
    waiting.wait_state("queued")

    log_out(broker)
    # Start a process after the logout. It asks the broker for the session's page, or finds the page
    # that the broker has put back.
    child = spawn(third)
    wait_until(broker.socket.exists, "the socket")
    wait_until(lambda: Path(waiting.env["GPUPOOL_PAGE"]).exists(), "the pages")
    assert broker.status()["pid"] == pid
    page = layout.Page.find(Path(third.env["GPUPOOL_PAGE"]), third.session)
    assert {slot.pid for slot in page.read().slots} == {third.process.pid, child}
    page.close()
    wait_until(
        lambda: third.status()["used_bytes"] == (32 + 8 + 2 * 32) * MiB, "one account for both"
    )

    assert running.do("calm")["error"] == 0
    assert waiting.answer() is None
    assert third.do("calm")["error"] == 0
    assert suspended.do("check") == 32 * MiB
    assert running.do("check") == 32 * MiB
    assert third.do("check") == 32 * MiB
    # The next login has another runtime folder, or none. A new kernel still finds this broker.
    assert ensure_broker(pool(clean)) == broker.socket
    new = program(memory=50 * MiB)
    new.begin(8 * MiB, byte=9)
    assert len(broker.status()["sessions"]) == 5
    assert broker.status()["pid"] == pid


def test_next_broker_after_a_logout_finds_every_page(broker, program):
    used, untouched = program(), program()
    used.begin(32 * MiB, byte=1)
    used.wait_state("idle")
    log_out(broker)
    wait_until(lambda: Path(untouched.env["GPUPOOL_PAGE"]).exists(), "the pages")
    wait_until(lambda: broker.socket.with_name("broker.sock.start.json").exists(), "the record")
    pid = broker.status()["pid"]
    with_pid(pid)
    assert starting.revive(broker.socket)
    assert broker.status()["pid"] != pid
    assert used.status()["guard"]
    assert untouched.status()["guard"]
    assert used.do("check") == 32 * MiB
    child = spawn(used)
    page = layout.Page.find(Path(used.env["GPUPOOL_PAGE"]), used.session)
    assert {slot.pid for slot in page.read().slots} == {used.process.pid, child}
    page.close()
    untouched.begin(16 * MiB, byte=2)
    assert untouched.do("check") == 16 * MiB


def test_kernels_survive_a_logout_without_a_broker(broker, program, clean):  # noqa: F811
    used = program()
    used.begin(32 * MiB, byte=1)
    used.wait_state("idle")
    with_pid(broker.status()["pid"])
    log_out(broker)
    (clean / "run").mkdir(mode=0o700)  # the next login
    assert ensure_broker(pool(clean)) == broker.socket
    child = spawn(used)
    wait_until(lambda: used.status()["used_bytes"] == (32 + 8 + 2 * 32) * MiB, "one account")
    assert used.do("check") == 32 * MiB
    os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("there", [True, False], ids=["started", "waiting"])
def test_folder_of_a_broker_that_has_just_died_is_made_again(broker, program, there):
    used = program()
    used.begin(32 * MiB, byte=1)
    used.wait_state("idle")
    env = kernel_environment(broker.socket)
    pid = broker.status()["pid"]
    with_pid(pid)
    kit.remove(broker.socket.parent)
    kit.remove(SHARED_MEMORY / folder_name(broker.socket))
    assert not starting.revive(broker.socket)  # no record is left except the copy
    copy = env[startrecord.COPY_VARIABLE]
    if there:
        assert starting.revive(broker.socket, copy=copy)
    else:
        Path(copy).chmod(0o644)  # others could have read the copy, so it is no longer trusted
        assert not starting.revive(broker.socket, copy=copy)
        Path(copy).chmod(0o600)
        command = ["/bin/sh", "-c", env[startrecord.REVIVE_VARIABLE]]
        subprocess.run(command, check=True, timeout=60, env={"PATH": "/usr/bin:/bin"})
        wait_until(lambda: starting.answers(broker.socket), "the broker", 60)
    assert broker.status()["pid"] != pid
    assert broker.socket.parent.stat().st_mode & 0o777 == 0o700
    assert broker.status()["settings"]["idle_timeout"] == 3600  # its configuration is kept as well
    assert used.do("check") == 32 * MiB


def test_callers_do_not_wait_for_a_folder_they_cannot_make(broker):
    copy = kernel_environment(broker.socket)[startrecord.COPY_VARIABLE]
    with_pid(broker.status()["pid"])
    assert startrecord.can_restore(broker.socket, copy)
    kit.remove(broker.folder / "run")  # only the login manager makes /run/user/UID
    assert not startrecord.can_restore(broker.socket, copy)
    assert not starting.revive(broker.socket, copy=copy)


def test_broker_with_deleted_files_is_not_started_twice(broker):
    copy = kernel_environment(broker.socket)[startrecord.COPY_VARIABLE]
    pid = broker.status()["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        kit.remove(broker.socket.parent)
        assert not starting.revive(broker.socket, copy=copy)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: starting.answers(broker.socket), "the broker")
    assert broker.status()["pid"] == pid


def test_copy_of_the_start_record_is_removed_with_the_broker(broker):
    copy = Path(kernel_environment(broker.socket)[startrecord.COPY_VARIABLE])
    copy.unlink()
    wait_until(copy.exists, "the copy")
    assert startrecord.read_record_file(copy) == startrecord.read_record(broker.socket)
    pid = broker.status()["pid"]
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: identify(pid) is None, "the broker's end")
    assert not copy.exists()
    assert not starting.revive(broker.socket, copy=str(copy))


# ---------------------------------------------------------------------- single files


@pytest.mark.parametrize("name", ["broker.sock", "broker.sock.lock", "broker.sock.start.json"])
def test_deleted_file_of_a_broker_is_back_within_two_seconds(broker, name):
    path = broker.socket.with_name(name)
    wait_until(path.exists, "the broker has written it")
    pid = broker.status()["pid"]
    before = path.read_bytes() if name != "broker.sock" else None
    kit.remove(broker.socket.parent)
    wait_until(path.exists, "it is back", 2 + LATE)
    wait_until(lambda: starting.answers(broker.socket), "and the socket", 2 + LATE)
    assert path.stat().st_mode & 0o077 == 0
    if before is not None:
        wait_until(lambda: path.read_bytes() == before, "as it was")
    assert broker.status()["pid"] == pid


def test_deleted_log_is_made_again_at_the_same_path(broker):
    kit.remove(broker.socket.parent)
    wait_until(lambda: "was deleted and is back" in broker.tail(), "the log's line")


def test_lost_journal_is_written_again_with_every_session(make_broker):
    broker = make_broker().started
    one = kit.Kernel(broker, "one")
    one.attach()
    kit.remove(broker.folder / "state")
    path = Path(broker.status()["broker"]["journal"])
    wait_until(path.exists, "the journal")
    wait_until(lambda: "is back, with all sessions" in broker.tail(), "the commit")
    broker.kill()
    assert broker.started
    assert one.state() in ("active", "idle")
    one.close()


# ---------------------------------------------------------------------- pages


@pytest.fixture
def guarded(make_broker):
    broker = GuardedBroker(kit.short_folder()).started
    yield broker
    broker.close()
    kit.remove(broker.folder)


def test_new_kernel_after_a_logout_has_a_page(guarded):
    kit.remove(SHARED_MEMORY / folder_name(guarded.socket))
    k = Guarded(guarded, memory=BIG)
    k.lease()
    assert k.granted() == BIG
    k.close()


def test_page_of_an_ended_session_is_not_put_back(guarded):
    k = Guarded(guarded, memory=BIG)
    with guarded.client() as client:
        client.call("close", session=k.session)
    answer = k.ask("page")
    assert answer["type"] == "error"
    assert not k.path.exists()
    k.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a machine's broker")
def test_machine_wide_broker_keeps_pages_beside_its_socket(make_broker):
    broker = make_broker(attach="lazy")
    broker.module = GuardedBroker.module
    folder = Path("/run") / f"gpb-{os.getpid()}-pages"
    broker.socket = folder / "broker.sock"
    try:
        with Client(broker.started.socket) as client:
            env = client.call("open", kernel_id="k")["env"]
        assert Path(env["GPUPOOL_PAGE"]).parent == folder / "broker.sock.pages"
    finally:
        broker.close()
        kit.remove(folder)


# ---------------------------------------------------------------------- full shared memory


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.parametrize("allowed", [False, True])
def test_kernel_without_a_page_needs_allow_unguarded(make_broker, allowed):
    broker = make_broker(attach="lazy", allow_unguarded=allowed)
    broker.module = "tests.broker.crowded_broker"
    assert broker.start()["ok"]
    assert {d["tier"] for d in broker.status()["devices"]} == {"guarded"}
    with broker.client() as client:
        if allowed:
            answer = client.call("open", kernel_id="k")
            assert "GPUPOOL_PAGE" not in answer["env"]
            assert "runs without the guard" in broker.tail()
        else:
            with pytest.raises(kit.GPUPoolError) as caught:
                client.call("open", kernel_id="k")
            assert caught.value.code == "no-page"
            assert "No space left" in caught.value.message
            assert "allow_unguarded" in caught.value.next_step
            assert broker.status()["sessions"] == []
            assert json.dumps(broker.status())
