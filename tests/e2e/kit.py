# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The base of the end-to-end tests: a private broker, real kernels, and independent observers.

The tests use public interfaces only. The broker is a separate process. jupyter_client starts
kernels from the installed kernelspec. NVML in a child process (``sampler.py``) reports the true
use of device memory. Everything else comes from the broker's public answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterator

import psutil
import pytest
from jupyter_client import launcher

from jupyter_gpupool import startrecord
from jupyter_gpupool.client import Client
from jupyter_gpupool.errors import BrokerUnavailable
from jupyter_gpupool.guard.install import without_guard
from jupyter_gpupool.starting import ensure_broker
from tests.broker import forks
from tests.broker.kit import as_new
from tests.marks import MARK, command_of, marked

KERNEL_NAME = "gpupool-python3"
MiB = 1 << 20

#: The default time-out of a wait, in seconds. On an idle machine, most waits take less than a
#: second.
PATIENCE = 60.0

#: The shortest and the longest pause between two checks of a condition, in seconds. The pauses keep
#: the load low, because most checks send a request to the broker. No test depends on their length.
LOOK, SELDOM = 0.02, 0.1

COLOUR = re.compile(r"\x1b\[[0-9;]*m")

SAMPLER = Path(__file__).with_name("sampler.py")


class Late(AssertionError):
    """A condition did not become true before its deadline."""


def _look(
    condition: Callable[[], Any], what: str, timeout: float, show: Callable[[], Any] | None
) -> Callable[[], Any]:
    """Return a function that returns the present value of ``condition``.

    The function raises :class:`Late` if the value is still false after ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout

    def look() -> Any:
        value = condition()
        if not value and time.monotonic() > deadline:
            seen = f"; seen instead: {show()}" if show else f"; last value: {value!r}"
            raise Late(f"not within {timeout:g} s: {what}{seen}")
        return value

    return look


def _pauses() -> Iterator[float]:
    """Yield the pauses between checks.

    Each pause is a tenth of the time since the first check, but at least LOOK and at most SELDOM.
    """
    begun = time.monotonic()
    while True:
        yield min(max(LOOK, (time.monotonic() - begun) / 10), SELDOM)


def wait_for(
    condition: Callable[[], Any],
    what: str,
    timeout: float = PATIENCE,
    show: Callable[[], Any] | None = None,
) -> Any:
    """Return the first true value of ``condition``; fail after ``timeout`` seconds."""
    look = _look(condition, what, timeout, show)
    pauses = _pauses()
    while not (value := look()):
        time.sleep(next(pauses))
    return value


async def until(
    condition: Callable[[], Any],
    what: str,
    timeout: float = PATIENCE,
    show: Callable[[], Any] | None = None,
) -> Any:
    """Like :func:`wait_for`, but let other asyncio tasks run during the wait."""
    look = _look(condition, what, timeout, show)
    pauses = _pauses()
    while not (value := look()):
        await asyncio.sleep(next(pauses))
    return value


@dataclass
class Cell:
    """What one executed cell sent, and how the cell ended."""

    status: str
    text: str = ""
    ename: str = ""
    evalue: str = ""
    traceback: str = ""
    seconds: float = 0.0
    #: The ``text/plain`` of each display, of each update of a display and of the result, in order.
    displays: list[str] = field(default_factory=list)
    #: The types of the output messages that the cell sent, in order.
    outputs: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def check(self) -> Cell:
        """Return self; fail with the kernel's own traceback if the cell raised."""
        assert self.ok, f"the cell ended with {self.status}: {self.ename}: {self.evalue}\n" + (
            self.traceback
        )
        return self


class Kernel:
    """A real kernel of the Pooled GPU kernelspec, and the client that runs cells in it."""

    def __init__(self, pool: Pool, label: str) -> None:
        self.pool = pool
        self.label = label
        self.manager: Any = None
        self.client: Any = None
        self._log = -1

    async def start(
        self,
        *,
        memory: int | None = None,
        provisioner: dict[str, Any] | None = None,
        server: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = PATIENCE,
    ) -> Kernel:
        from jupyter_client.manager import AsyncKernelManager
        from traitlets.config import Config

        options = dict(provisioner or {})
        if memory is not None:
            options["memory"] = memory
        # The kernel uses sockets in the pool's folder, because TCP ports are not safe here. The
        # manager chooses free ports, and the kernel binds them later. In between, a kernel of
        # another test could take a port.
        self.manager = AsyncKernelManager(
            kernel_name=KERNEL_NAME,
            transport="ipc",
            connection_file=str(self.pool.folder / f"k{uuid.uuid4().hex[:8]}.json"),
            config=Config(
                {"GPUPoolProvisioner": options, **({"GPUPool": server} if server else {})}
            ),
        )
        # The log file stays open, because jupyter_client also passes it to a restarted kernel.
        name = f"kernel-{self.label.replace(' ', '-')}.log"
        self._log = os.open(self.pool.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        await self.manager.start_kernel(
            env={**os.environ, "JPY_SESSION_NAME": self.label, **(env or {})},
            stdout=self._log,
            stderr=self._log,
            **({"cwd": str(cwd)} if cwd else {}),
        )
        self.pool.kernels.append(self)
        self.client = self.manager.client()
        self.client.start_channels()
        await self.client.wait_for_ready(timeout=timeout)
        return self

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)

    @property
    def kernel_id(self) -> str:
        return str(self.manager.kernel_id)

    def session(self) -> dict[str, Any] | None:
        """Return the broker's entry for this kernel's session; None if it has no session."""
        return self.pool.session_of(self.kernel_id)

    async def run(self, code: str, timeout: float = PATIENCE, **kwargs: Any) -> Cell:
        """Execute ``code``, return how it ended; raise :class:`Late` after ``timeout`` seconds."""
        cell = self.latest = Cell("unknown")
        begun = time.monotonic()

        def hook(message: dict[str, Any]) -> None:
            kind, content = message["msg_type"], message["content"]
            if kind in ("status", "execute_input"):
                return
            cell.outputs.append(kind)
            if kind == "stream":
                cell.text += content["text"]
            elif kind in ("display_data", "update_display_data", "execute_result"):
                plain = content["data"].get("text/plain", "")
                cell.displays.append(plain)
                if kind == "execute_result":
                    cell.text += plain + "\n"

        try:
            reply = await self.client.execute_interactive(
                code, allow_stdin=False, timeout=timeout, output_hook=hook, **kwargs
            )
        except TimeoutError:
            raise Late(
                f"a cell of {self.label!r} did not end within {timeout:g} s: {code[:80]!r}; "
                f"its session: {self.pool.peek(self.kernel_id)}"
            ) from None
        content = reply["content"]
        cell.status = content["status"]
        cell.ename = content.get("ename", "")
        cell.evalue = content.get("evalue", "")
        cell.traceback = COLOUR.sub("", "\n".join(content.get("traceback", [])))
        cell.seconds = time.monotonic() - begun
        return cell

    def kill(self) -> None:
        """Kill the kernel process with SIGKILL, as the OOM killer would."""
        os.kill(self.pid, signal.SIGKILL)

    async def interrupt(self) -> None:
        await self.manager.interrupt_kernel()

    async def restart(self, now: bool = False) -> None:
        await self.manager.restart_kernel(now=now)
        await self.client.wait_for_ready(timeout=PATIENCE)

    async def stop(self, now: bool = False) -> None:
        """Shut the kernel down; a second call does nothing."""
        if self in self.pool.kernels:
            self.pool.kernels.remove(self)
        if self._log >= 0:
            os.close(self._log)
            self._log = -1
        if self.client is not None:
            self.client.stop_channels()
            self.client = None
        if self.manager is not None:
            manager, self.manager = self.manager, None
            await manager.shutdown_kernel(now=now)
            with suppress(Exception):
                manager.cleanup_connection_file()


class Pool:
    """A private broker with its own folder, and the methods with which a test uses the broker."""

    def __init__(self, folder: Path, machine: str, config: dict[str, Any]) -> None:
        self.folder = folder
        self.machine = machine
        self.socket = folder / "b.sock"
        self.config = {
            "emulate": machine,
            "state_dir": str(folder / "state"),
            "idle_timeout": 3600.0,
            "sample_interval": 0.2,
            "host_memory": "12GiB",
            "linger": 600.0,
            **config,
        }
        # In most tests, all slices have the same size and do not grow.
        self.config.setdefault("default_limit", self.config.get("default_memory", "4GiB"))
        #: The machine and the options of the test. Another test may use this pool if it has the
        #: same machine and options.
        self.asked = (machine, config)
        self.mark = uuid.uuid4().hex
        self.kernels: list[Kernel] = []
        self.samplers: list[Sampler] = []
        self._client: Client | None = None
        #: True if no other test may use this pool, even if its status looks as good as new.
        self.disturbed = False
        #: What identifies the broker's processes and files at its start, and the number of the
        #: journal's last row before the current test.
        self._before: Any = None
        self._after = 0
        #: The variables through which kernels find the driver; empty for a real driver.
        self.driver_env: dict[str, str] = {}

    def take_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Set the environment in which this process and its children use this pool.

        They do not use the user's own configuration, runtime files and IPython folder.
        """
        for name in ("GPUPOOL_EMULATE", "EMUCUDA_STATE", "GPUPOOL_SESSION"):
            monkeypatch.delenv(name, raising=False)
        for name in ("config", "runtime", "ipython", "data"):
            (self.folder / name).mkdir(exist_ok=True)
        monkeypatch.setenv("GPUPOOL_SOCKET", str(self.socket))
        monkeypatch.setenv(MARK, self.mark)
        monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(self.folder / "config"))
        monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(self.folder / "runtime"))
        monkeypatch.setenv("IPYTHONDIR", str(self.folder / "ipython"))
        monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
        # In most tests, the start of kernels takes most of the CPU time. So kernels are forked,
        # which takes less time than an exec.
        monkeypatch.setattr(launcher, "Popen", forks.kernels)

    # ------------------------------------------------------------------ the broker

    def write_config(self) -> None:
        """Write the configuration file that a provisioner reads when it starts a broker."""
        folder = self.folder / "config"
        folder.mkdir(exist_ok=True)
        text = json.dumps({"GPUPool": self.config})
        (folder / "jupyter_server_config.json").write_text(text)

    def start_broker(self) -> None:
        """Start the broker if it does not run; return when it answers."""
        ensure_broker({"GPUPool": self.config}, str(self.socket))

    def begin(self) -> None:
        """Start the broker for the first test.

        This broker is forked, because a fork is faster than an exec. Later brokers are executed as
        usual, unless a test uses ``forks.instead_of_launches`` for them, too.
        """
        self.write_config()
        with forks.instead_of_launches():
            self.start_broker()
        # Open a session for a short time: only its answer shows the variables through which a
        # kernel finds the driver.
        answer = self.call("open", kernel_id="e2e-probe", label="probe")
        # Remove the guard from the variables: under the guard, the sampler would not see NVML's
        # own answers.
        env = without_guard(answer["env"])
        names = ("EMUCUDA_MACHINE", "EMUCUDA_STATE", "LD_LIBRARY_PATH")
        self.driver_env = {name: env[name] for name in names if name in env}
        self.call("close", session=answer["session"], reason="probe")
        self._before = self._there()

    def again(self) -> None:
        """Begin another test: ignore everything that happened before."""
        self._after = self.call("journal", limit=0)["seq"]

    def _there(self) -> tuple[Any, ...]:
        """Return values that change if a test replaces the broker's processes or files."""
        broker = psutil.Process(self.status()["pid"])
        processes = {(p.pid, p.create_time()) for p in (broker, *broker.children(recursive=True))}
        files = {path.name: path.stat().st_ino for path in self.folder.glob("b.*")}
        return processes, files, *(path.read_text() for path in self.folder.glob("config/*.json"))

    def rests(self) -> bool:
        """Return whether the next test can use this pool; delete the files of the last test.

        The broker must be as good as a new one, and all other processes must have ended. Call this
        only after a passed test, when its kernels have ended and the broker grants no memory.
        """
        if self.disturbed or os.environ.get("GPUPOOL_E2E_KEEP"):
            return False
        try:
            wait_for(lambda: as_new(self.status()), "the broker to be as new", 10)
            if self._there() != self._before:
                return False
        except (Late, BrokerUnavailable, psutil.Error):
            return False
        mine = {pid for pid, _ in self._before[0]}
        if [process for process in marked(self.mark) if process.pid not in mine]:
            return False
        for path in self.folder.iterdir():
            if path.name in ("config", "state") or path.name.startswith("b."):
                continue  # the files of the broker and of its machine
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        return True

    @property
    def faults(self) -> Any:
        """Return an object that injects faults into the machine."""
        from tests.emulated import Faults

        self.disturbed = True
        return Faults(self.driver_env["EMUCUDA_STATE"])

    @property
    def client(self) -> Client:
        if self._client is None or self._client.closed:
            self._client = Client(self.socket)
        return self._client

    def call(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self.client.call(kind, **fields)

    def status(self) -> dict[str, Any]:
        return self.call("status")

    def peek(self, kernel_id: str) -> Any:
        """Return a kernel's session for a failure message, or why no broker answers."""
        try:
            return self.session_of(kernel_id)
        except BrokerUnavailable as error:
            return str(error)

    def journal(self, **fields: Any) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        after = self._after
        while batch := self.call("journal", after=after, limit=1000, **fields)["rows"]:
            rows += batch
            after = batch[-1]["seq"]
        return rows

    def sessions(self) -> list[dict[str, Any]]:
        return list(self.status()["sessions"])

    def session_of(self, kernel_id: str) -> dict[str, Any] | None:
        return next((s for s in self.sessions() if s["kernel_id"] == kernel_id), None)

    def devices(self) -> list[dict[str, Any]]:
        return list(self.status()["devices"])

    def kill_broker(self, *, for_good: bool = False) -> None:
        """Kill the broker with SIGKILL; return when its process has ended.

        With ``for_good``, also remove the record of how the broker was started. A broker that ends
        normally removes this record, too. Without the record, no kernel starts the broker again.
        """
        process = psutil.Process(self.status()["pid"])
        if for_good:
            # A broker that runs writes a removed record again.
            process.suspend()
            wait_for(lambda: process.status() == psutil.STATUS_STOPPED, "the broker to stop")
            record = startrecord.read_record(self.socket)
            assert record is not None, "the broker has written how it was started"
            startrecord.remove_copy(record.journal)
            startrecord.remove_record(self.socket)
        process.kill()
        wait_for(lambda: not runs(process), "the killed broker to be gone")

    def workers(self) -> list[psutil.Process]:
        """Return the suspend workers: the broker's child processes that make checkpoint calls."""
        broker = psutil.Process(self.status()["pid"])
        return [p for p in broker.children() if "child_programs worker" in command_of(p)]

    # ------------------------------------------------------------------ kernels

    async def kernel(self, label: str = "notebook", **options: Any) -> Kernel:
        """Start a kernel; return it when it is ready for cells."""
        kernel = Kernel(self, label)
        try:
            return await kernel.start(**options)
        except BaseException:
            await kernel.stop(now=True)
            raise

    async def stop_kernels(self) -> None:
        await asyncio.gather(*(k.stop(now=True) for k in list(self.kernels)))

    # ------------------------------------------------------------------ checks

    def look(self) -> list[dict[str, Any]]:
        """Return what NVML reports of each device now."""
        with Sampler(self, brief=True) as sampler:
            return list(sampler.first()["devices"])

    def check_ledger(self) -> dict[str, Any]:
        """Return the broker's status; fail if states, grants, totals, limits or queue are wrong."""
        status = self.status()
        granted: dict[str, int] = {}
        for session in status["sessions"]:
            state, where = session["state"], session["devices"]
            attached = state in ("attaching", "active", "idle", "detaching")
            assert attached == bool(where), f"{state} and on {where}: {session}"
            assert attached == (session["granted_bytes"] > 0), session
            assert (session["queue_position"] is not None) == (state == "queued"), session
            if attached and state != "detaching":
                assert state == "attaching" or not session["suspended_bytes"], session
            for uuid_ in where:
                share = session["granted_bytes"] // len(where)
                granted[uuid_] = granted.get(uuid_, 0) + share
        for device in status["devices"]:
            mine = granted.get(device["uuid"], 0)
            assert device["memory_granted"] == mine, (device, mine)
            assert mine <= device["memory_capacity"] <= device["memory_total"], device
        host = status["host"]
        suspended = sum(s["suspended_bytes"] for s in status["sessions"])
        assert suspended <= host["budget_bytes"], (suspended, host)
        positions = sorted(s["queue_position"] for s in status["sessions"] if s["queue_position"])
        assert positions == list(range(1, len(positions) + 1)), positions
        return status

    def check_nothing_left(self) -> None:
        """Fail if sessions, granted bytes or used bytes remain after the end of all kernels."""
        wait_for(lambda: not self.sessions(), "no session left", show=self.sessions)
        wait_for(
            lambda: all(d["memory_granted"] == 0 for d in self.devices()),
            "no granted byte left",
            show=self.devices,
        )

        def accounted() -> list[dict[str, Any]]:
            devices = self.look()
            return [d for d in devices if d["processes"] or d["used"] > d["reserved"]]

        # After the end of a killed process, a real driver needs a moment to free its memory.
        wait_for(lambda: not accounted(), "nothing left for the driver to account for",
                 show=accounted)  # fmt: skip

    # ------------------------------------------------------------------ the end

    def stop(self, check: bool = True) -> None:
        """End the kernels and samplers of a test; fail if they leave anything behind."""
        for sampler in list(self.samplers):
            sampler.stop()
        if self.kernels:
            asyncio.run(self.stop_kernels())
        if check:
            self.check_nothing_left()

    def end(self, check: bool = True) -> None:
        """End everything that this pool started; fail if a process does not end
        without being killed.
        """
        problems: list[str] = []
        try:
            self.stop(check)
            broker = psutil.Process(self.status()["pid"])
            if self._client is not None:
                self._client.close()
            broker.terminate()
            # First wait for the broker alone: the search through all processes, below, takes much
            # longer.
            wait_for(lambda: not runs(broker), "the broker's end", show=self.logs)
        except (BrokerUnavailable, AssertionError, psutil.Error) as error:
            problems.append(str(error))

        def left() -> list[str]:
            for process in (found := marked(self.mark)):
                reap(process.pid)
            return [f"{p.pid} {command_of(p)}" for p in found if p.is_running()]

        try:
            wait_for(lambda: not left(), "no process left", show=left)
        except Late as error:
            problems.append(str(error))
        for process in marked(self.mark):
            with suppress(psutil.Error):
                process.kill()
        assert not problems or not check, "after the test: " + "\n".join(problems)

    def logs(self, tail: int = 12000) -> str:
        """Return the ends of all logs of this pool, for a failing test's report."""
        parts = []
        for path in sorted(self.folder.rglob("*.log")):
            text = path.read_text(errors="replace")
            parts.append(f"--- {path.relative_to(self.folder)}\n{text[-tail:]}")
        return "\n".join(parts)


def runs(process: psutil.Process) -> bool:
    """Return whether a process still runs. If it is an ended child of this process, reap it."""
    try:
        if process.status() != psutil.STATUS_ZOMBIE:
            return True
    except psutil.Error:
        return False
    reap(process.pid)
    return False


def reap(pid: int) -> None:
    """Reap a child of this process if it has ended."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


class Sampler:
    """A child process that samples the devices through NVML while the test runs.

    ``sampler.py`` describes the fields of a sample. With ``brief``, the child takes only one
    sample, and does not ask the broker.
    """

    def __init__(self, pool: Pool, *, brief: bool = False, hertz: float = 20.0) -> None:
        self.pool = pool
        self._path = pool.folder / f"samples-{uuid.uuid4().hex[:8]}.jsonl"
        contexts = [] if brief else [d["context_bytes"] or 0 for d in pool.devices()]
        self._landing = max(contexts, default=0)
        arguments = [str(self._path), "0" if brief else str(hertz)]
        arguments.append("" if brief else str(pool.socket))
        command = [sys.executable, str(SAMPLER), *arguments]
        env = {**os.environ, **pool.driver_env}
        self._log = self._path.with_suffix(".log")
        stdin, self._input = os.pipe()
        with self._log.open("wb") as log:
            if forks.can_run(command, env):
                self._process = forks.run(
                    command, env=env, standard=[stdin, log.fileno(), log.fileno()]
                )
            else:
                self._process = subprocess.Popen(
                    command, env=env, stdin=stdin, stdout=log, stderr=log
                )
        os.close(stdin)
        pool.samplers.append(self)

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def samples(self) -> list[dict[str, Any]]:
        """Return all samples so far; the list is complete after :meth:`stop`."""
        if not self._path.exists():
            return []
        lines = self._path.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def first(self) -> dict[str, Any]:
        def look() -> list[dict[str, Any]]:
            if not self.samples() and self._process.poll() not in (None, 0):
                raise AssertionError(self._log.read_text())
            return self.samples()

        return dict(wait_for(look, "a first NVML sample")[0])

    def stop(self) -> None:
        """End the child process; fail if its exit status is not 0. A second call does nothing."""
        if self not in self.pool.samplers:
            return
        self.pool.samplers.remove(self)
        os.close(self._input)
        code = self._process.wait(PATIENCE)
        assert code == 0, f"the NVML sampler failed: {self._log.read_text()}"

    def check(self, at_least: int) -> dict[str, Any]:
        """Stop the sampler and check its samples; return figures about them.

        Fail if a sample shows more used bytes than the device has, or more bytes of a process than
        the broker has granted it.
        """
        self.stop()
        samples = self.samples()
        assert len(samples) >= at_least, f"only {len(samples)} NVML samples"
        compared = most = 0
        for sample in samples:
            for device in sample["devices"]:
                assert device["used"] <= device["total"], sample
                assert sum(device["processes"].values()) <= device["total"], sample
                most = max(most, device["used"])
            granted = sample.get("granted")
            if granted is None:
                continue
            for device in sample["devices"]:
                limits = granted.get(device["uuid"], {})
                assert sum(limits.values()) <= device["total"], sample
                for pid, used in device["processes"].items():
                    if pid in sample["steady"]:
                        compared += 1
                        # A landing process may have a context on a device without a grant. Each
                        # device keeps room for one such context, in addition to the grants.
                        lands = device["uuid"] in sample["landing"].get(pid, ())
                        allowed = limits.get(pid) or (self._landing if lands else 0)
                        assert used <= allowed, (
                            f"process {pid} holds {used} bytes and was granted {allowed}: {sample}"
                        )
        return {"samples": len(samples), "compared": compared, "most_used": most}
