# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter gpupool demo``: three notebooks share too few GPUs, and no notebook loses its data.

The demo runs ``examples/pooled_gpu.ipynb`` on the Pooled GPU kernel with its own broker. While this
notebook runs, two other notebooks (the neighbours) take the GPU. At the end the demo prints the
events from the broker's journal. The notebooks and the broker are real. The GPUs and their driver
are emulated only if the machine has no NVIDIA driver, or if emulation was requested.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import timeline
from .client import Client
from .devices import vendor
from .endpoint import SOCKET_VARIABLE
from .errors import Code, GPUPoolError
from .starting import ensure_broker
from .units import format_bytes

KERNEL_NAME = "gpupool-python3"
EMULATED_MACHINE = "2x16GiB"

_EMULATE = "GPUPOOL_EMULATE"
_CONFIG_PATH = "JUPYTER_CONFIG_PATH"
_LABEL = "EMULATED GPUs; everything else is real"

#: Each notebook asks for this part of a device, so that two notebooks never fit on one device.
SHARE_OF_DEVICE = 0.6

#: Time-out of a cell in seconds. An emulated copy of 512 MiB takes much less than one second.
CELL_TIMEOUT = 300

NEIGHBOUR = """
import time
from pathlib import Path
from cuda.core import Device
gpu = Device()
gpu.set_current()
stream = gpu.create_stream()
mine = gpu.allocate(256 << 20, stream=stream)
mine.fill(7, stream=stream)
stream.sync()
while {busy} and not Path({flag!r}).exists():
    mine.fill(7, stream=stream)  # always at work: its slice is in use and cannot be taken
    stream.sync()
    time.sleep(0.05)
"""


#: For each attach policy: a text that says when a notebook gets its slice.
_ATTACH = {
    "lazy": "a notebook gets its slice at its first CUDA call (attach policy 'lazy')",
    "cell": "a notebook gets its slice when a cell starts (attach policy 'cell', without the "
    "guard: `jupyter gpupool doctor` says why)",
    "manual": "a notebook gets its slice on %gpu attach (attach policy 'manual')",
}


#: If PyTorch is installed, JupyterLab opens this notebook of the examples folder.
TRAINING = "pytorch/training.ipynb"


def find_notebook() -> Path:
    """Return the example notebook: from the installed package, or from a checkout."""
    here = Path(__file__).parent
    for folder in (here / "examples", here.parent / "examples"):
        if (folder / "pooled_gpu.ipynb").exists():
            return folder / "pooled_gpu.ipynb"
    raise GPUPoolError(
        "The example notebook pooled_gpu.ipynb is not installed.",
        code=Code.NO_EXAMPLE,
        next_step="Reinstall jupyter_gpupool, or run this from a checkout.",
    )


@contextmanager
def private_broker(emulate: str) -> Iterator[Path]:
    """Run a broker only for this demo and yield its socket; end the broker afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="gpupool-demo-"))
    socket = folder / "broker.sock"
    config = {
        "GPUPool": {
            "state_dir": str(folder / "state"),
            "emulate": emulate,
            "idle_timeout": 3600.0,
            "sample_interval": 0.5,
            # The pool grants a slice only if host memory can hold the whole slice. Here the pool
            # may count all of the host memory, because the demo's state is small.
            "host_memory": "100%",
        }
    }
    # The notebooks read this file. So they have the same configuration as the broker, and show no
    # notice of a difference.
    (folder / "jupyter_server_config.json").write_text(json.dumps(config))
    paths = [str(folder), *filter(None, [os.environ.get(_CONFIG_PATH)])]
    ours = {SOCKET_VARIABLE: str(socket), _CONFIG_PATH: os.pathsep.join(paths)}
    saved = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield ensure_broker(config, str(socket))
        with Client(socket) as client:
            os.kill(client.call("status")["pid"], signal.SIGTERM)
        # This line runs only after a success. After a failure the folder stays, because the user
        # may need the broker's log in it.
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def say(text: str) -> None:
    """Print progress at once, even if the output is a pipe."""
    print(text, flush=True)


async def _start_kernel(memory: int, label: str, folder: Path) -> Any:
    """Start a Pooled GPU kernel that asks for ``memory`` bytes; return its manager."""
    from jupyter_client.manager import AsyncKernelManager
    from traitlets.config import Config

    # The manager passes this config to the provisioner, as a Jupyter server does. The kernels use
    # Unix sockets in ``folder`` instead of TCP. Other users have no access to the folder, so they
    # cannot read the kernels' messages.
    manager = AsyncKernelManager(
        kernel_name=KERNEL_NAME,
        transport="ipc",
        connection_file=str(folder / f"{label.replace(' ', '-')}.json"),
        config=Config({"GPUPoolProvisioner": {"memory": memory}}),
    )
    await manager.start_kernel(env={**os.environ, "JPY_SESSION_NAME": label}, cwd=str(folder))
    return manager


async def _neighbour(manager: Any, label: str, busy: bool, flag: Path) -> Any:
    """Run a cell that puts data on a GPU; if ``busy``, the cell runs until ``flag`` exists."""
    client = manager.client()
    client.start_channels()
    await client.wait_for_ready(timeout=CELL_TIMEOUT)
    code = NEIGHBOUR.format(busy=busy, flag=str(flag))
    if busy:
        # Do not wait for the end of the cell. The journal shows when the neighbour had its device.
        client.execute(code)
    else:
        reply = await client.execute_interactive(code, timeout=CELL_TIMEOUT)
        if reply["content"]["status"] != "ok":
            raise GPUPoolError(f"{label} failed: {reply['content'].get('evalue')}")
    return client


async def _wait_attached(broker: Client, label: str) -> None:
    """Wait until the session with this label holds a device, for at most CELL_TIMEOUT."""
    deadline = asyncio.get_running_loop().time() + CELL_TIMEOUT
    while asyncio.get_running_loop().time() < deadline:
        for session in broker.call("status")["sessions"]:
            if session["label"] == label and session["state"] == "active":
                return
        await asyncio.sleep(0.05)
    raise GPUPoolError(f"{label} did not get a GPU within {CELL_TIMEOUT} s.")


async def _run_notebook(broker: Client, folder: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    devices = broker.call("status")["devices"]
    memory = int(min(d["memory_capacity"] for d in devices) * SHARE_OF_DEVICE)
    # Each neighbour works until its file in ``flags`` exists. While neighbour 1 works, the pool can
    # only suspend the notebook to make room for neighbour 2. Then neighbour 1 ends its work, but
    # neighbour 2 still works: the pool can only suspend neighbour 1 to make room for the notebook.
    flags = {"neighbour 1": folder / "neighbour-2-has-it", "neighbour 2": folder / "notebook-done"}
    notebook = nbformat.read(find_notebook(), as_version=4)
    managers, clients = [], []
    say(f"  your notebook starts without a GPU; its slice will have {format_bytes(memory)}")
    try:
        managers.append(await _start_kernel(memory, "your notebook", folder))
        client = NotebookClient(notebook, km=managers[0], timeout=CELL_TIMEOUT)
        async with client.async_setup_kernel():
            for index, cell in enumerate(notebook.cells):
                if "others-need-the-gpu" in cell.metadata.get("tags", []):
                    for label, flag in flags.items():
                        say(f"  {label} starts and asks for {format_bytes(memory)}")
                        managers.append(await _start_kernel(memory, label, folder))
                        # If there is only one device, the neighbour must not keep it busy: the
                        # notebook needs it again.
                        busy = len(devices) > 1
                        clients.append(await _neighbour(managers[-1], label, busy, flag))
                        if busy:
                            await _wait_attached(broker, label)
                    flags["neighbour 1"].touch()
                    say("  your notebook runs its next cells")
                await client.async_execute_cell(cell, index)
                _show_outputs(cell)
    finally:
        for flag in flags.values():
            flag.touch()
        for client in clients:
            client.stop_channels()
        for manager in managers:
            await manager.shutdown_kernel(now=True)


def _show_outputs(cell: Any) -> None:
    for output in cell.get("outputs", []):
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        for line in text.rstrip().splitlines():
            say(f"    | {line}")


def choose_machine(emulate: str) -> tuple[str, str]:
    """Return the machine to emulate ("" for the real driver), and the reason as a sentence.

    ``emulate`` is the machine on the command line. If it is "", the environment variable counts.
    """
    present = vendor.driver_present()
    for asked, by in ((emulate, "--emulate"), (os.environ.get(_EMULATE, ""), _EMULATE)):
        if asked:
            unused = f" This machine's {vendor.NAME} driver is not used." if present else ""
            return asked, f"Emulating {asked} ({_LABEL}), because {by} asks for it.{unused}"
    if present:
        return "", f"Using the {vendor.NAME} driver of this machine."
    return (
        EMULATED_MACHINE,
        f"No {vendor.NAME} driver here: emulating {EMULATED_MACHINE} ({_LABEL}).",
    )


def _check_packages() -> None:
    """Refuse to start notebooks whose imports would fail.

    Raises
    ------
    GPUPoolError
        With the command that installs the missing packages.
    """
    missing = []
    for name in ("cuda-core", "cuda-bindings", "numpy"):
        try:
            version(name)
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        raise GPUPoolError(
            f"The notebooks of the demo import {', '.join(missing)}, which is not installed here.",
            code=Code.NO_PACKAGES,
            next_step="Run the demo in an environment made with: "
            "pip install 'jupyter_gpupool[devices]'",
        )


def run_demo(*, emulate: str = "", svg: str = "") -> int:
    """Run the example and print the timeline; return the exit code.

    Parameters
    ----------
    emulate:
        A machine to emulate, such as ``"2x16GiB"``; if it is "", :func:`choose_machine` decides.
    svg:
        Also write the timeline as an SVG picture to this file.
    """
    _check_packages()
    emulate, text = choose_machine(emulate)
    say(text)
    with private_broker(emulate) as socket, Client(socket) as broker:
        status = broker.call("status")
        devices = [d["uuid"] for d in status["devices"]]
        names = [f"GPU {d['index']}: {d['name']}" for d in status["devices"]]
        if not devices:
            raise GPUPoolError(
                "The pool has no device to run the demo on.",
                next_step="See `jupyter gpupool doctor`, or use --emulate 2x16GiB.",
            )
        for name in names:
            say(f"  {name}")
        say(f"  {_ATTACH[status['settings']['attach']]}")
        with tempfile.TemporaryDirectory(prefix="gpupool-demo-") as folder:
            asyncio.run(_run_notebook(broker, Path(folder)))
        rows = broker.journal()
    return _report(rows, devices, names, svg)


def _report(rows: list[Any], devices: list[str], names: list[str], svg: str) -> int:
    lanes = timeline.lanes(rows, rows[-1]["time"])
    labels = {lane.session: lane.label for lane in lanes}
    say("\nWhat happened, from the broker's journal:\n")
    for line in timeline.describe(rows, labels, devices):
        say(f"  {line}")
    say("")
    say(timeline.draw_text(lanes, devices))
    if svg:
        Path(svg).write_text(timeline.draw_svg(lanes, devices, names), encoding="utf-8")
        say(f"\nPicture written to {svg}")
    mine = next((lane.session for lane in lanes if lane.label == "your notebook"), None)
    did = {row["kind"] for row in rows if row["session"] == mine}
    needed = {"attach", "suspend", "resume"}
    missing = sorted(needed - did)
    if missing:
        say(
            "\nThe demo failed: the broker's journal does not show these steps of your notebook: "
            f"{', '.join(missing)}."
        )
        return 1
    moved = " on another device" if "migrate" in did else ""
    say(f"\nYour notebook was attached, suspended and restored{moved}; its data did not change.")
    return 0


def run_lab(*, emulate: str = "") -> int:
    """Open JupyterLab on the examples; does not return if JupyterLab starts."""
    emulate, text = choose_machine(emulate)
    folder = find_notebook().parent
    arguments = [sys.executable, "-m", "jupyterlab", f"--notebook-dir={folder}"]
    if os.getuid() == 0:
        arguments.append("--allow-root")
    if find_spec("torch") and (folder / TRAINING).exists():
        arguments.append(f"--LabApp.default_url=/lab/tree/{TRAINING}")
    say(text)
    if emulate:
        arguments.append(f"--GPUPool.emulate={emulate}")
    if find_spec("jupyterlab") is None:
        raise GPUPoolError(
            "JupyterLab is not installed.",
            code=Code.NO_LAB,
            next_step="Install it with: pip install 'jupyter_gpupool[lab]'",
        )
    os.execv(sys.executable, arguments)
