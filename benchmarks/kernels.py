# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Real kernels and a broker of one's own, for benchmarks. Not a benchmark itself."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jupyter_client import KernelManager
from traitlets.config import Config

from jupyter_gpupool.autostart import ensure_broker
from jupyter_gpupool.client import Client
from jupyter_gpupool.emulator.profiles import real_driver_present


@contextmanager
def private_pool() -> Iterator[list[str]]:
    """Run a broker for this benchmark alone; yield the names of its devices."""
    with tempfile.TemporaryDirectory(prefix="gpb") as folder:
        socket = Path(folder) / "broker.sock"
        config: dict[str, Any] = {
            "state_dir": str(Path(folder) / "state"),
            "idle_timeout": 3600.0,
            "default_memory": 1 << 30,
            "default_limit": 1 << 30,
        }
        if not real_driver_present():
            config["emulate"] = "1x16GiB"
        saved = os.environ.get("GPUPOOL_SOCKET")
        os.environ["GPUPOOL_SOCKET"] = str(socket)
        try:
            ensure_broker({"GPUPool": config}, str(socket))
            with Client(socket) as client:
                status = client.call("status")
                try:
                    yield [device["name"] for device in status["devices"]]
                finally:
                    os.kill(status["pid"], signal.SIGTERM)
        finally:
            del os.environ["GPUPOOL_SOCKET"]
            if saved is not None:
                os.environ["GPUPOOL_SOCKET"] = saved


class Kernel:
    """A kernel that is ready when the ``with`` block begins, and gone when it ends."""

    def __init__(self, name: str, **provisioner: Any) -> None:
        config = Config({"GPUPoolProvisioner": provisioner})
        self._manager = KernelManager(kernel_name=name, config=config)
        self._manager.start_kernel(stdout=-3, stderr=-3)
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=120)

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)

    def run(self, code: str) -> str:
        """Run a cell to its end and return what it has printed.

        Raises
        ------
        RuntimeError
            If it fails.
        """
        client = self._client
        msg_id = client.execute(code, allow_stdin=False)
        text = ""
        while True:
            message = client.get_iopub_msg(timeout=120)
            if message["parent_header"].get("msg_id") != msg_id:
                continue
            if message["msg_type"] == "stream":
                text += message["content"]["text"]
            elif (
                message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"
            ):
                break
        reply = client.get_shell_msg(timeout=120)
        if reply["content"]["status"] != "ok":
            raise RuntimeError(f"{reply['content'].get('ename')}: {reply['content'].get('evalue')}")
        return text
