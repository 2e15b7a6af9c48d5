# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A real ipykernel under test, and its output."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from queue import Empty
from typing import Any
from unittest.mock import patch

from jupyter_client import KernelManager, launcher

from tests.broker import forks

ROOT = Path(__file__).resolve().parents[2]
AGENT = "--IPKernelApp.extra_extensions=jupyter_gpupool.kernel"


class Execution:
    """One execute request and its reply. ``outputs`` are the outputs that a notebook would save."""

    def __init__(self, kernel: Kernel, msg_id: str) -> None:
        self.kernel = kernel
        self.msg_id = msg_id
        self.messages: list[dict[str, Any]] = []
        self.reply: dict[str, Any] | None = None
        self.idle = False

    def until(self, kind: str, timeout: float = 60) -> dict[str, Any]:
        """Return the first iopub message of this kind; wait for it if it has not come yet."""
        deadline = time.monotonic() + timeout
        while True:
            for message in self.messages:
                if message["msg_type"] == kind:
                    return message
            self.kernel.read(deadline, self)

    def shows(self, text: str, timeout: float = 60) -> None:
        """Wait until the outputs contain ``text``.

        The agent may update an output. For example, it adds the queue position to a wait later.
        """
        deadline = time.monotonic() + timeout
        while text not in self.text:
            self.kernel.read(deadline, self)

    def done(self, timeout: float = 60) -> Execution:
        """Read until the kernel has answered and is idle again."""
        deadline = time.monotonic() + timeout
        while not self.idle:
            self.kernel.read(deadline, self)
        while self.reply is None:
            reply = self.kernel.client.get_shell_msg(timeout=deadline - time.monotonic())
            asked = self.kernel.running.get(reply["parent_header"].get("msg_id", ""))
            if asked is not None and reply["msg_type"] == "execute_reply":
                asked.reply = reply["content"]
        return self

    @property
    def status(self) -> str:
        assert self.reply is not None
        return self.reply["status"]

    @property
    def outputs(self) -> list[dict[str, Any]]:
        """Return the outputs as a notebook shows them.

        Messages ``clear_output`` and ``update_display_data`` change earlier outputs.
        """
        left: list[dict[str, Any]] = []
        for message in self.messages:
            kind = message["msg_type"]
            if kind == "clear_output":
                assert not message["content"]["wait"]
                left.clear()
            elif kind == "stream" and left and left[-1].get("name") == message["content"]["name"]:
                left[-1]["text"] += message["content"]["text"]  # joined as in a notebook
            elif kind == "update_display_data":
                for output in left:
                    if output.get("transient") == message["content"]["transient"]:
                        output["data"] = message["content"]["data"]
            elif kind in ("stream", "display_data", "execute_result", "error"):
                left.append(dict(message["content"]))
        return left

    @property
    def text(self) -> str:
        """Return the remaining outputs as plain text."""
        parts = []
        for output in self.outputs:
            if "text" in output:
                parts.append(output["text"])
            elif "data" in output:
                parts.append(output["data"]["text/plain"])
            else:
                parts.append(f"{output['ename']}: {output['evalue']}")
        return "\n".join(parts)


class Kernel:
    """A running kernel with its client."""

    def __init__(self, manager: KernelManager) -> None:
        self.manager = manager
        self.client = manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.running: dict[str, Execution] = {}

    def start(self, code: str, *, silent: bool = False, **options: Any) -> Execution:
        metadata = options.pop("metadata", {})
        header = options.pop("header", {})
        content = {
            "code": code,
            "silent": silent,
            "store_history": not silent,
            "user_expressions": options.pop("user_expressions", {}),
            "allow_stdin": False,
            "stop_on_error": True,
        }
        assert not options
        message = self.client.session.msg("execute_request", content, metadata=metadata)
        message["header"].update(header)
        self.client.shell_channel.send(message)
        execution = Execution(self, message["header"]["msg_id"])
        self.running[execution.msg_id] = execution
        return execution

    def run(self, code: str, **options: Any) -> Execution:
        return self.start(code, **options).done()

    def value(self, expression: str) -> str:
        """Return the value of an expression as text.

        No cell runs for this, because a cell would take a hold.
        """
        execution = self.run("", user_expressions={"it": expression}, silent=True)
        assert execution.reply is not None
        found = execution.reply["user_expressions"]["it"]
        assert found["status"] == "ok", found
        return found["data"]["text/plain"]

    def read(self, deadline: float, wanted: Execution) -> None:
        try:
            message = self.client.get_iopub_msg(timeout=max(0.01, deadline - time.monotonic()))
        except Empty:
            seen = [m["msg_type"] for m in wanted.messages]
            raise AssertionError(f"the kernel sent nothing more; seen {seen}") from None
        execution = self.running.get(message["parent_header"].get("msg_id", ""))
        if execution is None:
            return
        execution.messages.append(message)
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            execution.idle = True

    def control(self, kind: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
        message = self.client.session.msg(kind, content or {})
        self.client.control_channel.send(message)
        while True:
            reply = self.client.get_control_msg(timeout=60)
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                return reply["content"]

    def stop(self) -> None:
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


#: The arguments that follow the interpreter in a kernelspec.
IPYKERNEL = ["-m", "ipykernel_launcher", "-f", "{connection_file}"]


def private_connection_file() -> str:
    """Return a path for a connection file in a new folder.

    The kernel makes its sockets in this folder, so no other kernel uses them.
    """
    folder = tempfile.mkdtemp(prefix="gpk")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return f"{folder}/k.json"


def private_manager(
    kernel_name: str, kind: type[KernelManager] = KernelManager, **options: Any
) -> Any:
    """Return a manager whose kernel has its own sockets.

    The sockets are Unix sockets. With TCP, the manager would choose a port before the kernel binds
    it, and the kernel of another test might bind the port first.
    """
    file = private_connection_file()
    return kind(kernel_name=kernel_name, transport="ipc", connection_file=file, **options)


def start_kernel(python: str, env: dict[str, str], *, agent: bool = True, **extra: str) -> Kernel:
    """Start ipykernel with the interpreter ``python`` and the agent, but without a provisioner."""
    manager = private_manager("python3")
    manager.kernel_spec.argv[0] = python
    environ = {k: v for k, v in os.environ.items() if not k.startswith("GPUPOOL_")}
    environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "light")))
    with patch.object(launcher, "Popen", forks.kernels):
        manager.start_kernel(
            env={**environ, **env, **extra}, extra_arguments=[AGENT] if agent else []
        )
    try:
        return Kernel(manager)
    except BaseException:
        manager.shutdown_kernel(now=True)
        raise


def this_python() -> str:
    return sys.executable
