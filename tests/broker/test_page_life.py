# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Pages before a lease and after their broker's death; the tests act as the guard."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import logging
import os
import signal
import socket
import stat
import struct
import time
from types import SimpleNamespace

import pytest

from jupyter_gpupool import procfs
from jupyter_gpupool.broker.messages.guard import GuardMessages
from jupyter_gpupool.broker.pages.control import ControlPages, page_folder
from jupyter_gpupool.guard import page as layout
from jupyter_gpupool.procfs import identify

from . import kit
from .guardkit import CLOSED, FLAGS, INFLIGHT, OPEN, PAUSED, UNUSED, Guarded, GuardedBroker
from .kit import BIG, MiB, wait_until


@pytest.fixture
def parts():
    return GuardedBroker, Guarded, {"quiet_after": 0.3}


def at(folder):
    """Return a configuration with its socket in this folder."""
    return SimpleNamespace(socket=folder / "s", machine_wide=False)


# ---------------------------------------------------------------------- brokers that die


def test_next_broker_serves_a_thread_that_still_waits(make_broker):
    broker = make_broker().started
    first, second = Guarded(broker, memory=BIG, devices=2), Guarded(broker, memory=BIG)
    first.lease()
    first.set(INFLIGHT, 1)
    with second.asking() as raw:
        second.wait_state("queued")
        broker.kill()
        assert raw.read() is None
    assert first.gate() in (OPEN, UNUSED)
    assert second.gate() == CLOSED
    assert broker.started
    with second.asking() as raw:
        second.wait_state("queued")
        assert first.granted() == BIG
        first.set(INFLIGHT, 0)
        assert raw.read()["type"] == "ok"
    assert first.gate() == CLOSED
    for k in (first, second):
        k.close()


def test_next_broker_opens_the_gate_of_a_killed_broker(make_broker):
    broker = make_broker().started
    k = Guarded(broker, memory=BIG)
    k.lease()
    broker.kill()
    k.map[8] = CLOSED
    stale = k.path.with_name("0123456789ab.page")
    stale.write_bytes(k.path.read_bytes())
    assert broker.started
    assert k.gate() in (OPEN, UNUSED)
    assert k.status()["guard"] is True
    assert not stale.exists()
    k.close()


def test_next_broker_ends_a_pause_that_a_killed_broker_left(make_broker):
    broker = make_broker().started
    k = Guarded(broker, memory=BIG)
    k.lease()
    broker.kill()
    k.map[8] = PAUSED
    assert broker.started
    k.wait_state("idle")
    assert k.gate() == UNUSED
    wait_until(lambda: k.touch() and k.state() == "active", "its use is seen")
    k.close()


def test_page_of_a_session_that_died_with_the_broker_is_removed(make_broker):
    broker = make_broker().started
    k = Guarded(broker, memory=BIG)
    k.lease()
    broker.kill()
    k.kill()
    assert broker.started
    assert not k.path.exists()
    k.close()


def test_kernel_without_its_page_gets_an_error_and_no_slice(make_broker):
    broker = make_broker().started
    k = Guarded(broker, memory=BIG)
    k.lease()
    broker.kill()
    k.path.unlink()
    assert broker.started
    assert k.status()["guard"] is False
    answer = k.ask()
    assert answer["code"] == "no-page"
    assert "Restart the kernel" in answer["next_step"]
    k.close()


def test_broker_without_the_guard_serves_guarded_kernels(make_broker):
    broker = make_broker().started
    k = Guarded(broker, memory=BIG)
    broker.kill()
    broker.module = kit.Broker.module
    broker.configure(guard=False)
    assert broker.started
    k.lease()
    assert k.granted() == BIG
    with broker.client() as client:
        answer = client.call("open", kernel_id="new")
        assert answer["attach"] == "cell"
        assert "GPUPOOL_PAGE" not in answer["env"]
    assert "c.GPUPool.guard" in broker.status()["settings"]["attach_reason"]
    k.close()


@pytest.mark.parametrize("allowed", [False, True])
def test_kernel_without_a_page_needs_the_admins_consent(make_broker, allowed):
    broker = make_broker(allow_unguarded=allowed).started
    k = Guarded(broker, memory=BIG)
    kit.remove(k.path.parent)
    k.path.parent.write_text("")  # no process can make a folder here
    with broker.client() as client:
        if allowed:
            answer = client.call("open", kernel_id="new")
            assert answer["attach"] == "cell"
            assert "GPUPOOL_PAGE" not in answer["env"]
            assert "gpupool-guard" not in answer["env"].get("LD_PRELOAD", "")
        else:
            with pytest.raises(kit.GPUPoolError) as caught:
                client.call("open", kernel_id="new")
            assert caught.value.code == "no-page"
    k.lease()  # this kernel keeps its page
    assert k.granted() == BIG
    k.path.parent.unlink()
    k.close()


# ---------------------------------------------------------------------- before a lease


def taker_of(device, kernel):
    """Return a kernel with a busy slice on ``device``. The other device is free afterwards."""
    found, others = None, []
    while found is None:
        one = kernel(memory=BIG)
        one.lease()
        one.set(INFLIGHT, 1)
        if one.status()["device"] == device:
            found = one
        else:
            others.append(one)
    for one in others:
        one.server.call("close", session=one.session)
    return found


def test_kernel_gets_a_device_of_the_same_model_after_cuinit(broker, kernel):
    k = kernel(memory=BIG)
    (home,) = k.devices()
    k.set(FLAGS, layout.SLOT_CUDA)
    taker_of(home, kernel)
    k.lease()
    assert k.devices() == k.status()["devices"] != [home]


def test_home_moves_to_a_device_with_an_idle_lease(broker, kernel):
    """No device has room. The home device is busy, but the lease on the other device is idle."""
    k = kernel(memory=BIG)
    (home,) = k.devices()
    k.set(FLAGS, layout.SLOT_CUDA)  # the process is about to call cuInit
    taker_of(home, kernel)
    idle = kernel(memory=BIG)
    idle.lease()
    idle.wait_state("idle")
    assert k.devices() == [home]
    assert k.ask("home")["type"] == "ok"
    assert k.devices() == [idle.status()["device"]]
    k.lease()
    assert idle.state() == "detached"


def test_home_has_the_number_of_devices_of_the_last_request(broker, kernel):
    """cuInit must show the requested number of devices, even if all devices are busy then."""
    k = kernel(memory=BIG)
    (home,) = k.devices()
    taker_of(home, kernel)
    k.server.call("request", session=k.session, devices=2)
    assert k.ask("home")["type"] == "ok"
    assert sorted(k.devices()) == sorted(d["uuid"] for d in broker.status()["devices"])


def test_home_stays_once_a_process_has_seen_it(kernel):
    k = kernel(memory=BIG)
    (home,) = k.devices()
    k.set(FLAGS, layout.SLOT_CUDA)
    k.slot(os.getpid(), layout.SLOT_CUDA)  # another process is about to call cuInit
    taker_of(home, kernel)
    assert k.ask("home")["type"] == "ok"
    assert k.devices() == [home]


def test_home_moves_to_a_device_with_room_until_cuinit(kernel):
    settled, moving = kernel(memory=BIG), kernel(memory=BIG)
    settled.set(FLAGS, layout.SLOT_CUDA)
    full = settled.devices()
    one = taker_of(full[0], kernel)
    wait_until(lambda: moving.devices() != full, "it sees the device with room")
    (room,) = moving.devices()
    one.server.call("close", session=one.session)
    taker_of(room, kernel)
    wait_until(lambda: moving.devices() == full, "and the other one when that has filled up")
    assert settled.devices() == full


def test_call_before_the_launch_is_served_after_the_launch(broker, kernel):
    k = kernel(memory=BIG, launch=False)
    with k.asking() as raw:
        wait_until(lambda: k.status()["messages"] == 1, "the question is there")
        k.launch(agent=False)
        assert raw.read()["type"] == "ok"
    assert k.served


def test_refusals_reach_the_agent(broker, kernel):
    k = kernel(memory=100 * MiB, limit=100 * MiB)
    k.lease()
    with kit.Raw(broker.socket) as raw:
        raw.say(type="hello", id=1, session=k.session, token=k.token)
        # The test's process is not the kernel, so the broker must refuse its hello.
        assert raw.read()["type"] == "error"
    k.do("start")
    wait_until(lambda: k.link()["greeted"], "the agent's hello")
    answer = k.ask("grow", device=0, bytes=50 * MiB)
    assert answer["code"] == "limit"
    wait_until(lambda: k.link()["refused"], "the agent hears of it")
    assert k.link()["refused"][:2] == ["grow", "limit"]


def test_client_cannot_change_the_flags_of_the_brokers_page(kernel):
    """With O_APPEND, the broker's writes would go to the page's end, and not close the gate."""
    k = kernel(memory=BIG)
    k.lease()
    with k.asking("page") as raw:
        _, (passed,), _, _ = socket.recv_fds(raw.socket, 1 << 16, 1)
    try:
        fcntl.fcntl(passed, fcntl.F_SETFL, os.O_APPEND)
        k.server.call("close", session=k.session)
        wait_until(lambda: not k.path.exists(), "the page is removed")
        assert k.gate() == CLOSED
        assert os.fstat(passed).st_size == layout.SIZE
    finally:
        os.close(passed)


def test_page_is_sent_once_to_a_client_that_does_not_read(kernel):
    """Linux limits how many files of a user may be sent through sockets and not yet received.

    Each page that the broker has sent and the client has not read counts. A client once used up the
    limit. New kernels in all containers then ran without their page.
    """
    k = kernel(memory=BIG)
    who = {"session": k.session, "token": k.token}

    def heard():
        return k.broker.status()["broker"]["counters"]["messages"]

    with kit.Raw(k.broker.socket) as raw:
        before, looks = heard(), itertools.count(1)  # the counter includes the status requests
        for number in range(1, 41):
            raw.say(type="page", id=number, **who)
        wait_until(lambda: heard() - before - next(looks) == 40, "the broker has heard all")
        assert len(taken(raw, 40)) == 1
        raw.say(type="page", id=41, **who)
        assert len(taken(raw, 1)) == 1


def taken(raw, answers):
    """Read ``answers`` positive answers. Close the descriptors in them; return their numbers."""
    found, text = [], b""
    while text.count(b"\n") < answers:
        data, new, _, _ = socket.recv_fds(raw.socket, 1 << 16, 64)
        text += data
        found += new
    for descriptor in found:
        os.close(descriptor)
    assert text.count(b'"ok"') == answers
    return found


def test_file_lease_on_a_page_does_not_delay_a_new_broker(tmp_path):
    layout.Page.create(tmp_path / "s.page", "s", os.getuid()).close()
    holder = os.open(tmp_path / "s.page", os.O_RDONLY)
    # When somebody opens the file for writing, Linux sends SIGIO to the holder of the file lease.
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    try:
        fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        with pytest.raises(layout.PageError, match="temporarily unavailable"):
            layout.Page.open(tmp_path / "s.page")
    finally:
        os.close(holder)
        signal.signal(signal.SIGIO, before)


# ---------------------------------------------------------------------- samples of pages


def test_process_in_many_slots_of_a_page_is_checked_once(tmp_path, monkeypatch):
    page = layout.Page.create(tmp_path / "s.page", "s", os.getuid())
    start = identify(os.getpid()).start_time
    with (tmp_path / "s.page").open("r+b") as file:
        for i in range(layout.SLOTS):
            file.seek(layout.HEADER_BYTES + i * layout.SLOT_BYTES)
            file.write(struct.pack("<IIQI", 1, os.getpid(), start, 1))
    looked = []
    monkeypatch.setattr(procfs, "alive", lambda process: (looked.append(process), True)[1])
    kept = ControlPages(tmp_path, {}, at(tmp_path), logging.getLogger())
    assert kept.read(SimpleNamespace(id="s", page=page, process=None)).inflight == layout.SLOTS
    assert len(looked) == 1
    page.remove()


@pytest.mark.parametrize("way", ["own link", "link of another", "file"])
def test_abandoned_page_removes_only_its_own_link(tmp_path, way):
    """A link names a descriptor's number. After a close, another page may have this number."""
    page = layout.Page.create(tmp_path / "s.page", "s", os.getuid())
    kept = ControlPages(tmp_path, {}, at(tmp_path), logging.getLogger())
    session = SimpleNamespace(id="s", page=page, uid=os.geteuid(), process=None)
    if way != "file":
        page.path.unlink()
        kept.restore(session)
        assert page.path.is_symlink()
    os.truncate(page.path, 100)
    if way == "link of another":
        page.path.unlink()
        page.path.symlink_to("/proc/1/fd/0")
    assert kept.read(session) is None
    assert session.page is None
    assert os.path.lexists(page.path) == (way != "own link")


def test_requests_in_a_row_read_the_page_once():
    async def ask():
        loop = asyncio.get_running_loop()

        def read(_):
            reads.append(1)
            session.use.read_at = loop.time()

        guards = GuardMessages(
            runner, None, SimpleNamespace(read=read), None, rooms=None, homes=None, landings=None
        )
        for i in range(20):
            guards._grow_now(i, session, {"id": 1, "device": 0, "bytes": 1})

    reads, asked = [], []
    record = SimpleNamespace(state="active", slices=[SimpleNamespace(device="d", bytes=1)])
    runner = SimpleNamespace(
        record=lambda _: record, expect=lambda *_: None, handle=asked.append, now=time.time
    )
    session = SimpleNamespace(id="s", use=SimpleNamespace(read_at=float("-inf"), beyond=()))
    asyncio.run(ask())
    assert (len(reads), len(asked)) == (1, 20)


def test_page_folder_of_a_machine_cannot_be_listed(tmp_path):
    found = page_folder(tmp_path / "s", machine_wide=True, shared=tmp_path)
    assert stat.S_IMODE(found.stat().st_mode) == 0o711
    assert page_folder(tmp_path / "s", machine_wide=True, shared=tmp_path) == found
    assert page_folder(tmp_path / "t", machine_wide=False, shared=tmp_path) != found


@pytest.mark.parametrize("trap", ["link", "file"])
def test_existing_file_or_link_is_not_used_as_the_folder(tmp_path, trap):
    (tmp_path / "shm").mkdir()
    name = page_folder(tmp_path / "s", machine_wide=False, shared=tmp_path / "shm")
    name.rmdir()
    if trap == "link":
        (tmp_path / "elsewhere").mkdir()
        name.symlink_to(tmp_path / "elsewhere")
    else:
        name.write_text("")
    found = page_folder(tmp_path / "s", machine_wide=False, shared=tmp_path / "shm")
    assert found == tmp_path / "s.pages"


def test_pages_without_shared_memory_are_beside_the_socket(tmp_path):
    found = page_folder(tmp_path / "s", machine_wide=False, shared=tmp_path / "none")
    assert found == tmp_path / "s.pages"
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
