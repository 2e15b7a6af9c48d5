# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Pooled GPU kernels on the machine under test: a private broker, and notebooks that compute.

The broker and the kernels are those of the end-to-end tests (``tests/e2e/kit.py``), but they use
the driver of the machine under test. The import of a framework takes seconds. So all kernels
for the tests of a file start together, before the first test. A kernel has the name of its test.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.e2e.kit import Cell, Kernel, Pool, until

from .machine import GiB, Machine, MiB
from .target import ROOT
from .workloads import expected

_Result = TypeVar("_Result")

#: Time-outs in seconds: for the start of all kernels of a file with their imports, for one cell,
#: and for one test.
START = 100.0
CELL = 90.0
TEST = 110.0

#: Bytes of a neighbour's array on a real device.
TAKEN = 64 * MiB

#: A device counts as empty if at most this many more bytes are in use than at the start. A context
#: uses more bytes.
LEFT = 32 * MiB

#: What a workload imports before its first use of CUDA. (An import takes seconds.) By default, this
#: is the module with the first word of the workload's name.
_IMPORTS = {"cuda-core": "cuda.core", "triton": "torch, triton", "numba": "numba.cuda"}

#: Variables that a framework reads at its import.
_VARIABLES = {
    "torch-expandable": "expandable_segments:True",
    "torch-async": "backend:cudaMallocAsync",
}

#: In these tests, a notebook counts as idle after this many seconds without a CUDA call.
QUIET = 0.3


class Notebook:
    """A Pooled GPU kernel whose cells run one of the workloads."""

    def __init__(self, stage: Stage, label: str, workload: str) -> None:
        self.stage = stage
        self.label = label
        self.workload = workload
        #: The number of steps that a neighbour has done.
        self.done = 0
        self.kernel: Kernel

    async def start(self, **options: Any) -> Notebook:
        """Start the kernel, and import the framework in a first cell that does not use CUDA."""
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        # With the fault handler, the kernel's log shows where a driver has crashed the process.
        env = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONFAULTHANDLER": "1"}
        if self.workload in _VARIABLES:
            for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
                env[name] = _VARIABLES[self.workload]
        self.kernel = await self.stage.pool.kernel(
            self.label, cwd=ROOT, env=env, timeout=START, **options
        )
        module = _IMPORTS.get(self.workload, self.workload.split("-")[0])
        await self.cell(
            "import hashlib, time\n"
            "from tests.gpu import workloads\n"
            f"import {module}",
            timeout=START,
        )  # fmt: skip
        return self

    async def cell(self, code: str, timeout: float = CELL) -> str:
        """Run a cell that must succeed; return what it printed."""
        return (await self.run(code, timeout)).check().text.strip()

    async def fails(self, code: str, timeout: float = CELL) -> Cell:
        """Run a cell that must raise; return the error."""
        cell = await self.run(code, timeout)
        assert not cell.ok, f"nothing was raised by {code!r}; printed: {cell.text}"
        return cell

    async def run(self, code: str, timeout: float = CELL) -> Cell:
        """Run a cell; return its result. If the kernel ends, fail without a further wait."""
        cell = asyncio.ensure_future(self.kernel.run(code, timeout=timeout))
        try:
            while not (await asyncio.wait({cell}, timeout=0.5))[0]:
                if not await self.kernel.manager.is_alive():
                    status = await self.kernel.manager.provisioner.poll()
                    raise AssertionError(
                        f"the kernel of {self.label} has ended with {status} in {code[:80]!r}; "
                        f"its log: {self.stage.log(f'kernel-{self.label}')}"
                    )
            return await cell
        finally:
            cell.cancel()
            await asyncio.gather(cell, return_exceptions=True)

    # ------------------------------------------------------------------ the workload

    async def begin(self) -> str:
        """Let the framework make its context; return its version."""
        name = repr(self.workload)
        return await self.cell(
            f"work = workloads.WORKLOADS[{name}][0]()\nprint(workloads.version({name}))"
        )

    async def put(self, name: str, size: int, first: int) -> None:
        await self.cell(f"work.put({name!r}, {size}, {first})")

    async def steps(self, name: str, number: int, step: int) -> None:
        await self.cell(f"for _ in range({number}):\n    work.work({name!r}, {step})\nwork.sync()")

    async def digest(self, name: str) -> str:
        """Return the SHA-256 of the array ``name``, read from the device."""
        return await self.cell(f"print(hashlib.sha256(work.get({name!r})).hexdigest())")

    async def free(self, name: str) -> None:
        await self.cell(f"work.free({name!r})")

    # ------------------------------------------------------------------ the session

    @property
    def session(self) -> dict[str, Any]:
        """The session in the broker's status now."""
        found = self.kernel.session()
        assert found is not None, f"the session of {self.label} has ended"
        return found

    async def wait(self, what: str, condition: Any, timeout: float = 30.0) -> dict[str, Any]:
        """Wait until ``condition(session)`` is true; return the session."""
        found = await until(
            lambda: (s := self.kernel.session()) and condition(s) and s,
            f"{self.label} {what}",
            timeout,
            show=self.kernel.session,
        )
        return dict(found)

    async def suspended(self, timeout: float = 30.0) -> dict[str, Any]:
        """Wait until the session's state is in host memory; return the session."""
        return await self.wait(
            "to be suspended",
            lambda s: s["state"] == "detached" and s["suspended_bytes"],
            timeout,
        )

    async def release(self) -> dict[str, Any]:
        """Release the slice; return the session when its state is in host memory."""
        self.stage.pool.call("release", session=self.session["id"])
        return await self.suspended()

    async def stop(self) -> None:
        await self.kernel.stop(now=True)


class Stage:
    """The broker for the tests of one file, and the kernels of these tests."""

    def __init__(self, machine: Machine, pool: Pool) -> None:
        self.machine = machine
        self.pool = pool
        self._loop = asyncio.new_event_loop()
        self._ready: dict[str, Notebook | BaseException] = {}
        self._neighbour: tuple[int, Notebook] | None = None
        self.device = self._device()
        #: The used bytes of the device, from NVML, before any kernel uses it.
        self.base = self.look()["used"]

    def play(self, scenario: Coroutine[Any, Any, _Result], timeout: float = TEST) -> _Result:
        """Run a coroutine in the event loop of all kernels of this stage; return its result."""
        try:
            return self._loop.run_until_complete(asyncio.wait_for(scenario, timeout))
        except BaseException as error:
            if hasattr(error, "add_note"):  # since Python 3.11
                error.add_note(f"The end of the broker's log:\n{self.log('b')}")
            raise

    def log(self, name: str, tail: int = 1200) -> str:
        """Return the end of a log."""
        path = self.pool.folder / f"{name.replace(' ', '-')}.log"
        text = path.read_text(errors="replace") if path.exists() else "(none)"
        lines = [line for line in text.splitlines() if not line.startswith("Extension modules")]
        return "\n".join(lines)[-tail:]

    # ------------------------------------------------------------------ the device

    def _device(self) -> dict[str, Any]:
        devices = self.pool.devices()
        assert devices, f"the pool has no device: {self.pool.status()['problem']}"
        return devices[0]

    @property
    def capacity(self) -> int:
        """Bytes of the device that the pool can grant."""
        return int(self.device["memory_capacity"])

    @property
    def most(self) -> int:
        """A size for slices, in bytes. The device has room for only one slice of this size."""
        return int(self.capacity * 0.6) // (2 * MiB) * (2 * MiB)

    def look(self) -> dict[str, Any]:
        """Return NVML's figures of the device now."""
        found = {device["uuid"]: device for device in self.pool.look()}
        return dict(found[self.device["uuid"]])

    async def empty(self, *notebooks: Notebook, timeout: float = 15.0) -> int:
        """Wait until the device is empty; return the used bytes minus those at the start."""
        pids = [str(notebook.kernel.pid) for notebook in notebooks]

        def left() -> dict[str, Any] | None:
            seen = self.look()
            held = any(seen["processes"].get(pid, 0) for pid in pids)
            return None if held or seen["used"] > self.base + LEFT else seen

        seen = await until(left, "the device to be empty", timeout, show=self.look)
        return max(0, int(seen["used"]) - int(self.base))

    # ------------------------------------------------------------------ kernels

    def prepare(self, wanted: Iterable[tuple[str, str]], memory: int) -> None:
        """Start the kernels for all pairs (label, workload) at the same time.

        If a kernel fails to start, the test with its label gets the error from :meth:`take`.
        """

        async def one(label: str, workload: str) -> Notebook:
            return await asyncio.wait_for(
                Notebook(self, label, workload).start(memory=memory), START
            )

        async def all_of(pairs: Sequence[tuple[str, str]]) -> None:
            made = await asyncio.gather(*(one(*pair) for pair in pairs), return_exceptions=True)
            self._ready.update({pair[0]: found for pair, found in zip(pairs, made, strict=True)})

        pairs = [*wanted]
        if self.device["tier"] != "guarded":
            # Without the guard, every cell needs a slice, also a cell that only imports. But the
            # device has room for one slice.
            problem = AssertionError(f"there is no guard: {self.device['tier_reason']}")
            self._ready.update({label: problem for label, _ in pairs})
            return
        self.play(all_of(pairs), START + 20)

    def take(self, label: str) -> Notebook:
        """Return the kernel that :meth:`prepare` has started for a test, or raise its error."""
        found = self._ready.pop(label)
        if isinstance(found, BaseException):
            raise found
        return found

    async def neighbour(self, age: int) -> Notebook:
        """Return the neighbour: a notebook whose slice is most of the device.

        ``age`` is the number of failed tests. If it has changed, start a new neighbour, because a
        failed test may have damaged the old one.
        """
        if self._neighbour is not None and self._neighbour[0] == age:
            return self._neighbour[1]
        if self._neighbour is not None:
            await self._neighbour[1].stop()
        made = await Notebook(self, "neighbour", "cuda-core").start(memory=self.most)
        self._neighbour = age, made
        await made.begin()
        await made.put("mine", self.machine.bytes(TAKEN), 1)
        return made

    async def taken(self, neighbour: Notebook) -> None:
        """Let the neighbour compute, so that it gets the device; check its slice and its result."""
        neighbour.done += 18
        await neighbour.steps("mine", 2, 9)
        assert neighbour.session["granted_bytes"] == self.most
        found = await neighbour.digest("mine")
        assert found == expected(self.machine.bytes(TAKEN), 1, neighbour.done)

    def stop(self, notebook: Notebook) -> None:
        """End a notebook; this frees its memory."""
        self.play(notebook.stop(), 40)

    def close(self, check: bool) -> None:
        """End the kernels and the broker. With ``check``, fail if memory or processes remain."""
        try:
            self.play(self.pool.stop_kernels(), 40)
        finally:
            try:
                self.pool.end(check=check)
            finally:
                self._loop.close()


@contextmanager
def stage(machine: Machine, request: pytest.FixtureRequest, **config: Any) -> Iterator[Stage]:
    """Yield a broker for a file's tests; show its logs if one of them failed.

    GPU time is scarce, so the broker takes and grants slices without the optional delays: with
    ``max_swap_overhead`` 0, a waiting kernel gets an idle slice at once. Other tests measure these
    delays.
    """
    config = {"quiet_after": QUIET, "max_swap_overhead": 0, "host_memory": "90%", **config}
    folder = Path(tempfile.mkdtemp(prefix="gp"))  # a socket needs a short path
    failed = request.session.testsfailed
    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            pool = Pool(folder, machine.emulate, config)
            pool.take_environment(monkeypatch)
            try:
                pool.begin()
                made = Stage(machine, pool)
                try:
                    yield made
                finally:
                    made.close(check=request.session.testsfailed == failed)
            except BaseException:
                failed = -1
                raise
            finally:
                if request.session.testsfailed != failed:
                    # Print without pytest's capture: pytest would not show the captured output of a
                    # fixture that has passed.
                    capture = request.config.pluginmanager.getplugin("capturemanager")
                    with capture.global_and_fixture_disabled():
                        print(pool.logs(tail=4000), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def items(request: pytest.FixtureRequest, fixture: str = "notebook") -> list[tuple[str, str]]:
    """Return the name and the workload of each selected test that uses ``fixture`` in this file."""
    return [
        (item.name, item.callspec.params["workload"])
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.node.obj
        and fixture in item.fixturenames
        and hasattr(item, "callspec")
    ]


@contextmanager
def measured(note: Any, name: str) -> Iterator[None]:
    """Note the seconds that the block takes."""
    begun = time.monotonic()
    yield
    note(**{name: round(time.monotonic() - begun, 2)})


__all__ = ["GiB", "MiB", "Notebook", "Stage", "items", "measured", "stage"]
