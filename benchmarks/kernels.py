# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Real kernels and a private broker for benchmarks. Not a benchmark itself."""

from __future__ import annotations

import os
import queue
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jupyter_client import KernelManager
from traitlets.config import Config

from jupyter_gpupool.client import Client
from jupyter_gpupool.devices import vendor
from jupyter_gpupool.emulation import library_dir
from jupyter_gpupool.starting import ensure_broker


@contextmanager
def private_pool(**options: Any) -> Iterator[list[str]]:
    """Run a broker for this benchmark alone; yield the names of its devices.

    ``options`` are options of ``c.GPUPool``. They replace the defaults of this function.
    """
    # The broker may still write to the folder while the folder is removed.
    with tempfile.TemporaryDirectory(prefix="gpb", ignore_cleanup_errors=True) as folder:
        socket = Path(folder) / "broker.sock"
        config: dict[str, Any] = {
            "state_dir": str(Path(folder) / "state"),
            "idle_timeout": 3600.0,
            "default_memory": 1 << 30,
            "default_limit": 1 << 30,
        }
        if not vendor.driver_present():
            config["emulate"] = "1x16GiB"
        config |= options
        saved = os.environ.get("GPUPOOL_SOCKET")
        os.environ["GPUPOOL_SOCKET"] = str(socket)
        try:
            ensure_broker({"GPUPool": config}, str(socket))
            with Client(socket) as client:
                status = client.call("status")
                if status["settings"]["attach_reason"]:
                    raise RuntimeError(status["settings"]["attach_reason"])
                try:
                    yield [device["name"] for device in status["devices"]]
                finally:
                    os.kill(status["pid"], signal.SIGTERM)
        finally:
            del os.environ["GPUPOOL_SOCKET"]
            if saved is not None:
                os.environ["GPUPOOL_SOCKET"] = saved


def driver_environment() -> dict[str, str]:
    """Return the variables with which a process outside the pool uses the pool's driver."""
    names = ("EMUCUDA_MACHINE", "EMUCUDA_STATE")
    with Client(os.environ["GPUPOOL_SOCKET"]) as client:
        # The broker gives these variables only to a session. So open one and close it at once.
        opened = client.call("open", kernel_id="benchmark", label="benchmark", request={})
        client.call("close", session=opened["session"], reason="not needed")
    found = {name: opened["env"][name] for name in names if name in opened["env"]}
    if found:
        found["LD_LIBRARY_PATH"] = str(library_dir())
    return found


class Kernel:
    """A running kernel. The constructor waits until it is ready; the ``with`` block ends it.

    The kernel gets the environment of this process, and the variables in ``env``.
    """

    def __init__(self, name: str, env: Mapping[str, str] | None = None, **provisioner: Any) -> None:
        config = Config({"GPUPoolProvisioner": provisioner})
        self._manager = KernelManager(kernel_name=name, config=config)
        self._manager.start_kernel(env={**os.environ, **(env or {})}, stdout=-3, stderr=-3)
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=120)

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)

    @property
    def pid(self) -> int:
        return int(self._manager.provisioner.pid)

    def session(self) -> str:
        """Run a cell that prints the id of the kernel's session in the pool; return this id."""
        # In a kernel with policy "cell", a text about the wait for a slice may come before the id.
        return self.run("import os; print(os.environ['GPUPOOL_SESSION'])").split()[-1]

    def run(self, code: str, timeout: float = 120) -> str:
        """Run a cell to its end and return its output.

        Raises
        ------
        RuntimeError
            If the cell fails, or the kernel ends.
        queue.Empty
            If the cell does not end within ``timeout`` seconds.
        """
        return self.finish(self.begin(code), timeout)

    def interrupt(self) -> None:
        """Interrupt the running cell. :meth:`finish` then raises RuntimeError for this cell."""
        self._manager.interrupt_kernel()

    def wait_for_output(self, timeout: float = 120) -> None:
        """Return after the first text that the running cell prints."""
        deadline = time.monotonic() + timeout
        while self._next(self._client.get_iopub_msg, deadline)["msg_type"] != "stream":
            pass

    def begin(self, code: str) -> str:
        """Send a cell; return the argument for :meth:`finish`. Only one cell may run at a time."""
        return str(self._client.execute(code, allow_stdin=False))

    def finish(self, msg_id: str, timeout: float = 120) -> str:
        """Wait for the end of a cell; return its output, or raise as :meth:`run` does."""
        text = ""
        # Compute one deadline for the whole cell. A cell that waits for its slice sends many
        # messages, so a time-out for each message would never end the wait.
        deadline = time.monotonic() + timeout
        while True:
            message = self._next(self._client.get_iopub_msg, deadline)
            if message["parent_header"].get("msg_id") != msg_id:
                continue
            if message["msg_type"] == "stream":
                text += message["content"]["text"]
            elif (
                message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"
            ):
                break
        while True:
            reply = self._next(self._client.get_shell_msg, max(deadline, time.monotonic() + 10))
            if reply["parent_header"].get("msg_id") == msg_id:
                break
        if reply["content"]["status"] != "ok":
            raise RuntimeError(f"{reply['content'].get('ename')}: {reply['content'].get('evalue')}")
        return text

    def _next(self, get: Callable[..., dict[str, Any]], deadline: float) -> dict[str, Any]:
        """Return the next message; raise if the kernel has ended."""
        while True:
            left = deadline - time.monotonic()
            try:
                return get(timeout=min(2.0, max(0.0, left)))
            except queue.Empty:
                if not self._manager.is_alive():
                    raise RuntimeError("The kernel has ended.") from None
                if left <= 0:
                    raise
