# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Host memory with a margin: what a suspend leaves free, and what happens when memory is short."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress

import pytest

from jupyter_gpupool import cgroups
from jupyter_gpupool.broker.hostmemory import HostRoom
from jupyter_gpupool.cgroups import Host, Level
from jupyter_gpupool.config.reading import HostReserve, read_host_reserve

from . import kit
from .kit import MiB, wait_until
from .test_guarded import CONTEXT, Program

GiB = 1 << 30


class Tree:
    """Memory and control groups of a fictional machine."""

    def __init__(self, folder, *, total=64 * GiB, free=32 * GiB):
        self.root, self.proc = folder / "cgroup", folder / "proc"
        self.root.mkdir(parents=True)
        self.machine(total, free)
        self.host = Host(self.root, self.proc)

    def machine(self, total, free, psi="some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"):
        write(self.proc / "meminfo", f"MemTotal: {total >> 10} kB\nMemAvailable: {free >> 10} kB\n")
        write(self.proc / "pressure" / "memory", psi)

    def process(self, pid, line="0::/"):
        write(self.proc / str(pid) / "cgroup", f"{line}\n")

    def group(self, name, **files):
        for file, text in files.items():
            write(self.root / name / file.replace("__", "."), f"{text}\n")

    def free(self, pid):
        return [(str(level), level.limit, level.free) for level in self.host.levels(pid)]


def write(path, text):
    """Replace a file, so that a reader sees either the old text or the new text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


# ---------------------------------------------------------------------- reading


def test_lower_of_two_limits_counts_at_each_cgroup_v2_level(tree):
    tree.process(7, "0::/user/job")
    tree.group("user", memory__max="max", memory__high=8 * GiB, memory__current=3 * GiB)
    tree.group("user/job", memory__max=2 * GiB, memory__high="max", memory__current=GiB,
               memory__stat=f"anon 5\ninactive_file {GiB // 4}")  # fmt: skip
    assert tree.free(7) == [
        ("this machine", 64 * GiB, 32 * GiB),
        ("control group /user/job", 2 * GiB, GiB + GiB // 4),
        ("control group /user", 8 * GiB, 5 * GiB),
    ]


def test_cgroup_v1_limit_above_machine_memory_is_no_limit(tree):
    tree.process(7, "5:cpu:/a\n4:hugetlb,memory:/a/b\n0::/")
    tree.group("memory/a/b", memory__limit_in_bytes=GiB, memory__usage_in_bytes=GiB // 2,
               memory__stat="inactive_file 1\ntotal_inactive_file 1024")  # fmt: skip
    tree.group("memory/a", memory__limit_in_bytes=(1 << 63) - 4096, memory__usage_in_bytes=5)
    assert tree.free(7)[1:] == [("control group /a/b", GiB, GiB // 2 + 1024)]


@pytest.mark.parametrize(
    "line",
    ["0::/docker/4f2", "0::/../other", "4:memory:/docker/4f2"],
    ids=["of the host's namespace", "outside this namespace", "version 1, of the host's"],
)
def test_limit_of_the_mounted_cgroup_counts_in_a_container(tree, line):
    tree.process(7, line)
    names = ("memory__max", "memory__current")
    base = "."
    if "memory" in line:
        names, base = ("memory__limit_in_bytes", "memory__usage_in_bytes"), "memory"
    tree.group(base, **dict(zip(names, (4 * GiB, GiB), strict=True)))
    assert tree.free(7)[1:] == [("control group /", 4 * GiB, 3 * GiB)]


def test_threaded_group_has_the_limit_of_its_parent(tree):
    tree.process(7, "0::/job/threads")
    tree.group("job", memory__max=GiB, memory__current=0)
    tree.group("job/threads", cgroup__type="threaded")
    assert tree.free(7)[1:] == [("control group /job", GiB, GiB)]


def test_process_that_is_gone_has_only_the_machines_limit(tree):
    assert tree.free(8) == [("this machine", 64 * GiB, 32 * GiB)]


def test_pressure_is_read_from_events_and_stalls(tree):
    tree.process(7, "0::/job")
    some = "some avg10={} avg60=1.00 avg300=0.50 total=9\nfull avg10=90.00 avg60=0 avg300=0 total=1"
    tree.group("job", memory__max=GiB, memory__current=0, memory__events="low 9\nhigh 3\nmax 4",
               memory__pressure=some.format("12.50"))  # fmt: skip
    tree.machine(64 * GiB, GiB, some.format("2.25"))
    machine, job = tree.host.levels(7)
    assert tree.host.stress(job) == cgroups.Stress(events=7, stalled=12.5)
    assert tree.host.stress(machine) == cgroups.Stress(stalled=2.25)
    assert cgroups.stalled("") == cgroups.stalled("full avg10=3.00") == 0.0


def test_real_control_group_is_read(tmp_path):
    """This test makes a real control group, and needs the right to. The others only write files."""
    made = None
    root = cgroups.ROOT
    for base, limit in ((root, "memory.max"), (root / "memory", "memory.limit_in_bytes")):
        group = base / f"gpupool-test-{os.getpid()}"
        with suppress(OSError):
            group.mkdir()
            if not (group / limit).exists():  # no group appeared: this is another file system
                group.rmdir()
                continue
            (group / limit).write_text(str(512 * MiB))
            made = group
            break
    if made is None:
        pytest.skip("this process may not make a control group")
    child = os.fork()
    if not child:
        time.sleep(600)
        os._exit(0)
    try:
        (made / "cgroup.procs").write_text(str(child))
        levels = Host().levels(child)
        (found,) = [level for level in levels if level.key == str(made)]
        assert found.limit == 512 * MiB
        assert 0 < found.free <= 512 * MiB
        assert Host().available(child) <= 512 * MiB
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        wait_until(lambda: _removed(made), "the group is empty")


def _removed(group):
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


# ---------------------------------------------------------------------- the reserve


@pytest.mark.parametrize(
    ("value", "limit", "machine", "group"),
    [
        ("10%", 64 * GiB, 64 * GiB // 10, 64 * GiB // 10),
        ("10%", 5 * GiB, GiB, GiB),
        ("10%", 2 * GiB, GiB // 2, GiB // 2),
        ("50%", 2 * GiB, GiB, GiB),
        ("0%", 2 * GiB, 0, 0),
        (0, 2 * GiB, 0, 0),
        ("3GiB", 64 * GiB, 3 * GiB, 3 * GiB),
        ("3GiB", 8 * GiB, 3 * GiB, 2 * GiB),
    ],
)
def test_reserve_is_a_part_of_each_limit(value, limit, machine, group):
    reserve = read_host_reserve(value)
    found = reserve.of(limit, machine=True), reserve.of(limit, machine=False)
    assert found == (pytest.approx(machine, abs=1), pytest.approx(group, abs=1))


@pytest.mark.parametrize("value", ["100%", "-1%", "much", True, 1.5])
def test_reserve_that_makes_no_sense_is_refused(value):
    with pytest.raises(ValueError, match=r"not a s|Per cent"):
        read_host_reserve(value)


def test_container_with_2_gib_can_suspend_1_gib_of_state(tree):
    tree.process(7, "0::/job")
    tree.group("job", memory__max=2 * GiB, memory__current=300 * MiB)

    async def scenario():
        room = HostRoom(tree.host)
        assert await room.take("a", 7, GiB) == ("", False)
        room.give("a")
        why, lasts = await room.take("a", 7, 1300 * MiB)
        assert why.startswith("1.3 GiB of GPU state has no room in host memory now: control group")
        assert not lasts
        why, lasts = await room.take("a", 7, 2 * GiB)
        assert lasts
        assert "cannot be moved to host memory here: control group /job may use 2 GiB" in why
        assert "512 MiB must stay free (c.GPUPool.host_reserve)" in why
        room.close()

    asyncio.run(scenario())


def test_two_suspends_share_the_room_of_their_common_cgroup(tree):
    for pid, name in ((7, "one"), (8, "two")):
        tree.process(pid, f"0::/pod/{name}")
    tree.process(9, "0::/other")
    tree.group("pod", memory__max=16 * GiB, memory__current=GiB)

    async def scenario():
        room = HostRoom(tree.host, HostReserve)
        # There is room for one of the two states, but not for both. The limit is 16 GiB, and 1 GiB
        # is in use. A suspend must leave 1.8 GiB free: the reserve of 1.6 GiB and one eighth of it.
        found = await asyncio.gather(room.take("a", 7, 8 * GiB), room.take("b", 8, 8 * GiB))
        assert sorted(bool(why) for why, _ in found) == [False, True]
        assert await room.take("c", 9, 8 * GiB) == ("", False)  # another group of this machine
        room.give("a")
        room.give("b")
        assert await room.take("b", 8, 8 * GiB) == ("", False)
        assert (await room.take("d", 9, 20 * GiB))[0]
        assert await room.take("e", 9, 0) == ("", False)  # a state of 0 bytes needs no host memory
        room.close()

    asyncio.run(scenario())


def test_room_for_suspended_state_excludes_the_reserve(tree):
    tree.process("self", "0::/job")
    tree.group("job", memory__max=8 * GiB, memory__current=2 * GiB)
    room = HostRoom(tree.host, lambda: HostReserve(size=GiB))
    assert room.machine() == 6 * GiB - GiB - GiB // 8
    assert room.never([Level(None, 4 * GiB, 0)], 2 * GiB) == ""
    room.close()


# ---------------------------------------------------------------------- with a broker


class HostBroker(kit.Broker):
    """A broker that reads the files about host memory from a folder beside its socket."""

    module = "tests.broker.host_broker"

    def __init__(self, folder, **config):
        super().__init__(folder, **config)
        self.tree = Tree(self.folder / "host")


@pytest.fixture
def parts():
    return HostBroker, Program, {"attach": "lazy", "quiet_after": 0.3, "max_swap_overhead": 0}


@pytest.fixture
def broker(make_broker):
    return make_broker().started


@pytest.fixture
def program(broker):
    made = []

    def make(name, group="", **request):
        one = Program(broker, name, **{"memory": 400 * MiB, **request})
        broker.tree.process(one.process.pid, f"0::/{group}")
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


def in_group(broker, free, limit=2 * GiB, events=0):
    broker.tree.group("job", memory__max=limit, memory__current=limit - free,
                      memory__events=f"high 0\nmax {events}")  # fmt: skip


def suspended(broker, one, size=64 * MiB):
    """Let a program allocate, become idle and be suspended; ``check`` can read its bytes later."""
    one.begin(size, byte=1)
    one.wait_state("idle")
    one.server.call("release", session=one.session)
    one.wait_state("detached")
    assert one.status()["suspended_bytes"] == size + CONTEXT


def test_suspend_leaves_the_reserve_of_the_control_group(broker, program):
    in_group(broker, 650 * MiB)  # a suspend must leave 576 MiB: 9/8 of the reserve
    one = program("one", "job")
    one.begin(64 * MiB, byte=1)
    one.wait_state("idle")
    one.server.call("release", session=one.session)
    row = wait_until(lambda: broker.rows("refuse"), "the refusal")[-1]
    assert "control group /job has 650 MiB left, and 512 MiB must stay free" in row["reason"]
    assert one.state() == "idle"
    assert "The pool tries again by itself" in one.status()["stays_reason"]
    in_group(broker, 700 * MiB)
    one.wait_state("detached", seconds=60)
    assert one.do("check") == 64 * MiB


def test_host_note_names_a_low_limit_before_any_kernel_waits(broker, program):
    in_group(broker, 150 * MiB, limit=256 * MiB)
    one = program("one", "job")
    one.begin(64 * MiB)
    note = wait_until(lambda: one.status()["host_note"], "the note")
    assert note.startswith("400 MiB of GPU state cannot be moved to host memory here: control ")
    assert "ask your administrator to raise the memory limit" in note
    two, three = program("two"), program("three")
    two.begin(MiB)
    assert two.do("storm") is None
    one.wait_state("idle")
    three.tell("context")
    reason = "1 idle kernel that cannot be suspended, because host memory is short"
    wait_until(lambda: reason in (three.status()["wait_reason"] or ""), "the reason of the wait")
    # cuInit has bound ``three`` to one of the two devices. Make both devices free, because the test
    # does not know which device this is.
    in_group(broker, GiB)
    assert two.do("calm")["error"] == 0
    assert three.answer() is None


def test_limit_below_the_slice_leads_to_a_warning(make_broker):
    """The pool cannot suspend this program, so other kernels once waited without end."""
    broker = make_broker(
        preempt=["class"], unsuspendable="ask", unsuspendable_after=["1s", "1s", "1s"]
    ).started
    in_group(broker, 150 * MiB, limit=256 * MiB)
    made = [Program(broker, "one", memory=400 * MiB, priority="batch")]
    broker.tree.process(made[0].process.pid, "0::/job")
    try:
        made[0].begin(300 * MiB)
        assert made[0].do("storm") is None
        for number in (0, 1):
            made.append(Program(broker, f"other {number}", memory=400 * MiB))
            broker.tree.process(made[-1].process.pid, "0::/")
        made[1].begin(MiB)
        assert made[1].do("storm") is None
        made[2].tell("context")
        (told, *_) = wait_until(lambda: broker.rows("warn"), "the warning")
        assert told["session"] == made[0].session
        assert "control group /job may use 256 MiB" in told["reason"]
        assert made[0].do("calm")["error"] == 0
    finally:
        for one in made:
            one.close()


def test_largest_state_returns_to_a_gpu_if_host_memory_is_low(broker, program):
    in_group(broker, 2 * GiB)
    small, large, elsewhere = program("small", "job"), program("large", "job"), program("else")
    suspended(broker, small, 16 * MiB)
    suspended(broker, large, 128 * MiB)
    suspended(broker, elsewhere, 200 * MiB)
    busy = program("busy")
    busy.begin(MiB)
    assert busy.do("storm") is None  # one device stays free
    in_group(broker, 400 * MiB)
    large.wait_state("idle")
    assert large.status()["host_note"].startswith(
        "Host memory is short: control group /job has 400 MiB of 2 GiB left. So the GPU state of "
        "this kernel (160 MiB) goes back to a GPU."
    )
    note = wait_until(lambda: small.status()["host_note"], "what there is no room for")
    assert "no GPU has room for the GPU state of this kernel (48 MiB)" in note
    assert not elsewhere.status()["host_note"]
    assert {small.state(), elsewhere.state()} == {"detached"}
    # The kernel keeps its GPU while host memory is short, even after a user releases the slice.
    large.server.call("release", session=large.session)
    assert "The host memory that this kernel may use" in large.status()["stays_reason"]
    assert large.state() == "idle"
    in_group(broker, 2 * GiB)
    large.wait_state("detached")
    assert large.status()["host_note"] == ""
    assert busy.do("calm")["error"] == 0
    assert large.do("check") == 128 * MiB
    assert small.do("check") == 16 * MiB


def test_new_cgroup_memory_events_bring_state_back_to_a_gpu(broker, program):
    in_group(broker, 700 * MiB)
    one = program("one", "job")
    suspended(broker, one)
    wait_until(lambda: one.status()["host_note"] == "", "nothing is short")
    # The broker must read this count first. It then sees that each later count is larger.
    in_group(broker, 700 * MiB, events=3)
    events = 3

    def back():
        nonlocal events
        events += 1
        in_group(broker, 700 * MiB, events=events)
        return one.state() in ("attaching", "idle")

    wait_until(back, "its state goes back", 60)
    assert one.do("check") == 64 * MiB


def test_low_memory_of_the_machine_counts_for_every_kernel(broker, program):
    one = program("one")
    suspended(broker, one)
    broker.tree.machine(64 * GiB, 5 * GiB)
    one.wait_state("idle")
    assert "this machine has 5 GiB of 64 GiB left" in one.status()["host_note"]
    broker.tree.machine(64 * GiB, 32 * GiB)
    wait_until(lambda: one.status()["host_note"] == "", "the end of it")
    one.server.call("release", session=one.session)
    one.wait_state("detached")
