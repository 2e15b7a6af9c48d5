# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A client without kernel provisioners: it starts the ``argv`` of a kernelspec itself."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

from jupyter_client import BlockingKernelClient
from jupyter_client.connect import write_connection_file
from jupyter_client.kernelspec import KernelSpecManager

SHIPPED = "gpupool-python3"


class PlainKernel:
    """A kernel that starts as in VS Code: by the argv and env of its kernelspec.

    The name of the connection file replaces the placeholder in the argv. With ``vscode``, the argv
    changes as VS Code changes the argv of an ipykernel: the words ``-f {connection_file}`` are
    removed, and ``--f=FILE`` comes to the end.
    """

    def __init__(self, name: str, folder: Path, *, vscode: bool = False, **env: str) -> None:
        spec = KernelSpecManager().get_kernel_spec(name)
        self.file = folder / f"kernel-v2-{uuid.uuid4().hex[:8]}.json"
        write_connection_file(str(self.file), transport="ipc", ip=str(self.file) + ".s")
        argv = list(spec.argv)
        if argv[0] == "python":
            argv[0] = sys.executable  # VS Code uses the kernelspec's own interpreter
        if vscode:
            place = argv.index("{connection_file}")
            argv[place - 1 : place + 1] = []
            argv.append(f"--f={self.file}")
        argv = [word.replace("{connection_file}", str(self.file)) for word in argv]
        self.stderr_file = folder / f"{self.file.stem}.stderr"
        with self.stderr_file.open("wb") as stderr:
            self.process = subprocess.Popen(
                argv,
                env={**os.environ, **spec.env, **env},
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
        self.client: Any = None

    @property
    def stderr(self) -> str:
        return self.stderr_file.read_text()

    @property
    def pid(self) -> int:
        return self.process.pid

    def run(self, code: str) -> str:
        """Run a cell; return its output, including its error."""
        if self.client is None:
            self.client = BlockingKernelClient(connection_file=str(self.file))
            self.client.load_connection_file()
            # No heartbeat: it declares a kernel dead after a second without an answer. On a busy
            # machine, a living kernel may take longer to answer.
            self.client.start_channels(hb=False)
            self.client.wait_for_ready(timeout=60)
        text: list[str] = []

        def hook(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                text.append(content["text"])
            elif message["msg_type"] == "display_data":
                text.append(content["data"]["text/plain"])
            elif message["msg_type"] == "error":
                text.append(f"{content['ename']}: {content['evalue']}")

        self.client.execute_interactive(code, timeout=60, output_hook=hook, allow_stdin=False)
        return "".join(text)

    def printed(self, request: str) -> str:
        """Return what a cell has printed since the last call.

        ``request`` is the id of the execute request of the cell.
        """
        text = ""
        while self.client.iopub_channel.msg_ready():
            message = self.client.get_iopub_msg(timeout=1)
            if message["parent_header"].get("msg_id") == request:
                text += message["content"].get("text", "")
        return text

    def reply(self, request: str) -> dict[str, Any]:
        """Wait for the answer to a request; return the answer."""
        while True:
            message: dict[str, Any] = self.client.get_shell_msg(timeout=60)
            if message["parent_header"].get("msg_id") == request:
                return message

    def close(self) -> None:
        if self.client is not None:
            self.client.stop_channels()
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
