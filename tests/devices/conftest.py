# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A fresh emulated machine for every test, real CUDA processes on it, and a device service."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jupyter_gpupool import procfs
from jupyter_gpupool.devices.nvidia.service import DeviceService
from tests.devices.forked import create_subprocess_exec

MiB = 1 << 20


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """If the test is a coroutine function, run it in a new event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@dataclass
class Emulated:
    """One emulated machine: its environment variables and its faults."""

    env: dict[str, str]
    faults: object
    state_dir: Path
    lost: list[tuple[str, str]] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def service(self, **options):
        """Yield a service that has not been started."""

        def on_lost(uuid, reason):
            self.lost.append((uuid, reason))

        service = DeviceService(env=self.env, on_device_lost=on_lost, **options)
        try:
            yield service
        finally:
            await service.close()

    @contextlib.asynccontextmanager
    async def started(self, **options):
        """Yield a started service and its devices."""
        async with self.service(**options) as service:
            yield service, await service.start()

    @contextlib.asynccontextmanager
    async def target(self, device="0", **env):
        """Yield a CUDA process that sees one device."""
        target = Target()
        await target.start({**self.env, "CUDA_VISIBLE_DEVICES": device, **env})
        try:
            yield target
        finally:
            await target.end()


class Target:
    """A running ``target.py``, and the pipes to it."""

    async def start(self, env):
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).parent / "target.py"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
        self.pid = await self.do("pid")
        self.root = procfs.identify(self.pid)

    async def do(self, name, *arguments, timeout=60):
        """Call function ``name`` in the target, and return its result.

        If the function fails, raise RuntimeError.
        """
        self.process.stdin.write(json.dumps([name, *arguments]).encode() + b"\n")
        line = await asyncio.wait_for(self.process.stdout.readline(), timeout)
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["ok"]

    async def child(self, name, *arguments):
        """Call function ``name`` in the target's child; return the result."""
        answer = await self.do("relay", [name, *arguments])
        return answer["ok"]

    def stop(self):
        """Send SIGSTOP, and wait until the process is stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        until(lambda: procfs.presence(self.root) == "stopped")

    def go_on(self):
        os.kill(self.pid, signal.SIGCONT)

    async def end(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.stdin.close()
        await self.process.wait()


def until(condition, timeout=60.0):
    """Wait until ``condition()`` is true; raise TimeoutError after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.005)


async def until_async(condition, timeout=60.0):
    """Wait like :func:`until`, but do not block the event loop."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        await asyncio.sleep(0.005)


@pytest.fixture(scope="session")
def driver_library():
    """Build the emulated driver if it is not built."""
    from tests.emulated import build

    return build.compile()


@pytest.fixture
def emulated(driver_library, tmp_path, monkeypatch):
    """Return a function that makes a fresh emulated machine, by default ``2x1GiB``."""
    monkeypatch.setattr(asyncio, "create_subprocess_exec", create_subprocess_exec)
    from tests.emulated import Faults, environment

    def make(machine="2x1GiB,context=16MiB"):
        state_dir = tmp_path / "machine"
        env = {**os.environ, **environment(machine, state_dir)}
        return Emulated(env, Faults(state_dir), state_dir)

    return make


@pytest.fixture
def waiting():
    """Return :func:`until` and :func:`until_async`."""
    return until, until_async
