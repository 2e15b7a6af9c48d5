# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Run the example notebooks as different clients do, and compare what each cell shows.

The committed outputs come from a run of one notebook at a time on an empty pool. After a change
of a notebook, write its outputs again::

    python -m tests.e2e.notebooks NAME ...
"""

from __future__ import annotations

import asyncio
import os
import queue
import re
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Callable

import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"

#: Six slices fit on the two devices. More than six notebooks run at the same time, so some wait.
MACHINE = "2x8GiB,context=64MiB"
CONFIG = {"default_memory": 2 << 30}

#: The time-out of one cell in seconds; its wait for a slice counts, too.
CELL_TIMEOUT = 300

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def shown(notebook: Any) -> list[tuple[str, dict[str, str]]]:
    """Return, for each code cell, its id and a dict from each kind of output to its visible text.

    The order of standard output and standard error is random in any kernel, so the dict joins the
    texts of each kind. A display without text (the cleared line of a wait) has no entry.
    """
    cells = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        found: dict[str, str] = {}
        for output in cell.outputs:
            kind = output.output_type
            if kind == "stream":
                kind, text = output.name, output.text
            elif kind == "error":
                text = ESCAPE.sub("", f"{output.ename}: {output.evalue}")
            else:
                text = output.data.get("text/plain", "")
            if text:
                found[kind] = found.get(kind, "") + text
        cells.append((cell.id, found))
    return cells


def _emptied(name: str) -> Any:
    notebook = read(name)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def _client(name: str, connection: Path, think: Callable[[], float]) -> Any:
    """Return an nbclient that runs a notebook in its own kernel.

    After a failed cell, the run goes on, and the error becomes the cell's output. ``think`` returns
    the seconds between two cells, in which a user would read.
    """
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    async def read_on(**_: Any) -> None:
        await asyncio.sleep(think())

    manager = AsyncKernelManager(
        kernel_name="gpupool-python3", transport="ipc", connection_file=str(connection)
    )
    return NotebookClient(
        _emptied(name), km=manager, timeout=CELL_TIMEOUT, startup_timeout=CELL_TIMEOUT,
        iopub_timeout=CELL_TIMEOUT, allow_errors=True, record_timing=False,
        resources={"metadata": {"path": str(FOLDER)}}, on_cell_executed=read_on,
    )  # fmt: skip


def _named(label: str) -> dict[str, str]:
    return {**os.environ, "JPY_SESSION_NAME": label}


def _kernel(client: Any, label: str) -> Any:
    """Start the client's kernel; end it at the end of the block.

    By default, nbclient does not end a kernel whose manager comes from its caller, as here. With
    ``cleanup_kc``, nbclient ends the kernel.
    """
    return client.async_setup_kernel(cleanup_kc=True, env=_named(label))


def at_once() -> float:
    return 0.0


async def by_nbclient(
    name: str, connection: Path, label: str, think: Callable[[], float] = at_once
) -> Any:
    """Run a notebook from its first to its last cell; return the notebook with its outputs."""
    client = _client(name, connection, think)
    async with _kernel(client, label):
        for index, cell in enumerate(client.nb.cells):
            await client.async_execute_cell(cell, index)
    return client.nb


async def with_restart(
    name: str, connection: Path, label: str, think: Callable[[], float] = at_once
) -> Any:
    """Run a notebook up to its middle, restart the kernel, and run the whole notebook."""
    client = _client(name, connection, think)
    cells = list(enumerate(client.nb.cells))
    async with _kernel(client, label):
        for index, cell in cells[: len(cells) // 2 + 1]:
            await client.async_execute_cell(cell, index)
        await client.km.restart_kernel()
        await client.kc.wait_for_ready(timeout=CELL_TIMEOUT)
        for index, cell in cells:
            await client.async_execute_cell(cell, index)
    return client.nb


async def by_papermill(
    name: str, connection: Path, label: str, think: Callable[[], float] = at_once
) -> Any:
    """Run a notebook as ``papermill IN OUT`` does, in a separate process."""
    written = connection.with_suffix(".ipynb")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "papermill", str(FOLDER / f"{name}.ipynb"), str(written),
        "--kernel", "gpupool-python3", "--no-progress-bar", "--cwd", str(FOLDER),
        "--start-timeout", str(CELL_TIMEOUT),
        env=_named(label), stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, said = await process.communicate()
    assert process.returncode == 0, said.decode()
    return nbformat.read(written, as_version=4)


async def _nudge(client: Any) -> None:
    """Request the kernel's information until both the shell and the iopub channel have answered."""
    heard: set[str] = set()
    deadline = asyncio.get_running_loop().time() + CELL_TIMEOUT
    while heard != {"shell", "iopub"}:
        assert asyncio.get_running_loop().time() < deadline, "the kernel does not answer"
        client.kernel_info()
        for name, listen in (("shell", client.get_shell_msg), ("iopub", client.get_iopub_msg)):
            with suppress(queue.Empty):
                await listen(timeout=1)
                heard.add(name)


def _keep(outputs: list[Any], displays: dict[str, Any], message: Any) -> None:
    """Update the outputs of a cell with a kernel's message, as a front end does."""
    kind, content = message["msg_type"], message["content"]
    display = content.get("transient", {}).get("display_id")
    if kind == "clear_output":
        outputs.clear()
    elif kind == "update_display_data" and display in displays:
        displays[display].data = content["data"]
    elif kind in ("stream", "display_data", "execute_result", "error"):
        outputs.append(nbformat.v4.output_from_msg(message))
        if display is not None:
            displays[display] = outputs[-1]


async def by_argv(
    name: str, connection: Path, label: str, think: Callable[[], float] = at_once
) -> Any:
    """Run a notebook as VS Code does: start the kernelspec's ``argv``, without a provisioner."""
    from jupyter_client import AsyncKernelClient
    from jupyter_client.connect import write_connection_file
    from jupyter_client.kernelspec import KernelSpecManager

    notebook = _emptied(name)
    write_connection_file(str(connection), transport="ipc", ip=str(connection.with_suffix("")))
    spec = KernelSpecManager().get_kernel_spec("gpupool-python3")
    # Like VS Code, replace the word "python" with the path of the interpreter.
    argv = [sys.executable if word == "python" else word for word in spec.argv]
    process = await asyncio.create_subprocess_exec(
        *(word.replace("{connection_file}", str(connection)) for word in argv),
        env={**_named(label), **spec.env}, cwd=FOLDER, stdin=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    client = AsyncKernelClient()
    client.load_connection_file(str(connection))
    client.start_channels()
    try:
        # Do not use wait_for_ready: without a manager, it reports a kernel as dead while it starts.
        await _nudge(client)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                keep = partial(_keep, cell.outputs, {})
                await client.execute_interactive(
                    cell.source, timeout=CELL_TIMEOUT, allow_stdin=False, output_hook=keep
                )
                await asyncio.sleep(think())
    finally:
        client.stop_channels()
        process.kill()
        await process.wait()
    return notebook


#: The function that runs each of these notebooks; :func:`by_nbclient` runs all other notebooks.
CLIENTS = {
    "first_steps": by_argv,
    "restart_and_run_all": with_restart,
    "with_parameters": by_papermill,
}


async def _write(wanted: list[str], folder: Path) -> None:
    for name in wanted:
        notebook = await by_nbclient(name, folder / f"{name}.json", name)
        nbformat.write(notebook, FOLDER / f"{name}.ipynb")
        print(f"== {name}")
        for cell, outputs in shown(notebook):
            for kind, text in outputs.items():
                print(f"{cell:28} {kind:8} {text.rstrip()}")


def main(argv: list[str]) -> int:
    from .kit import Pool

    with tempfile.TemporaryDirectory(prefix="gpn") as folder, pytest.MonkeyPatch.context() as patch:
        pool = Pool(Path(folder), MACHINE, CONFIG)
        pool.take_environment(patch)
        pool.begin()
        try:
            asyncio.run(_write(argv or names(), Path(folder)))
        finally:
            pool.end()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
