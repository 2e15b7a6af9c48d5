# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``pause``, ``drain`` and ``resume`` with a real broker: which kernels and files they affect."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import types
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from jupyter_gpupool.broker.gpu.health import Health
from jupyter_gpupool.broker.gpu.maintenance import Maintenance
from jupyter_gpupool.broker.transport.auth import Access, Peer
from jupyter_gpupool.cli.maintenance import progress
from jupyter_gpupool.cli.picture import Style, draw
from jupyter_gpupool.devices.nvidia.visibility import holders
from jupyter_gpupool.errors import DriverError, RefusedError
from jupyter_gpupool.guard.install import without_guard

from .kit import ROOT, Kernel, MiB, children, environment, wait_until

WHY = "paused by the administrator: new driver"


def maintain(broker, action, device="", reason="new driver", timeout=90):
    with broker.client() as client:
        return client.call(
            "maintain", action=action, device=device, reason=reason, timeout=timeout
        )["note"]


def order(broker, device=""):
    """Return the maintenance order from the status: for ``device``, or for the whole pool."""
    rows = broker.status()["maintenance"]
    return next((row for row in rows if row["device"] == device), None)


def closed(broker, device=""):
    wait_until(lambda: order(broker, device)["closed"], "the pause is complete", 60)


def xids(broker):
    """Return the rows of failures with an Xid. A sample may report a failure before its Xid."""
    return [row for row in broker.rows("device-lost") if "Xid" in row["reason"]]


def with_device_files(broker, pid):
    """Return whether a process has a device file of the emulated machine open."""
    begin = str(broker.folder / "broker.sock.emulated" / "nvidia")
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since
            if str(link.readlink()).startswith(begin):
                return True
    return False


@pytest.fixture
def one(broker, kernel):
    """Return a session with a slice and data. A pause must suspend it."""
    found = kernel("one.ipynb", memory=400 * MiB)
    found.attach()
    found.do("alloc", bytes=64 * MiB, byte=1)
    return found


def test_pause_suspends_idle_kernels_and_closes_device_files(broker, kernel, one):
    two = kernel("two.ipynb", memory=400 * MiB)
    two.attach()
    two.do("alloc", bytes=32 * MiB, byte=2)
    one.do("drop", hold="cell")
    assert with_device_files(broker, one.process.pid)
    note = maintain(broker, "pause")
    assert note == f"The pool is being {WHY}."
    one.wait_state("detached", seconds=60)
    assert two.state() == "active", "its cell is left to finish"
    (wait,) = order(broker)["waits"]
    assert (wait["label"], wait["why"]) == ("two.ipynb", "a cell runs")
    assert children(broker, "worker"), "they are needed still"
    two.do("drop", hold="cell")
    closed(broker)
    for module in ("worker", "monitor", "selftest"):
        assert not children(broker, module), module
    for process in (one.process, two.process, broker.process):
        assert not with_device_files(broker, process.pid)
    # During the pause, no kernel gets a slice. A kernel that waits shows the pause as its reason.
    one.do("ask", hold="again")
    wait_until(lambda: one.state() == "queued", "it waits")
    wait_until(lambda: (one.link()["queue"] or {}).get("reason") == WHY, "the reason")
    assert {d["drained_reason"] for d in broker.status()["devices"]} == {WHY}
    assert {d["memory_free"] for d in broker.status()["devices"]} == {None}, "nobody can have it"
    assert maintain(broker, "resume") == "The GPUs are in service again."
    assert all(d["memory_free"] is not None for d in broker.status()["devices"])
    one.do("got", hold="again")
    two.attach("again")
    assert (one.do("check"), two.do("check")) == (64 * MiB, 32 * MiB)
    assert broker.status()["maintenance"] == []
    rows = broker.rows("pause", "paused", "unpause")
    assert [row["kind"] for row in rows] == ["pause", "paused", "unpause"]


def test_broker_started_in_a_pause_does_not_touch_the_driver(broker, one):
    broker.disturbed = True
    one.do("drop", hold="cell")
    maintain(broker, "pause")
    closed(broker)
    broker.kill()
    assert broker.started
    assert order(broker)["closed"]
    assert not children(broker, "worker") + children(broker, "monitor")
    assert {d["drained_reason"] for d in broker.status()["devices"]} == {WHY}
    wait_until(lambda: one.link()["greeted"], "the agent is back")
    one.do("ask", hold="again")
    wait_until(lambda: (one.link()["queue"] or {}).get("reason") == WHY, "the reason")
    maintain(broker, "resume")
    one.do("got", hold="again")
    assert one.do("check") == 64 * MiB


def test_pause_that_waits_for_a_cell_survives_a_killed_broker(broker, one):
    broker.disturbed = True
    maintain(broker, "pause")
    broker.kill()
    assert broker.started
    assert not order(broker)["closed"]
    wait_until(lambda: one.link()["greeted"], "the agent is back")
    one.do("drop", hold="cell")
    closed(broker)
    assert broker.session(one.session)["suspended_bytes"] == (64 + 32) * MiB


def test_drained_gpu_is_emptied_and_kernels_continue_elsewhere(broker, kernel, one):
    uuid = broker.session(one.session)["device"]
    index = next(d["index"] for d in broker.status()["devices"] if d["uuid"] == uuid)
    one.do("drop", hold="cell")
    maintain(broker, "drain", str(index))
    closed(broker, uuid)
    assert {d["memory_free"] is None: d["uuid"] for d in broker.status()["devices"]}[True] == uuid
    assert ", not used" in picture(broker)
    assert f"Not used: drained by the administrator: {WHY.partition(': ')[2]}" in picture(broker)
    one.attach("again")
    assert broker.session(one.session)["device"] != uuid
    assert one.do("check") == 64 * MiB
    two = kernel("two", memory=400 * MiB)
    two.do("ask", hold="cell")
    wait_until(lambda: two.state() == "queued", "there is no other GPU")
    assert children(broker, "worker"), "the driver stays in use"
    maintain(broker, "resume", uuid)
    assert two.do("got", hold="cell")["slices"][0][0] == uuid


def test_paused_gpu_loses_its_worker_and_is_tested_on_return(broker, one):
    uuid = broker.session(one.session)["device"]
    one.do("drop", hold="cell")
    before = set(children(broker, "worker"))
    maintain(broker, "pause", uuid)
    closed(broker, uuid)
    assert before.isdisjoint(children(broker, "worker")), "also the other GPU's, which saw this one"
    broker.faults.set("checkpoint-refused", device=0)
    broker.faults.set("checkpoint-refused", device=1)
    note = maintain(broker, "resume", uuid)
    assert note.startswith("The GPU is in service again.")
    (device,) = (d for d in broker.status()["devices"] if d["uuid"] == uuid)
    assert not device["can_suspend"], "it was tested"


def users_of(broker, index):
    """Return the pids that have a GPU's device file open now, from /proc."""
    path = str(broker.folder / "broker.sock.emulated" / f"nvidia{index}")
    return {holder.process.pid for holder in holders(path)[0] if path in holder.paths}


def test_pool_closes_a_paused_gpus_file_and_names_other_users(broker, kernel, one):
    """The monitor and other GPUs' workers once kept the file open, and no message named them."""
    uuid = broker.session(one.session)["device"]
    index = next(d["index"] for d in broker.status()["devices"] if d["uuid"] == uuid)
    one.do("drop", hold="cell")
    # The GPU's self-test and the suspend start both workers and the monitor. These processes open
    # the device files.
    elsewhere = kernel("elsewhere.ipynb", memory=400 * MiB)
    idler = kernel("asks.ipynb", launch=False)
    env = {**environment(broker.folder), **without_guard({**os.environ, **idler.env})}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    own = {child for module in ("worker", "monitor") for child in children(broker, module)}
    assert own & users_of(broker, index), "who uses a GPU has its file open"
    with ExitStack() as stack:
        programs = [
            stack.enter_context(subprocess.Popen(
                [sys.executable, "-c", INITIALISED],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=chosen,
            ))
            for chosen in (env, {k: v for k, v in env.items() if "GPUPOOL_SESSION" not in k})
        ]  # fmt: skip
        assert [program.stdout.readline() for program in programs] == ["ready\n"] * 2
        inside, outside = programs
        idler.server.call("launched", session=idler.session, pid=inside.pid)
        maintain(broker, "pause", uuid)
        wait_until(
            lambda: users_of(broker, index) == {inside.pid, outside.pid},
            "the pool's own processes have closed the file", 60,
        )  # fmt: skip
        files = wait_until(lambda: order(broker, uuid)["files"], "who has it open", 60)
        assert {(f["pid"], f["session"]) for f in files} == {
            (inside.pid, idler.session),
            (outside.pid, None),
        }
        assert not order(broker, uuid)["closed"]
        lines = progress(order(broker, uuid))
        assert lines[0] == (
            "No kernel has a slice on this GPU any more, but these processes still have its device "
            "file open:"
        )
        assert lines[1].startswith(f"  process {inside.pid} (session {idler.session}): ")
        inside.stdin.close()
        closed(broker, uuid)
        text = order(broker, uuid)["text"]
        assert (
            text == f"GPU {index} is {WHY}; no process of the pool has this GPU's device file open."
        )
        assert [f["pid"] for f in order(broker, uuid)["files"]] == [outside.pid]
        # The pool uses and samples the other GPU as before, in processes that do not see the paused
        # GPU.
        elsewhere.attach()
        elsewhere.do("alloc", bytes=32 * MiB, byte=3)
        elsewhere.do("drop", hold="cell")
        elsewhere.server.call("release", session=elsewhere.session)
        elsewhere.wait_state("detached", seconds=60)
        elsewhere.attach("again")
        assert elsewhere.do("check") == 32 * MiB
        assert children(broker, "worker")
        wait_until(lambda: children(broker, "monitor"), "a sample", 60)
        assert users_of(broker, index) == {outside.pid}
        outside.stdin.close()
    maintain(broker, "resume", uuid)
    elsewhere.do("drop", hold="again")
    assert not broker.status()["maintenance"]
    one.attach("more")
    assert one.do("check") == 64 * MiB


def test_restarted_broker_closes_a_paused_gpus_device_file(broker, one):
    broker.disturbed = True
    uuid = broker.session(one.session)["device"]
    index = next(d["index"] for d in broker.status()["devices"] if d["uuid"] == uuid)
    one.do("drop", hold="cell")
    maintain(broker, "pause", uuid)
    closed(broker, uuid)
    broker.kill()
    assert broker.started
    closed(broker, uuid)
    assert not users_of(broker, index)


def test_resume_before_a_gpus_file_is_closed_returns_the_gpu(broker, one):
    uuid = broker.session(one.session)["device"]
    one.do("drop", hold="cell")
    env = {**environment(broker.folder), **without_guard({**os.environ, **one.env})}
    env["EMUCUDA_FAULTS"] = "init-not-enough"
    with subprocess.Popen(
        [sys.executable, "-c", INITIALISED],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "ready\n"
        maintain(broker, "pause", uuid)
        wait_until(lambda: order(broker, uuid)["files"], "who has the file open", 60)
        maintain(broker, "resume", uuid)
        process.stdin.close()
    one.attach("again")
    assert one.do("check") == 64 * MiB


def test_pause_names_a_pinned_kernel_and_asks_for_its_restart(broker, one):
    broker.faults.set("checkpoint-refused", pid=one.process.pid)
    one.do("drop", hold="cell")
    maintain(broker, "pause")
    wait_until(lambda: one.link()["notice"], "the notice in its notebook", 60)
    notice = one.link()["notice"]
    assert notice.startswith(f"The GPUs are being {WHY}. The GPU state of this kernel cannot be")
    assert "restart this kernel" in notice
    (wait,) = order(broker)["waits"]
    assert wait["pinned"]
    assert wait["why"].startswith("cannot be suspended: ")
    one.kill()
    closed(broker)


INITIALISED = """
import ctypes, sys
assert ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
print("ready", flush=True)
sys.stdin.read()
"""


def test_process_that_only_called_cuinit_delays_a_pause(broker, kernel):
    one = kernel("asks.ipynb", launch=False)
    env = {**environment(broker.folder), **without_guard({**os.environ, **one.env})}
    with subprocess.Popen(
        [sys.executable, "-c", INITIALISED],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "ready\n"
        one.server.call("launched", session=one.session, pid=process.pid)
        maintain(broker, "pause")
        files = wait_until(lambda: order(broker)["files"], "who has device files open", 60)
        assert [(f["pid"], f["session"]) for f in files] == [(process.pid, one.session)]
        assert not order(broker)["closed"]
        lines = progress(order(broker))
        assert lines[1].startswith(f"  process {process.pid} (session {one.session}): ")
        assert lines[1].endswith("; restart that kernel")
        process.stdin.close()
    closed(broker)


def test_resume_during_a_pause_lets_all_kernels_continue(broker, one):
    maintain(broker, "pause")
    assert maintain(broker, "resume") == "The GPUs are in service again."
    one.do("drop", hold="cell")
    assert one.do("take", hold="more"), "it was never asked to leave"
    assert one.do("check") == 64 * MiB
    with pytest.raises(RefusedError, match="Nothing is paused"):
        maintain(broker, "resume")


def test_resume_without_a_driver_is_refused(broker, one):
    one.do("drop", hold="cell")
    maintain(broker, "pause")
    closed(broker)
    state = broker.folder / "broker.sock.emulated"
    machine = (state / "machine").read_bytes()
    broker.disturbed = True
    # Put an empty folder in the place of the driver's state file. The emulated driver then does not
    # start.
    (state / "machine").rename(state / "aside")
    (state / "machine").mkdir()
    with pytest.raises(RefusedError):
        maintain(broker, "resume")
    assert order(broker)["closed"]
    (state / "machine").rmdir()
    (state / "aside").rename(state / "machine")
    assert len((state / "machine").read_bytes()) == len(machine)
    maintain(broker, "resume")
    one.attach("again")
    assert one.do("check") == 64 * MiB


@pytest.mark.parametrize(
    ("action", "device", "said"),
    [
        ("drain", "", "A drain order is for one GPU."),
        ("pause", "7", "'7' is no GPU of this pool"),
        ("stop", "", "There is no maintenance action 'stop'"),
    ],
)
def test_invalid_orders_are_refused_in_one_sentence(broker, action, device, said):
    with pytest.raises(RefusedError, match=said):
        maintain(broker, action, device)


def test_interrupted_pause_command_leaves_the_pause_in_force(broker, one):
    with subprocess.Popen(
        [
            sys.executable, "-m", "jupyter_gpupool.cli", "pause",
            "--socket", str(broker.socket), "--reason", "new driver",
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env=environment(broker.folder),
    ) as command:  # fmt: skip
        try:
            lines = [command.stdout.readline() for _ in range(3)]
            command.send_signal(signal.SIGINT)
            _, err = command.communicate(timeout=60)
        finally:
            command.kill()
    assert lines[0] == f"The pool is being {WHY}.\n"
    assert lines[1] == "Waiting for 1 kernel:\n"
    assert lines[2].startswith("  one.ipynb (")
    assert lines[2].endswith(": a cell runs\n")
    assert command.returncode == 130
    assert "The pause is not finished, but it stays in force" in err
    assert "jupyter gpupool resume" in err
    one.do("drop", hold="cell")
    closed(broker)


def test_only_an_admin_may_take_gpus_out_of_service():
    """This test checks only the rule. ``tests/server`` checks, with two users, who a peer is."""
    access = Access(machine_wide=True, own_uid=0, admins=("operator",))
    configuration = types.SimpleNamespace(access=access)
    runner = types.SimpleNamespace(journal=types.SimpleNamespace(meta=lambda _name: ""))
    maintenance = Maintenance(
        runner, None, configuration, health=None, aside=None, log=logging.getLogger()
    )
    user = types.SimpleNamespace(peer=Peer(pid=1, uid=65534, gid=65534))
    with pytest.raises(RefusedError, match="Only an admin of this pool"):
        maintenance.maintain(user, {"action": "pause"})


def test_gpu_with_an_xid_is_retested_and_comes_back(make_broker):
    broker = make_broker(retest_after=0.5).started
    with closing(Kernel(broker, "one", memory=400 * MiB)) as one:
        one.attach()
        uuid = broker.session(one.session)["device"]
        index = next(d["index"] for d in broker.status()["devices"] if d["uuid"] == uuid)
        one.do("drop", hold="cell")
        broker.faults.set("device-lost", device=index)
        lost = wait_until(lambda: xids(broker), "the Xid", 60)
        assert lost[0]["device"] == uuid
        wait_until(lambda: "still out of service" in broker.tail(), "a test that fails", 60)
        assert device_of(broker, uuid)["drained_reason"]
        broker.faults.clear()
        wait_until(lambda: not device_of(broker, uuid)["drained_reason"], "it is back", 60)
        assert broker.rows("device-seen")[-1]["reason"] == "passed its self-test"


def test_doctor_brings_back_a_gpu_that_passes_the_retest(make_broker):
    broker = make_broker(retest_after=0).started
    with closing(Kernel(broker, "one", memory=400 * MiB)) as one:
        one.attach()
        one.do("drop", hold="cell")
        broker.faults.set("device-lost", device=1)
        lost = wait_until(lambda: xids(broker), "the Xid", 60)[0]["device"]
        assert "GPU 1 stays out of service: " in doctor(broker)
        broker.faults.clear()
        assert "GPU 1 is back." in doctor(broker)
        assert not device_of(broker, lost)["drained_reason"]
        assert "No GPU is out of service because of a failure." in doctor(broker)


@pytest.mark.parametrize("readable", [True, False])
def test_failed_gpu_stays_out_of_service_if_another_is_resumed(make_broker, readable):
    broker = make_broker(retest_after=0).started
    with closing(Kernel(broker, "one", memory=400 * MiB)) as one:
        one.attach()
        one.do("drop", hold="cell")
        broker.faults.set("device-lost", device=1)
        lost = wait_until(lambda: xids(broker), "the Xid", 60)[0]["device"]
        if readable:
            broker.faults.clear()
        other = next(d["uuid"] for d in broker.status()["devices"] if d["uuid"] != lost)
        maintain(broker, "pause", other)
        closed(broker, other)
        note = maintain(broker, "resume", other)
        assert note.startswith("The GPU is in service again. Out of service: GPU 1: ")
        assert "Xid 79" in device_of(broker, lost)["drained_reason"], "nobody has tested it"
        assert not device_of(broker, other)["drained_reason"]
        broker.faults.clear()
        assert "GPU 1 is back." in doctor(broker)


def picture(broker):
    """Return the output of ``jupyter gpupool status``."""
    return "\n".join(draw(broker.status(), Style(width=120)))


def device_of(broker, uuid):
    return next(d for d in broker.status()["devices"] if d["uuid"] == uuid)


def doctor(broker):
    done = subprocess.run(
        [
            sys.executable, "-m", "jupyter_gpupool.cli", "doctor", "--retest",
            "--socket", str(broker.socket),
        ],
        capture_output=True, text=True, cwd=ROOT, env=environment(broker.folder), timeout=120,
        check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


# ---------------------------------------------------------------------- a driver that hangs

#: The text of /proc/driver/nvidia/version.
OPEN_595 = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.71.05  Release Build\n"


@pytest.fixture
def hanging(make_broker):
    """Return a broker on a driver that is known to hang when a restored process is killed."""
    broker = make_broker()
    state = broker.folder / "broker.sock.emulated"
    state.mkdir()
    (state / "version").write_text(OPEN_595)
    return broker.started


@pytest.fixture
def restored(hanging):
    """A session that was suspended and resumed."""
    with closing(Kernel(hanging, "restored", memory=400 * MiB)) as one:
        one.attach()
        one.do("alloc", bytes=64 * MiB, byte=1)
        one.do("drop", hold="cell")
        one.server.call("release", session=one.session)
        one.wait_state("detached", seconds=60)
        one.attach("again")
        yield one


def suspended_now(broker, kernel):
    """Return whether the kernel is suspended: a suspended process has no device file open."""
    return not with_device_files(broker, kernel.process.pid)


def test_status_warns_of_a_driver_that_hangs_after_a_kill(hanging):
    warning = hanging.status()["driver_warning"]
    assert warning.startswith("The open kernel module 595.71.05 is known to hang the machine")
    assert warning in hanging.tail()
    done = subprocess.run(
        [sys.executable, "-m", "jupyter_gpupool.cli", "status", "--socket", str(hanging.socket)],
        capture_output=True, text=True, cwd=ROOT, env=environment(hanging.folder), timeout=120,
        check=True,
    )  # fmt: skip
    assert warning in " ".join(done.stdout.split())


def test_retire_suspends_a_restored_kernel_on_a_hanging_driver(hanging, restored):
    with hanging.client() as client:
        assert client.call("retire", session=restored.session, timeout=60)["safe"]
    assert suspended_now(hanging, restored)
    restored.kill()
    wait_until(lambda: hanging.session(restored.session) is None, "its end", 60)
    assert not hanging.rows("device-lost"), "there is nothing to suspect"
    assert all(d["memory_granted"] == 0 for d in hanging.status()["devices"])


def test_gpu_is_tested_after_the_kill_of_a_restored_kernel(hanging, restored):
    """The OOM killer, or a user's ``kill -9``, ends the kernel without a suspend."""
    uuid = hanging.session(restored.session)["device"]
    restored.kill()
    wait_until(lambda: hanging.session(restored.session) is None, "its end", 60)
    (lost,) = wait_until(lambda: hanging.rows("device-lost"), "the suspicion", 60)
    assert lost["device"] == uuid
    assert "A resumed kernel ended on this GPU before the pool" in lost["reason"]
    wait_until(lambda: not device_of(hanging, uuid)["drained_reason"], "the test has passed", 60)
    kinds = [row["kind"] for row in hanging.rows("close", "device-lost", "device-seen")]
    assert kinds[-3:] == ["device-lost", "close", "device-seen"], "first nobody gets it"
    assert hanging.rows("device-seen")[-1]["reason"] == "passed its self-test"


def test_restored_kernel_that_exits_is_not_reported_as_killed(hanging, restored):
    """The kernel exits by itself at the end of its input. No signal ends it."""
    uuid = hanging.session(restored.session)["device"]
    restored.process.stdin.close()
    assert restored.process.wait(60) == 0
    (lost,) = wait_until(lambda: hanging.rows("device-lost"), "the suspicion", 60)
    assert lost["device"] == uuid
    assert "ended on this GPU before the pool suspended it again" in lost["reason"]
    assert "killed" not in lost["reason"]
    wait_until(lambda: not device_of(hanging, uuid)["drained_reason"], "the test has passed", 60)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("paused", "The GPU has not been tested yet"),
        ("no-room", "The GPU has not been tested yet"),
        ("lost", "The GPU's test failed"),
    ],
)
def test_untested_suspect_gpu_does_not_count_as_failed(code, told):
    device = types.SimpleNamespace(
        uuid="GPU-x", index=0, memory_total=MiB, name="", tier="", tier_reason="", can_suspend=True
    )

    async def retest(_uuid):
        raise DriverError("This is why.", code=code)

    async def suspected():
        runner = types.SimpleNamespace(
            note=lambda *_, **__: None, handle=lambda _: None, now=lambda: 0.0
        )
        settings = types.SimpleNamespace(settings=types.SimpleNamespace(retest_after=0))
        health = Health(runner, settings, retest, logging.getLogger())
        health.begin([device])
        health.suspect(device.uuid, "A kernel ended here.")
        assert await health.retest(device.uuid) == "This is why."
        await asyncio.sleep(0)
        return health.failed[device.uuid]

    assert asyncio.run(suspected()) == f"A kernel ended here. {told}: This is why."


def test_sample_from_before_a_failure_brings_no_gpu_back():
    device = types.SimpleNamespace(
        uuid="G", index=0, memory_total=1, name="", tier="", tier_reason=""
    )
    runner = types.SimpleNamespace(
        note=lambda *_, **__: None, handle=lambda _: None, now=lambda: 0.0
    )
    settings = types.SimpleNamespace(settings=types.SimpleNamespace(retest_after=0))
    health = Health(runner, settings, None, logging.getLogger())
    health.begin([device])
    health.lost("G", "NVML cannot read it.")
    before = dict(health.failed)
    health.lost("G", "Xid 79")
    for failed in ({}, before):
        health.readable("G", failed)
        assert health.failed == {"G": "Xid 79"}
    health.readable("G", {"G": "Xid 79"})
    assert health.failed == {}


def test_gpu_that_hangs_after_a_kill_stays_out_of_service(hanging, restored):
    uuid = hanging.session(restored.session)["device"]
    hanging.faults.set("hang", op="checkpoint")
    restored.kill()
    wait_until(
        lambda: "The GPU's test failed" in device_of(hanging, uuid)["drained_reason"], "it", 90
    )
    assert "known to hang this driver" in device_of(hanging, uuid)["drained_reason"]
    with closing(Kernel(hanging, "other", memory=400 * MiB)) as other:
        other.attach()
        assert hanging.session(other.session)["device"] != uuid
    hanging.faults.clear()
    assert "is back." in doctor(hanging)
    assert not device_of(hanging, uuid)["drained_reason"]


def test_next_broker_notices_a_kernel_killed_without_a_broker(hanging, restored):
    uuid = hanging.session(restored.session)["device"]
    hanging.disturbed = True
    hanging.kill()
    restored.kill()
    assert hanging.started
    assert [row["device"] for row in hanging.rows("device-lost")] == [uuid]
    wait_until(lambda: not device_of(hanging, uuid)["drained_reason"], "the test has passed", 60)


def test_retire_does_not_suspend_a_kernel_without_a_restore(hanging):
    with closing(Kernel(hanging, "fresh", memory=400 * MiB)) as one:
        one.attach()
        one.do("alloc", bytes=64 * MiB, byte=1)
        with hanging.client() as client:
            assert client.call("retire", session=one.session, timeout=60)["safe"]
        assert not suspended_now(hanging, one)
        assert one.do("check") == 64 * MiB


def test_drivers_that_do_not_hang_need_no_retire_request(broker, one):
    with broker.client() as client:
        assert client.call("open", kernel_id="k")["retire"] is False
        assert client.call("retire", session=one.session)["safe"]
    assert one.do("check") == 64 * MiB
    assert broker.status()["driver_warning"] == ""
