# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The Pooled GPU kernel in the programs that users run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import Any

import jupyter_kernel_test
import nbformat
import pexpect
import psutil
import pytest
from harness import private_connection_file, private_manager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat.v4 import new_code_cell, new_notebook
from scripted_broker import ScriptedBroker
from traitlets.config import Config

from jupyter_gpupool.errors import RefusedError


def notebook(*cells: str) -> Any:
    found = new_notebook(cells=[new_code_cell(source) for source in cells])
    found.metadata.kernelspec = {"name": "gpupool-python3", "display_name": "x"}
    return found


def client(book: Any, **options: Any) -> NotebookClient:
    """Return a client whose kernel has its own Unix sockets, like :func:`private_manager`."""
    manager = {"transport": "ipc", "connection_file": private_connection_file()}
    return NotebookClient(book, config=Config({"KernelManager": manager}), **options)


def outputs(book: Any) -> list[Any]:
    return [
        [{k: v for k, v in o.items() if k in ("text", "ename", "data")} for o in cell.outputs]
        for cell in book.cells
    ]


def queue_then_grant(broker: ScriptedBroker, waits: int) -> None:
    """For each of ``waits`` holds, send two queue positions and then grant the hold."""
    for number in range(waits):
        hold = broker.wait_for("hold", count=number + 1)["hold"]
        broker.push("queue", position=2, length=2, waited=0.0, left=[20.0, 30.0], reason="")
        broker.push("queue", position=1, length=1, waited=0.0, left=None, reason="")
        broker.grant(hold)
        broker.wait_for("drop", hold=hold)
        if number < waits - 1:
            broker.ask_back()


def test_saved_notebook_has_no_trace_of_the_wait(
    broker: ScriptedBroker, in_background: Any
) -> None:
    broker.hold_back()
    book = notebook("print('hi')", "1 + 1")
    in_background(queue_then_grant, broker, 1)
    client(book, timeout=60).execute()
    assert outputs(book) == [[{"text": "hi\n"}], [{"data": {"text/plain": "2"}}]]
    nbformat.validate(book)


def test_nbclient_counts_the_wait_in_its_timeout(broker: ScriptedBroker) -> None:
    """nbclient counts the wait for a slice in its time-out, as its documentation says.

    When the time-out is over, nbclient ends the kernel. Then the kernel's session must end, too.
    """
    broker.hold_back()
    book = notebook("print('hi')")
    with pytest.raises(CellTimeoutError):
        client(book, timeout=1, interrupt_on_timeout=False).execute()
    broker.wait_for("close")
    assert broker.sessions == {}


def test_refused_cell_stops_the_run_of_a_notebook(broker: ScriptedBroker) -> None:
    def refuse(message: Any) -> None:
        raise RefusedError("You have waited 60 s, the longest allowed here.")

    broker.scripts["hold"] = refuse
    book = notebook("ran = True", "print('never')")
    with pytest.raises(CellExecutionError, match="You have waited 60 s"):
        client(book, timeout=60).execute()
    assert outputs(book)[1] == []


def test_papermill_runs_a_pooled_notebook(broker: ScriptedBroker, tmp_path: Path) -> None:
    nbformat.write(notebook("print('hi')"), tmp_path / "in.ipynb")
    done = subprocess.run(
        [sys.executable, "-m", "papermill", "in.ipynb", "out.ipynb", "--no-progress-bar"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    book = nbformat.read(tmp_path / "out.ipynb", 4)
    assert [{"text": "hi\n"}] in outputs(book)
    broker.wait_for("close")


#: Makes jupyter_console show, at the prompt too, outputs that come after the end of their cell.
SHOW_LATE_OUTPUTS = "--ZMQTerminalInteractiveShell.include_other_output=True"


def wait_for_outputs(console: Any, broker: ScriptedBroker, seen: Path) -> None:
    """Wait until the console shows the outputs of a cell that still runs; then take the slice back.

    jupyter_console shows its first prompt when the kernel answers on the shell channel. It does not
    wait for its subscription to the outputs, so it can lose the first ones, and without the status
    "idle" it waits for the end of the cell without a limit. It can also take the "idle" of an
    earlier request for the end of this cell, and then shows the outputs at the end only. The plain
    python3 kernel has the same problems. So repeat a cell that prints until the test has seen it.
    """
    cell = (
        f"any(__import__('os').path.exists({str(seen)!r}) or print('output', 'arrives')"
        " or __import__('time').sleep(0.05) for _ in range(100))"
    )
    for _ in range(10):
        console.expect(r"In \[\d+\]")
        console.sendline(cell)
        console.expect("output arrives")
        seen.touch()
        shown_in_time = bool(console.expect(["False", "True"]))
        seen.unlink()
        if shown_in_time:
            break
    else:
        pytest.fail("the console shows all outputs only at the end of their cell")
    broker.wait_for("drop", count=len(broker.seen("hold")))
    deadline = time.monotonic() + 30
    while not broker.ask_back()["yielded"]:  # a short cell is reported after its end
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_console_runs_cells_in_its_own_pooled_kernel(
    broker: ScriptedBroker, tmp_path: Path
) -> None:
    console = pexpect.spawn(
        sys.executable,
        # Use Unix sockets, because the process of another test could take the kernel's TCP port
        # before the kernel does.
        [
            "-m",
            "jupyter_console",
            "--kernel",
            "gpupool-python3",
            "--simple-prompt",
            "--transport=ipc",
            SHOW_LATE_OUTPUTS,
        ],
        env={**os.environ, "TERM": "dumb", "JUPYTER_CONSOLE_TEST": "1"},
        encoding="utf-8",
        timeout=60,
    )
    try:
        wait_for_outputs(console, broker, tmp_path / "seen")
        holds = len(broker.seen("hold"))
        console.sendline("%gpu")
        console.expect("no slice now")
        console.sendline("print(6 * 7)")
        console.expect("42")
        broker.wait_for("drop", count=holds + 1)
        kernel = psutil.Process(broker.wait_for("launched")["pid"])
        console.sendline("quit()")
        console.expect(pexpect.EOF)
    finally:
        console.close(force=True)
    # The console ends its kernel, but the broker gets no message. A real broker would see that the
    # kernel's process has ended.
    deadline = time.monotonic() + 30
    with suppress(psutil.NoSuchProcess):
        while kernel.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_console_can_join_a_running_kernel(broker: ScriptedBroker, tmp_path: Path) -> None:
    manager = private_manager("gpupool-python3")
    manager.start_kernel()
    console = None
    try:
        broker.wait_for("hello")
        console = pexpect.spawn(
            sys.executable,
            [
                "-m",
                "jupyter_console",
                "--existing",
                manager.connection_file,
                "--simple-prompt",
                SHOW_LATE_OUTPUTS,
            ],
            env={**os.environ, "TERM": "dumb"},
            encoding="utf-8",
            timeout=60,
        )
        wait_for_outputs(console, broker, tmp_path / "seen")
        holds = len(broker.seen("hold"))
        broker.hold_back()
        console.sendline("print(6 * 7)")
        hold = broker.wait_for("hold", count=holds + 1)["hold"]
        broker.push("queue", position=1, length=1, waited=0.0, left=None, reason="")
        console.expect("position 1 of 1")
        broker.grant(hold)
        console.expect("42")
    finally:
        if console is not None:
            console.close(force=True)
        manager.shutdown_kernel(now=True)


class TestConformance(jupyter_kernel_test.KernelTests):
    """Runs the conformance suite of the package jupyter_kernel_test on the Pooled GPU kernel."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.patch = pytest.MonkeyPatch()
        cls.folder = tempfile.TemporaryDirectory(prefix="gpupool-")
        cls.broker = ScriptedBroker(Path(cls.folder.name) / "broker.sock").start()
        cls.patch.setenv("GPUPOOL_SOCKET", str(cls.broker.path))
        cls.patch.setattr(jupyter_kernel_test, "TIMEOUT", 60)
        # The suite's own method starts the kernel with TCP.
        cls.km = private_manager(cls.kernel_name)
        cls.km.start_kernel()
        cls.kc = cls.km.client()
        cls.kc.start_channels()
        cls.kc.wait_for_ready(timeout=60)

    @classmethod
    def tearDownClass(cls) -> None:
        super().tearDownClass()
        cls.patch.undo()
        cls.broker.die()
        cls.folder.cleanup()
        assert cls.broker.problems == []
        assert cls.broker.live_holds() == set()

    def execute_helper(self, *args: Any, **options: Any) -> Any:
        """Run a cell, and wait for each of its messages for a minute; the suite waits for 0.1 s.

        On a busy machine, the kernel may take longer, because it sends the reply before ``idle``.
        """
        get = self.kc.iopub_channel.get_msg
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.kc.iopub_channel, "get_msg", lambda timeout: get(timeout=60))
            return super().execute_helper(*args, **{"timeout": 60, **options})

    def flush_channels(self) -> None:
        """Read all messages of earlier requests.

        The suite reads until no message comes for 0.1 s, and so may miss a late ``idle``.
        """
        for _ in range(10):
            if self._idle_after(self.kc.kernel_info()):
                break
        else:
            pytest.fail("the kernel's outputs do not arrive")
        super().flush_channels()

    def _idle_after(self, request: str) -> bool:
        """Read the reply to a request and its ``idle``, and all messages before them.

        Return False if no ``idle`` comes in 10 s. The kernel may have sent it before the client had
        subscribed to the outputs.
        """
        while self.kc.get_shell_msg(timeout=60)["parent_header"].get("msg_id") != request:
            pass
        try:
            while True:
                message = self.kc.get_iopub_msg(timeout=10)
                ended = message["content"].get("execution_state") == "idle"
                if ended and message["parent_header"].get("msg_id") == request:
                    return True
        except Empty:
            return False

    kernel_name = "gpupool-python3"
    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('test', file=sys.stderr)"
    completion_samples = [
        {"text": "zi", "matches": {"zip"}},
        {"text": "%gpu rel", "matches": {"release"}},
    ]
    complete_code_samples = ["1", "print('hello, world')", "def f(x):\n  return x*2\n\n\n"]
    incomplete_code_samples = ["print('''hello", "def f(x):\n  x*2"]
    invalid_code_samples = ["import = 7q"]
    code_page_something = "zip?"
    code_generate_error = "raise"
    code_execute_result = [{"code": "1+2+3", "result": "6"}]
    code_display_data = [
        {
            "code": "from IPython.display import HTML, display; display(HTML('<b>x</b>'))",
            "mime": "text/html",
        },
    ]
    code_history_pattern = "1?2*"
    # "range" is left out: a plain ipykernel 7.4 answers with session 0, so it fails this test, too.
    supported_history_operations = ("tail", "search")
    code_inspect_sample = "zip"
    code_clear_output = "from IPython.display import clear_output; clear_output()"
