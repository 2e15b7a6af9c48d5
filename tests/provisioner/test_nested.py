# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A script in a pooled notebook starts another pooled kernel, which has its own session.

The broker in this test is a real one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import IPYKERNEL
from jupyter_client import KernelManager

from jupyter_gpupool.client import Client
from jupyter_gpupool.demo import private_broker
from jupyter_gpupool.guard import build as guard_build
from tests.emulated import build as emulator_build

#: A script that the outer notebook runs. It starts another pooled kernel, which uses CUDA.
INNER = """
import json, sys
from jupyter_client import KernelManager

manager = KernelManager(kernel_name=sys.argv[1], transport="ipc", connection_file=sys.argv[2])
manager.start_kernel()
client = manager.client()
client.start_channels()
client.wait_for_ready(timeout=60)
said = []
code = '''
import json, os
from cuda.core import Device
gpu = Device()
gpu.set_current()
mine = gpu.allocate(8 << 20, stream=gpu.default_stream)
names = ("GPUPOOL_PAGE", "GPUPOOL_SESSION", "LD_PRELOAD", "LD_LIBRARY_PATH")
print(json.dumps({"pid": os.getpid(), **{name: os.environ.get(name) for name in names}}))
'''
reply = client.execute_interactive(
    code, timeout=60,
    output_hook=lambda m: said.extend([m["content"].get("text", ""),
                                       *m["content"].get("traceback", ())]),
)
print("INNER", "".join(said), flush=True)
client.stop_channels()
input()  # until its slice was looked at
manager.shutdown_kernel(now=True)
"""

OUTER = """
import json, os, subprocess, sys
inner = subprocess.Popen(
    [sys.executable, {script!r}, {spec!r}, {connection!r}],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
)
print(json.dumps({{"pid": os.getpid(), "page": os.environ.get("GPUPOOL_PAGE"),
                  "inner": inner.stdout.readline()}}))
"""


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    """Build the guard and the emulated driver if they are not built yet."""
    emulator_build.compile()
    guard_build.compile()


def said(client: Any, code: str) -> str:
    text: list[str] = []

    def hook(message: dict[str, Any]) -> None:
        content = message["content"]
        text.extend([content.get("text", ""), *content.get("traceback", ())])

    reply = client.execute_interactive(code, timeout=90, output_hook=hook)
    assert reply["content"]["status"] == "ok", "".join(text)
    return "".join(text)


def test_kernel_inside_a_session_has_its_own_page_and_slice(
    install_spec: Any, tmp_path: Path
) -> None:
    spec = install_spec("pooled", [sys.executable, *IPYKERNEL], {"memory": "256MiB"})
    script = tmp_path / "inner.py"
    script.write_text(INNER)
    with private_broker("2x1GiB,context=16MiB") as socket, Client(socket) as broker:
        manager = KernelManager(
            kernel_name=spec, transport="ipc", connection_file=str(tmp_path / "o.json")
        )
        manager.start_kernel(env={**os.environ, "JPY_SESSION_NAME": "outer"})
        client = manager.client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=60)
            connection = str(tmp_path / "i.json")
            code = OUTER.format(script=str(script), spec=spec, connection=connection)
            outer = json.loads(said(client, code))
            assert outer["inner"].startswith("INNER {"), outer
            inner = json.loads(outer["inner"].removeprefix("INNER "))
            assert outer["page"]
            assert inner["GPUPOOL_PAGE"]
            assert inner["GPUPOOL_PAGE"] != outer["page"]
            # The inner kernel's variables name one guard, and only once. The entries that belong to
            # the outer session are gone.
            (preloaded,) = inner["LD_PRELOAD"].split(":")
            folder = Path(preloaded).parent
            assert (folder.name, Path(preloaded).name) == ("gpupool-guard", "libcuda.so.1")
            paths = inner["LD_LIBRARY_PATH"].split(":")
            assert [path for path in paths if "gpupool-guard" in path] == [str(folder)]
            sessions = {s["id"]: s for s in broker.call("status")["sessions"]}
            mine = sessions.pop(inner["GPUPOOL_SESSION"])
            (other,) = sessions.values()
            assert mine["pid"] == inner["pid"]
            assert mine["granted_bytes"] == 256 << 20
            assert mine["used_bytes"] == (8 + 16) << 20
            # The outer session made no CUDA call, so it has no slice and uses no memory.
            assert (other["pid"], other["granted_bytes"]) == (outer["pid"], 0)
            assert other["used_bytes"] == 0
            code = "inner.communicate('go on\\n', timeout=60); print(inner.returncode)"
            assert said(client, code) == "0\n"
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
