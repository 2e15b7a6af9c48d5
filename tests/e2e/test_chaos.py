# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Kills processes of every kind with SIGKILL at random moments; no notebook may lose a byte.

In the long form, five notebooks share two devices that have room for four. In the short form,
three notebooks share one device that has room for two. Every cell of a notebook checks all bytes
of that notebook. Meanwhile, each round kills some processes: the broker, its children, a Jupyter
Server with a kernel, or a kernel that is attached, waiting, suspended or moving. A round passes if
every notebook then runs further cells without a wrong byte, and if nothing of the killed processes
remains.

A failure prints its seed. ``GPUPOOL_CHAOS_SEED=... pytest tests/e2e/test_chaos.py`` repeats the
kills at the same moments. But the load of the machine may differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.broker import forks

from . import cells
from .kit import LOOK, MiB, Sampler, command_of, reap, until

#: For each form: its devices, and its number of notebooks, which is one more than fits.
SHORT, LONG = ("1x640MiB,context=32MiB", 3), ("2x640MiB,context=32MiB", 5)

#: The MiB of each notebook on its device, in the short form and in the long form. The short form
#: has one round of each kind. The long form has a hundred rounds.
SMALL, LARGE = 24, 96

#: The size of a slice in bytes. Two slices fit on a device.
SLICE = 256 * MiB

#: The kinds of rounds, named after what they kill. The short form plays each kind once.
KINDS = (
    "broker",
    "worker",
    "attached kernel",
    "queued kernel",
    "suspended kernel",
    "kernel at any moment",
    "broker and kernel",
    "broker and workers",
    "monitor",
    "server",
)


#: For each policy: the pool's options, and the shortest and the longest pause between two cells in
#: seconds. Under ``lazy``, the pauses are longer, so that kernels become idle: the broker checks
#: only four times a second whether a kernel's device is idle.
POLICIES = {
    "cell": ({"attach": "cell"}, (0.0, 0.3)),
    "lazy": ({"attach": "lazy", "quiet_after": 0.1, "max_swap_overhead": 0.0}, (0.3, 1.0)),
}


class Notebook:
    """A notebook that is never killed and must always recover.

    It runs cells until the test stops it, and counts the cells that found all bytes right.
    """

    def __init__(self, pool, number, rng, data):
        self.pool, self.number, self.rng, self.data = pool, number, rng, data
        self.attach = pool.config["attach"]
        self.kernel = None
        self.checks = 0
        self.refused = []
        #: The path of a file, or None. With a path, the next cell runs until the file exists.
        self.busy_until = None
        self.stopping = False

    async def start(self):
        self.kernel = await self.pool.kernel(f"notebook {self.number}", memory=SLICE)
        self.pid = self.kernel.pid
        (await self.kernel.run(cells.setup(self.number + 1, self.data))).check()
        return self

    async def work(self):
        key, half_done = 0, False
        while not self.stopping:
            await asyncio.sleep(self.rng.uniform(*POLICIES[self.attach][1]))
            code = "block.verify()"
            if half_done:
                code = f"block.write({key}).verify()"
            elif self.busy_until is not None:
                busy = cells.busy if self.attach == "cell" else cells.computing
                code = f"block.verify()\n{busy(self.busy_until)}"
                self.busy_until = None
            elif self.rng.random() < 0.3:
                key += 1
                code = f"block.verify().write({key}).compute()"
            cell = await self.kernel.run(code, timeout=120)
            if cell.ok:
                self.checks += 1
                half_done = False
                continue
            if self.attach == "lazy":
                # If no broker runs, a CUDA call of a kernel without a slice fails. So the cell may
                # have failed in any line, and its write may be half done.
                assert "CUDA_ERROR_SYSTEM_NOT_READY" in cell.evalue, cell.traceback
                assert str(self.pool.socket) in cell.text, cell
                self.refused.append((time.monotonic(), cell.evalue))
                half_done = half_done or "write" in code
                continue
            # If no broker runs, a cell of a kernel without a slice may fail before its first line.
            # So its write has not begun.
            assert cell.ename != "AssertionError", cell.traceback
            assert str(self.pool.socket) in cell.evalue + cell.traceback, (
                f"{cell.ename}: {cell.evalue}"
            )
            self.refused.append((time.monotonic(), cell.evalue))
            if "write" in code:
                key -= 1

    async def get_on(self, cells_more=2):
        """Wait until the notebook has run ``cells_more`` more cells and found all bytes right."""
        target = self.checks + cells_more
        await until(
            lambda: self.checks >= target,
            f"notebook {self.number} to get on",
            timeout=120,
            show=lambda: self.pool.peek(self.kernel.kernel_id),
        )


class Chaos:
    def __init__(self, pool, seed, data, count):
        self.pool, self.rng, self.data, self.count = pool, random.Random(seed), data, count
        self.round = 0
        self.figures = {}

    # -------------------------------------------------------------- the actors

    async def begin(self):
        self.notebooks = await asyncio.gather(
            *(
                Notebook(self.pool, i, random.Random(self.rng.random()), self.data).start()
                for i in range(self.count)
            )
        )
        self.tasks = [asyncio.create_task(n.work()) for n in self.notebooks]

    async def end(self):
        for notebook in self.notebooks:
            notebook.stopping = True
        await asyncio.wait_for(asyncio.gather(*self.tasks), 120)

    def watch(self):
        """If a notebook has failed, raise its error."""
        for task in self.tasks:
            if task.done():
                task.result()

    async def moment(self, most=0.5):
        await asyncio.sleep(self.rng.uniform(0.0, most))

    async def play(self, kind):
        """Play one round: kill, then check that everything recovers."""
        self.round += 1
        before = {n.number: n.kernel.pid for n in self.notebooks}
        begun = time.monotonic()
        await getattr(self, kind.replace(" ", "_"))()
        self.watch()
        living = asyncio.gather(*(n.get_on() for n in self.notebooks))
        done, _ = await asyncio.wait(
            [living, *self.tasks], timeout=180, return_when=asyncio.FIRST_COMPLETED
        )
        self.watch()
        assert living in done, "the notebooks made no progress"
        await living
        assert before == {n.number: n.kernel.pid for n in self.notebooks}
        await until(
            lambda: len(self.pool.sessions()) == self.count,
            "only the notebooks' sessions left",
            show=self.pool.sessions,
        )
        status = self.pool.check_ledger()
        assert not any(d["drained_reason"] for d in status["devices"]), status["devices"]
        self.figure(f"{kind}: round, seconds", time.monotonic() - begun)

    def figure(self, what, value):
        self.figures.setdefault(what, []).append(round(value, 3))

    # -------------------------------------------------------------- victims

    async def victim(self, code=None):
        kernel = await self.pool.kernel(f"victim {self.round}", memory=SLICE)
        if code is not None:
            (await kernel.run(code)).check()
        return kernel

    async def bury(self, kernel, cell=None):
        """Wait for the end of a killed kernel's session; check that its process has ended, too."""
        pid, name = kernel.pid, kernel.kernel_id
        begun = time.monotonic()
        reap(pid)
        await until(lambda: kernel.session() is None, "the killed kernel's session to end")
        self.figure("slice back, seconds", time.monotonic() - begun)
        if cell is not None:
            cell.cancel()
            await asyncio.gather(cell, return_exceptions=True)
        await kernel.stop(now=True)
        assert not psutil.pid_exists(pid), f"kernel {name} is still there"

    async def broker(self):
        await self.moment()
        self.pool.kill_broker()
        await self.moment(1.0)
        await self.revive()

    async def revive(self):
        """Start a broker again: it continues with the journal of the killed broker."""
        begun = time.monotonic()
        await asyncio.to_thread(self.pool.start_broker)
        self.figure("broker restart, seconds", time.monotonic() - begun)

    async def worker(self):
        await self.moment()
        worker = self.rng.choice(self.pool.workers())
        worker.kill()

    async def monitor(self):
        """Kill the monitor, which reads NVML. Without a monitor, the broker grants no slice."""
        await self.moment()
        broker = psutil.Process(self.pool.status()["pid"])
        found = [p for p in broker.children() if "child_programs monitor" in command_of(p)]
        assert found, [command_of(p) for p in broker.children()]
        found[0].kill()

    async def broker_and_workers(self):
        """Kill the broker with its children; then let two starters of a broker compete."""
        await self.moment()
        status = self.pool.status()
        children = psutil.Process(status["pid"]).children()
        self.pool.kill_broker()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        await self.moment(0.3)
        await asyncio.gather(self.revive(), self.revive())

    async def attached_kernel(self):
        kernel = await self.victim(cells.setup(900 + self.round, self.data))
        flag = self.pool.folder / "never"
        cell = asyncio.create_task(kernel.run(f"block.verify()\n{cells.busy(flag)}"))
        await until(lambda: (kernel.session() or {}).get("state") == "active", "an attached victim")
        await self.moment(0.3)
        kernel.kill()
        await self.bury(kernel, cell)

    async def queued_kernel(self):
        flag = self.pool.folder / f"go-{self.round}"
        kernel = await self.victim()
        for notebook in self.notebooks:
            notebook.busy_until = flag
        try:
            await until(
                lambda: sum(s["state"] == "active" for s in self.pool.sessions()) == self.count - 1,
                "all but one notebook to be busy",
                show=self.pool.sessions,
            )
            cell = asyncio.create_task(kernel.run(cells.setup(900, self.data), timeout=120))
            await until(
                lambda: (kernel.session() or {}).get("state") == "queued",
                "a waiting victim",
                show=self.pool.sessions,
            )
            assert (kernel.session() or {})["wait_reason"], "it waits without a reason"
            await self.moment(0.3)
            kernel.kill()
            await self.bury(kernel, cell)
        finally:
            flag.touch()

    async def suspended_kernel(self):
        kernel = await self.victim(cells.setup(900 + self.round, self.data))
        self.pool.call("release", session=kernel.session()["id"])
        await until(
            lambda: (kernel.session() or {}).get("state") == "detached",
            "a suspended victim",
            show=kernel.session,
        )
        assert kernel.session()["suspended_bytes"] >= self.data * MiB
        await self.moment(0.3)
        kernel.kill()
        await self.bury(kernel)

    async def kernel_at_any_moment(self):
        kernel = await self.victim(cells.setup(900 + self.round, self.data))
        release = self.rng.random() < 0.7
        if release:
            self.pool.call("release", session=kernel.session()["id"])
        cell = None
        if self.rng.random() < 0.5:
            cell = asyncio.create_task(kernel.run("block.verify()"))
        await self.moment(0.25)
        kernel.kill()
        await self.bury(kernel, cell)

    async def broker_and_kernel(self):
        kernel = await self.victim(cells.setup(900 + self.round, self.data))
        if self.rng.random() < 0.5:
            self.pool.call("release", session=kernel.session()["id"])
        await self.moment(0.2)
        self.pool.kill_broker()
        await self.moment(0.2)
        kernel.kill()
        await self.moment(0.5)
        await self.revive()
        await self.bury(kernel)

    async def server(self):
        server = await Server(self.pool, self.round, self.data).start()
        try:
            await server.notebook(900 + self.round)
            if self.rng.random() < 0.5:
                session = self.pool.session_of(server.kernel_id)
                self.pool.call("release", session=session["id"])
            await self.moment()
            server.process.kill()
            await until(
                lambda: self.pool.session_of(server.kernel_id) is None,
                "the session of the killed server's kernel to end",
            )
        finally:
            await server.stop()


class Server:
    """A real Jupyter Server with one Pooled GPU kernel in it."""

    def __init__(self, pool, number, data):
        self.pool, self.number, self.data = pool, number, data

    async def start(self):
        self.log = self.pool.folder / f"server-{self.number}.log"
        with open(self.log, "wb") as log:
            command = [
                *(sys.executable, "-m", "jupyter_server", "--no-browser", "--allow-root"),
                *("--ServerApp.port=0", "--IdentityProvider.token=e2e"),
                # With TCP, another process could bind the kernel's port before the kernel does.
                "--KernelManager.transport=ipc",
                "--LanguageServerManager.autodetect=False",  # this would start Node, npm and R
                f"--GPUPoolProvisioner.memory={SLICE} B",
                f"--ServerApp.root_dir={self.pool.folder}",
            ]
            self.process = forks.jupyter_server(command, env=dict(os.environ), log=log)
        found = await until(
            lambda: re.search(r"http://127\.0\.0\.1:\d+/", self.log.read_text()),
            "the Jupyter Server to listen",
        )
        self.url = found[0]
        return self

    async def notebook(self, seed):
        """Start a kernel by REST and put data on its device, as JupyterLab would."""
        from jupyter_client.asynchronous import AsyncKernelClient
        from tornado.httpclient import AsyncHTTPClient

        deadline = time.monotonic() + 30
        while True:
            try:
                answer = await AsyncHTTPClient().fetch(
                    f"{self.url}api/kernels",
                    method="POST",
                    body=json.dumps({"name": "gpupool-python3"}),
                    headers={"Authorization": "token e2e"},
                    request_timeout=60,
                )
                break
            except ConnectionRefusedError:
                # The server prints its address before it accepts connections at that address.
                assert time.monotonic() < deadline, self.log.read_text()
                await asyncio.sleep(LOOK)
        self.kernel_id = json.loads(answer.body)["id"]
        client = AsyncKernelClient()
        runtime = Path(os.environ["JUPYTER_RUNTIME_DIR"])
        client.load_connection_file(str(runtime / f"kernel-{self.kernel_id}.json"))
        client.start_channels()
        try:
            await self.ready(client)
            reply = await client.execute_interactive(
                cells.setup(seed, self.data),
                allow_stdin=False,
                timeout=60,
                output_hook=lambda _: None,
            )
            assert reply["content"]["status"] == "ok", reply["content"]
        finally:
            client.stop_channels()

    async def ready(self, client):
        """Wait until the kernel answers.

        Repeat the wait if it fails: the client did not start the kernel, so it may report a slow
        kernel as dead.
        """
        deadline = time.monotonic() + 60
        while True:
            try:
                return await client.wait_for_ready(timeout=60)
            except RuntimeError:
                assert time.monotonic() < deadline, self.log.read_text()

    async def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()


async def chaos(pool, seed, kinds, data, count):
    play = Chaos(pool, seed, data, count)
    await play.begin()
    try:
        for kind in kinds:
            try:
                await play.play(kind)
            except BaseException as error:
                raise AssertionError(
                    f"round {play.round} ({kind}) of seed {seed}: {error}"
                ) from error
        await play.end()
    finally:
        for task in play.tasks:
            task.cancel()
        await asyncio.gather(*play.tasks, return_exceptions=True)
    refused = sum(len(n.refused) for n in play.notebooks)
    checks = sum(n.checks for n in play.notebooks)
    print(f"seed {seed}: {checks} checks of all bytes, {refused} cells without a broker")
    for what, values in play.figures.items():
        print(f"{what}: {len(values)}, {min(values)} to {max(values)}")
    sessions = pool.sessions()
    await pool.stop_kernels()
    return sessions


def run_chaos(pool, seed, kinds, attach, data, size):
    machine, count = size
    pool = pool(machine, default_memory=SLICE, **POLICIES[attach][0])
    sampler = Sampler(pool, hertz=10)
    sampler.first()
    with forks.instead_of_launches():
        sessions = asyncio.run(chaos(pool, seed, kinds, data, count))
    print(sampler.check(at_least=10))
    assert sum(s["suspends"] for s in sessions) > 0, "no kernel ever had to make room"


@pytest.mark.parametrize("attach", ["lazy", pytest.param("cell", marks=pytest.mark.long)])
def test_notebooks_survive_one_kill_of_each_kind(pool, attach):
    seed = int(os.environ.get("GPUPOOL_CHAOS_SEED", "11"))
    kinds = list(KINDS)
    random.Random(seed).shuffle(kinds)
    run_chaos(pool, seed, kinds, attach, SMALL, LONG if attach == "cell" else SHORT)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("attach", POLICIES)
def test_notebooks_survive_a_hundred_rounds_of_kills(pool, attach):
    seed = int(os.environ.get("GPUPOOL_CHAOS_SEED") or random.SystemRandom().randrange(1 << 30))
    rng = random.Random(seed)
    run_chaos(pool, seed, [rng.choice(KINDS) for _ in range(100)], attach, LARGE, LONG)
