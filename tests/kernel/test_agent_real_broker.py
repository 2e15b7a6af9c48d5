# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The agent and the provisioner with the real broker, on the emulated driver."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest
from harness import Kernel, private_connection_file
from jupyter_client import KernelManager
from traitlets.config import Config

from jupyter_gpupool.client import Client
from jupyter_gpupool.starting import ensure_broker
from tests import marks
from tests.broker import forks

GiB = 1 << 30
MiB = 1 << 20

ALLOCATE = """
from cuda.core import Device
gpu = Device(); gpu.set_current()
block = gpu.allocate({size}, stream=gpu.default_stream)
print(gpu.uuid)
"""


class Pool:
    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.socket = folder / "broker.sock"
        self.config = {
            "GPUPool": {
                "emulate": "1x4GiB",
                "state_dir": str(folder / "state"),
                "idle_timeout": 3600.0,
                "default_memory": 3 * GiB,
                "default_limit": 3 * GiB,
                "attach": "cell",
                **settings,
            }
        }
        self.kernels: list[Kernel] = []
        self.begin()

    def begin(self) -> None:
        with forks.instead_of_launches():
            ensure_broker(self.config, str(self.socket))
        self.client = Client(self.socket)

    def kernel(self, **options: Any) -> Kernel:
        manager = KernelManager(
            kernel_name="gpupool-python3",
            transport="ipc",
            connection_file=private_connection_file(),
            config=Config({"GPUPoolProvisioner": options, **self.config}),
        )
        manager.start_kernel()
        kernel = Kernel(manager)
        self.kernels.append(kernel)
        return kernel

    def session(self, kernel: Kernel) -> dict[str, Any]:
        sessions = self.client.call("status")["sessions"]
        return next(s for s in sessions if s["pid"] == kernel.manager.provisioner.pid)

    def until(self, kernel: Kernel, **fields: Any) -> dict[str, Any]:
        deadline = time.monotonic() + 30
        while True:
            session = self.session(kernel)
            if all(session[name] == value for name, value in fields.items()):
                return session
            assert time.monotonic() < deadline, (fields, session)
            time.sleep(0.01)

    def kill(self) -> None:
        pid = self.client.call("status")["pid"]
        os.kill(pid, signal.SIGKILL)
        self.client.close()

    def end(self) -> None:
        for kernel in self.kernels:
            kernel.stop()
        os.kill(self.client.call("status")["pid"], signal.SIGTERM)
        self.client.close()


@pytest.fixture
def pool_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Pool]]:
    pools: list[Pool] = []
    with marks.short_folder() as folder:
        monkeypatch.setenv("GPUPOOL_SOCKET", str(folder / "broker.sock"))

        def make(**settings: Any) -> Pool:
            pools.append(Pool(folder, **settings))
            return pools[-1]

        yield make
        for pool in pools:
            pool.end()


def test_two_kernels_take_turns_and_keep_their_data(pool_of: Callable[..., Pool]) -> None:
    pool = pool_of()
    first, second = pool.kernel(), pool.kernel()
    assert first.run(ALLOCATE.format(size=64 * MiB)).status == "ok"
    first.run("stream = gpu.create_stream(); block.fill(7, stream=stream); stream.sync()")
    pool.until(first, state="idle")
    # The first kernel is idle, so the pool gives the slice of the first kernel to the second.
    assert second.run(ALLOCATE.format(size=64 * MiB)).status == "ok"
    seen = pool.until(first, state="detached")
    assert seen["suspended_bytes"] >= 64 * MiB
    back = first.run("block.fill(8, stream=stream); stream.sync(); print('back')")
    assert back.text == "back\n"
    assert pool.session(first)["resumes"] == 1


def test_gpu_why_shows_the_slice_and_who_may_take_it(
    pool_of: Callable[..., Pool],
) -> None:
    pool = pool_of()
    kernel = pool.kernel()
    assert kernel.run("%gpu why").text == "It has no slice and waits for none."
    kernel.run(ALLOCATE.format(size=1 << 20))
    deadline = time.monotonic() + 30
    while True:
        # The page may show the cell's CUDA calls for some time after the cell. Then %gpu why still
        # says "active".
        pool.until(kernel, state="idle")
        (shown,) = kernel.run("%gpu why").outputs
        text = shown["data"]["text/plain"]
        if not text.startswith("It is active and has 3 GiB on GPU 0.\n"):
            break
        assert time.monotonic() < deadline
    assert text.startswith("It is idle and keeps 3 GiB on GPU 0.\nNo kernel waits")
    assert "<p " in shown["data"]["text/html"]


def test_cell_waits_for_a_busy_slice(pool_of: Callable[..., Pool]) -> None:
    pool = pool_of()
    first, second = pool.kernel(), pool.kernel()
    busy = first.start("import threading; print('in'); threading.Event().wait(60)")
    busy.until("stream")
    waiting = second.start("print('mine')")
    waiting.shows("Waiting for a GPU slice of 3 GiB: position 1 of 1")
    assert pool.until(second, state="queued")["queue_position"] == 1
    first.manager.interrupt_kernel()
    busy.done()
    assert waiting.done().outputs == [{"name": "stdout", "text": "mine\n"}]


def test_an_interrupted_wait_leaves_the_queue(pool_of: Callable[..., Pool]) -> None:
    pool = pool_of()
    first, second = pool.kernel(), pool.kernel()
    busy = first.start("import threading; print('in'); threading.Event().wait(60)")
    busy.until("stream")
    waiting = second.start("ran = True")
    waiting.until("display_data")
    second.manager.interrupt_kernel()
    assert waiting.done().status == "error"
    pool.until(second, state="detached", queue_position=None)
    first.manager.interrupt_kernel()
    busy.done()
    assert second.run("'ran' in globals()").text == "False"


def test_slice_grows_for_one_cell_and_shrinks_after_it(pool_of: Callable[..., Pool]) -> None:
    pool = pool_of(default_memory=1 * GiB, default_limit=1 * GiB)
    kernel = pool.kernel()
    kernel.run(ALLOCATE.format(size=64 * MiB))
    assert pool.session(kernel)["granted_bytes"] == 1 * GiB
    inside = kernel.run("%%gpu 2GiB\n%gpu")
    assert "2 GiB on GPU 0" in inside.text
    assert pool.until(kernel, granted_bytes=1 * GiB)["request"]["memory"] == 1 * GiB


def test_cell_that_asks_for_more_than_is_free_waits(pool_of: Callable[..., Pool]) -> None:
    pool = pool_of(default_memory=1 * GiB, default_limit=1 * GiB)
    kernel, other = pool.kernel(), pool.kernel(memory="2GiB")
    kernel.run("pass")
    busy = other.start("import threading; print('in'); threading.Event().wait(60)")
    busy.until("stream")
    cell = kernel.start("%%gpu 3GiB\nprint('mine')")
    cell.until("display_data")
    other.manager.interrupt_kernel()
    busy.done()
    assert cell.done().outputs == [{"name": "stdout", "text": "mine\n"}]


def test_request_beyond_the_pool_names_the_maximum(pool_of: Callable[..., Pool]) -> None:
    pool = pool_of(max_memory_per_kernel=3 * GiB)
    kernel = pool.kernel()
    cell = kernel.run("%gpu 99GiB")
    assert cell.status == "error"
    assert "99 GiB" in cell.text
    assert "3 GiB" in cell.text


def test_out_of_memory_names_the_next_size(pool_of: Callable[..., Pool]) -> None:
    pool = pool_of(default_memory=1 * GiB, default_limit=1 * GiB, max_memory_per_kernel=3 * GiB)
    kernel = pool.kernel()
    cell = kernel.run(ALLOCATE.format(size=8 * GiB))
    assert cell.status == "error"
    assert "of device memory granted to it. It may ask for up to 3 GiB." in cell.text
    assert "Type: %gpu 2GiB" in cell.text


def test_kernel_survives_the_kill_of_its_broker(pool_of: Callable[..., Pool]) -> None:
    pool = pool_of()
    kernel = pool.kernel()
    kernel.run(ALLOCATE.format(size=64 * MiB))
    held = kernel.start("import threading; go = threading.Event(); print('in'); go.wait(60)")
    held.until("stream")
    pool.kill()
    pool.begin()
    deadline = time.monotonic() + 30
    while "cell" not in [hold["kind"] for hold in pool.session(kernel)["holds"]]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    kernel.manager.interrupt_kernel()
    held.done()
    pool.until(kernel, state="idle", holds=[])
    stream = "stream = gpu.create_stream(); block.fill(7, stream=stream); stream.sync()"
    assert kernel.run(stream).status == "ok"


def test_no_thread_of_the_agent_takes_an_interrupt(pool_of: Callable[..., Pool]) -> None:
    """Otherwise an interrupt while a thread starts would not end a wait of the main thread."""
    pool = pool_of()
    kernel = pool.kernel()
    kernel.run(ALLOCATE.format(size=64 * MiB))
    pool.kill()
    pool.begin()
    # The agent has connected again, so it has a new thread. The new broker reads the state "idle"
    # from its journal, so the state alone does not show this.
    pool.until(kernel, state="idle", agent=True)
    shown = kernel.run(
        "import threading\n"
        "for thread in threading.enumerate():\n"
        "    if thread.name.startswith('gpupool-'):\n"
        "        status = open(f'/proc/self/task/{thread.native_id}/status').read()\n"
        "        blocked = int(status.split('SigBlk:')[1].split()[0], 16)\n"
        "        print(thread.name, bool(blocked & 1 << 1))\n"  # SIGINT is signal 2
    ).text
    found = dict(line.split() for line in shown.splitlines())
    assert {"gpupool-link", "gpupool-client", "gpupool-reports"} <= set(found)
    assert set(found.values()) == {"True"}


def test_kernel_releases_its_slice_and_attaches_again(pool_of: Callable[..., Pool]) -> None:
    pool = pool_of(attach="manual")
    kernel = pool.kernel()
    kernel.run("pass")
    assert pool.session(kernel)["granted_bytes"] == 0
    assert kernel.run("%gpu attach").text.startswith("Attached: 3 GiB on GPU ")
    pool.until(kernel, state="idle")
    kernel.run("x = 1")
    assert pool.session(kernel)["granted_bytes"] == 3 * GiB
    kernel.run("%gpu release")
    pool.until(kernel, state="detached", granted_bytes=0)
    kernel.run("x = 2")
    assert pool.session(kernel)["granted_bytes"] == 0
