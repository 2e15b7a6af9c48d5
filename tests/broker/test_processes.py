# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Identity, descent and death of processes; host memory."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from jupyter_gpupool import cgroups, procfs
from jupyter_gpupool.broker import sessions
from jupyter_gpupool.broker.transport.auth import Access, Peer, owner_of
from jupyter_gpupool.errors import RefusedError
from jupyter_gpupool.procfs import ProcessId

from .kit import wait_until

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def child():
    process = subprocess.Popen(SLEEP)
    yield process
    process.kill()
    process.wait(60)


def death_of(child, act, *, fallback=False):
    """Call ``act``, which must kill the child. Return when ``Death`` has reported its end."""

    async def main():
        loop = asyncio.get_running_loop()
        died = loop.create_future()
        watch = sessions.Death(procfs.identify(child.pid), lambda: died.set_result(None))
        if fallback:
            assert watch._descriptor is None
        act()
        await asyncio.wait_for(died, 60)

    return asyncio.run(main())


def test_killed_process_is_reported(child):
    death_of(child, child.kill)


def test_killed_process_is_reported_without_pidfd(child, monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    death_of(child, child.kill, fallback=True)


def test_process_that_reuses_a_pid_is_another_process(child):
    wrong = ProcessId(child.pid, procfs.identify(child.pid).start_time + 1)

    async def main():
        died = asyncio.Event()
        sessions.Death(wrong, died.set)
        await asyncio.wait_for(died.wait(), 60)

    asyncio.run(main())
    assert not procfs.alive(wrong)


def test_zombie_is_dead(child):
    root = procfs.identify(child.pid)
    child.kill()
    deadline = time.monotonic() + 20
    while procfs.alive(root):
        assert time.monotonic() < deadline
    assert procfs.identify(child.pid) is None


def test_closed_watch_reports_no_death(child):
    async def main():
        watch = sessions.Death(procfs.identify(child.pid), lambda: pytest.fail("reported"))
        watch.close()
        watch.close()
        child.kill()
        await asyncio.to_thread(child.wait, 20)
        await asyncio.sleep(0)

    asyncio.run(main())


def test_descendants_are_found_at_any_depth():
    script = (
        "import subprocess; p = subprocess.Popen(['sleep', '600']);"
        "print(p.pid, flush=True); p.wait()"
    )
    middle = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        grandchild = int(middle.stdout.readline())
        root = procfs.identify(middle.pid)
        assert procfs.descends(grandchild, root)
        assert procfs.descends(middle.pid, root)
        assert not procfs.descends(os.getpid(), root)
        assert [p.pid for p in procfs.descendants(root)] == [grandchild]
        assert procfs.kill([procfs.identify(grandchild)]) == []
        middle.wait(60)
        assert procfs.descendants(root) == []
    finally:
        middle.kill()
        middle.stdout.close()
        middle.wait(60)


def test_parent_does_not_replace_a_killed_child():
    script = (
        "import subprocess\n"
        "while True:\n"
        "    child = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL)\n"
        "    print(child.pid, flush=True)\n"
        "    child.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        child = procfs.identify(int(parent.stdout.readline()))
        assert procfs.kill_tree(procfs.identify(parent.pid)) == []
        assert parent.stdout.read() == ""  # the parent has started no other child
        assert parent.wait(60) == -signal.SIGKILL
        wait_until(lambda: not procfs.alive(child), "the end of the child")
    finally:
        parent.kill()
        parent.stdout.close()
        parent.wait(60)


def test_descendants_leave_out_a_broker_started_by_the_notebook():
    """A broker may be a child of the kernel whose descendants it must end. It leaves itself out."""
    script = (
        "import os, subprocess, sys\n"
        "from jupyter_gpupool import cgroups, procfs\n"
        "sleep = [sys.executable, '-c', 'input()']\n"
        "mine = subprocess.Popen(sleep, stdin=subprocess.PIPE)\n"
        "found = procfs.descendants(procfs.identify(os.getppid()))\n"
        "print({os.getpid(), mine.pid} & {process.pid for process in found})\n"
        "mine.communicate(b'\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "set()\n"


def test_kill_does_not_touch_a_reused_pid(child):
    wrong = ProcessId(child.pid, 1)
    assert procfs.kill([wrong]) == []
    assert child.poll() is None


def test_owners_have_names_and_groups():
    assert owner_of(0).name == "root"
    assert owner_of(4_000_000).name == "uid-4000000"


def test_access_decides_who_may_connect_and_act():
    mine = Access(machine_wide=False, own_uid=1000)
    mine.check_connect(Peer(1, 1000, 1000))
    mine.check_connect(Peer(1, 0, 0))
    with pytest.raises(RefusedError, match="serves only user id 1000"):
        mine.check_connect(Peer(1, 1001, 1001))
    everybodys = Access(machine_wide=True, own_uid=0, admins=("nobody",))
    everybodys.check_connect(Peer(1, 1001, 1001))
    assert everybodys.may_act(Peer(1, 1001, 1001), 1001)
    assert not everybodys.may_act(Peer(1, 1001, 1001), 1002)
    assert everybodys.may_act(Peer(1, 65534, 65534), 1002)
    assert everybodys.may_act(Peer(1, 0, 0), 1002)


MEMINFO = "MemTotal: 100 kB\nMemAvailable: 4096 kB\n"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/a/b\n", {}, 4096 << 10),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/b/memory.current": "5"}, 4096 << 10),
        ("0::/a/b\n", {"a/b/memory.max": "1000", "a/b/memory.current": "400"}, 600),
        (
            "0::/a/b\n",
            {
                "a/b/memory.max": "1000",
                "a/b/memory.current": "400",
                "a/memory.max": "500",
                "a/memory.current": "450",
            },
            50,
        ),
        (
            "0::/a/b\n",
            {
                "a/memory.max": "500",
                "a/memory.current": "450",
                "a/memory.stat": "anon 1\ninactive_file 100\n",
            },
            150,
        ),
        ("0::/a/b\n", {"a/memory.max": "500", "a/memory.current": "600"}, 0),
        (
            "4:memory:/x\n0::/\n",
            {"memory/x/memory.limit_in_bytes": "900", "memory/x/memory.usage_in_bytes": "100"},
            800,
        ),
    ],
)
def test_host_memory_is_the_least_of_machine_and_cgroups(tmp_path, groups, files, expected):
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    root.mkdir()
    (proc / "meminfo").write_text(MEMINFO)
    (proc / "self" / "cgroup").write_text(groups)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert cgroups.available(root=root, proc=proc) == expected


def test_host_memory_of_this_machine_is_readable():
    assert cgroups.available() > 0
    assert cgroups.available(os.getpid()) > 0
    assert cgroups.available(2**22 - 1) > 0  # no such process: only the machine's limit applies
