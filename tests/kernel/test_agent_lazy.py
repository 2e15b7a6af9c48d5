# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Policy ``lazy``: cells send no message, and the agent shows and explains the guard's actions."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any, Callable

import pytest
from guard_page import GuardPage
from harness import Execution, Kernel, this_python
from scripted_broker import DEVICE, OTHER_DEVICE, GiB, ScriptedBroker
from test_agent_concurrency import COMM, comm_done, send_comm

from jupyter_gpupool.guard.page import SLOT_CONTEXT, SLOT_CUDA
from jupyter_gpupool.kernel import waits

MiB = 1 << 20

#: Code that waits until the file ``flag`` exists. Like a CUDA call, it releases the interpreter's
#: lock.
INSIDE = """
import time
from pathlib import Path
Path({flag!r} + ".in").touch()
while not Path({flag!r}).exists():
    time.sleep(0.01)
"""


@pytest.fixture
def page(broker: ScriptedBroker, tmp_path: Path) -> GuardPage:
    """Make the broker's kernels believe that they run under a guard."""
    page = GuardPage(tmp_path)
    broker.attach = "lazy"
    broker.env = page.env(DEVICE)
    return page


@pytest.fixture
def flag(tmp_path: Path) -> Path:
    return tmp_path / "flag"


def pid_of(kernel: Kernel) -> int:
    return int(kernel.manager.provisioner.process.pid)


def kinds(broker: ScriptedBroker) -> list[str]:
    return [m["type"] for m in broker.messages]


def queued(broker: ScriptedBroker, position: int = 1, reason: str = "") -> None:
    """Push the messages that the broker sends when a thread at the gate must queue."""
    # The text about these times stays the same for minutes, so a cell sends no update for it.
    left = [2400.0, 3500.0]
    broker.push("queue", position=position, length=3, waited=0.0, left=left, reason=reason)
    broker.push("lease", state="queued", epoch=0, slices=[], reason="", pinned_reason="")


def granted(broker: ScriptedBroker, device: str = DEVICE, epoch: int = 1) -> None:
    broker.state, broker.epoch, broker.device = "active", epoch, device
    slices = [{"device": device, "bytes": 4 * GiB}]
    broker.push("lease", state="active", epoch=epoch, slices=slices, reason="", pinned_reason="")


def inside(flag: Path) -> None:
    """Wait until the cell itself runs. ipykernel publishes the cell's input too early."""
    begun = flag.with_name(f"{flag.name}.in")
    deadline = time.monotonic() + 60
    while not begun.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    begun.unlink()


def read_pushes(kernel: Kernel) -> None:
    """Wait until the agent has read all earlier pushes.

    The agent reads messages in order. When it has the answer to this request, it has read all
    pushes that the broker sent before the answer.
    """
    assert kernel.run("%gpu pool").status == "ok"


def gone(cell: Execution, what: str, timeout: float = 60) -> None:
    """Wait until no output of the cell has this text."""
    deadline = time.monotonic() + timeout
    while what in cell.text:
        cell.kernel.read(deadline, cell)


# ---------------------------------------------------------------------- cells send nothing


def test_cells_and_widgets_send_nothing(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel], python: str
) -> None:
    kernel = start(python)
    kernel.run(COMM)
    send_comm(kernel, "comm_open", target_name="test")
    comm_done(kernel, send_comm(kernel, "comm_msg", data={"n": 1}))
    for code in ("1 + 1", "1/0", "def", "await __import__('asyncio').sleep(0)", "%time x = 1", ""):
        kernel.run(code)
    kernel.run("x = 2", silent=True)
    kernel.run("x = 2", metadata={"tags": ["no-gpu"]})
    kernel.run("x", metadata={"tags": ["gpu"]}, silent=True)
    assert kernel.value("seen") == "[{'n': 1}]"
    # The kernel has suspended state. The agent still sends no hold, because a CUDA call of the cell
    # would wait in the guard.
    page.process(pid_of(kernel), flags=SLOT_CUDA | SLOT_CONTEXT, used=1 << 20)
    comm_done(kernel, send_comm(kernel, "comm_msg", data={"n": 2}))
    kernel.run("x = 3", silent=True)
    kernel.run("x = 3")
    assert kinds(broker) == ["hello"]


def test_cell_that_requests_a_slice_gets_it_before_it_runs(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel]
) -> None:
    kernel = start()
    assert kernel.run("%%gpu 16GiB\nprint(1)").text == "1\n"
    assert broker.wait_for("request")["memory"] == 16 * GiB
    assert broker.wait_for("hold")["wait"] is True
    broker.wait_for("drop")
    assert broker.ask_back()["yielded"] is True
    assert kernel.run("x = 1", metadata={"tags": ["gpu"]}).status == "ok"
    assert broker.wait_for("hold", count=2)["wait"] is True
    assert "Attached: 4 GiB on" in kernel.run("%gpu attach").text
    assert broker.wait_for("hold", count=3)["kind"] == "manual"
    broker.wait_for("drop", count=3)
    assert broker.live_holds() == set()


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ("GPUPOOL_PAGE", "off: the broker does not guard this kernel"),
        ("LD_PRELOAD", "off: LD_PRELOAD of this process does not name the guard"),
    ],
)
def test_lazy_kernel_without_a_guard_uses_the_policy_cell(
    broker: ScriptedBroker,
    page: GuardPage,
    start: Callable[..., Kernel],
    missing: str,
    reason: str,
) -> None:
    """The agent asks for a slice before each cell, because the kernel has no guard.

    The broker assumes that the kernel has one.
    """
    kernel = start(**{missing: ""})
    kernel.run("x = 1")
    assert broker.wait_for("hold")["wait"] is True
    assert reason in kernel.run("%gpu").text


def test_agent_shows_the_brokers_reason_for_a_missing_guard(
    broker: ScriptedBroker, start: Callable[..., Kernel]
) -> None:
    kernel = start()
    status = broker._on_status({})
    broker.scripts["status"] = lambda message: {
        **status,
        "settings": {"attach_reason": "its self-test failed"},
    }
    assert "off: its self-test failed" in kernel.run("%gpu").text


def test_agent_answers_a_yield_at_once_during_a_cell(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel], flag: Path
) -> None:
    kernel = start()
    cell = kernel.start(INSIDE.format(flag=str(flag)))
    inside(flag)
    granted(broker)
    assert broker.ask_back()["cuda"] is False
    page.process(pid_of(kernel), flags=SLOT_CUDA)
    granted(broker, epoch=2)
    answer = broker.ask_back()
    assert (answer["yielded"], answer["cuda"]) == (True, True)
    flag.touch()
    assert cell.done().status == "ok"
    assert set(kinds(broker)) == {"hello", "yielded"}


# ---------------------------------------------------------------------- another kernel waits


def test_idle_kernel_sends_resting_when_another_session_waits(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel]
) -> None:
    kernel = start()
    kernel.run("x = 1")
    granted(broker)
    broker.push("wanted")
    broker.wait_for("resting")


def test_kernel_sends_resting_after_each_cell_if_a_session_waits(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel], flag: Path
) -> None:
    kernel = start()
    granted(broker)
    cell = kernel.start(INSIDE.format(flag=str(flag)))
    inside(flag)
    broker.push("wanted")
    # Push a ``yield`` with an old epoch after ``wanted``. When the agent refuses this ``yield``, it
    # has also read ``wanted``.
    broker.push("yield", epoch=0)
    assert broker.wait_for("yielded")["yielded"] is False
    assert not broker.seen("resting")
    flag.touch()
    assert cell.done().status == "ok"
    broker.wait_for("resting")
    kernel.run("1/0")
    broker.wait_for("resting", count=2)


def test_kernel_sends_resting_after_a_widget_callback_too(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel]
) -> None:
    kernel = start()
    kernel.run(COMM)
    granted(broker)
    broker.push("wanted")
    broker.wait_for("resting")
    send_comm(kernel, "comm_open", target_name="test")
    comm_done(kernel, send_comm(kernel, "comm_msg", data={"n": 1}))
    broker.wait_for("resting", count=2)


def test_cells_send_nothing_after_the_end_of_the_lease(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel]
) -> None:
    kernel = start()
    granted(broker)
    broker.push("wanted")
    broker.wait_for("resting")
    assert broker.ask_back()["yielded"] is True
    kernel.run("x = 1")
    kernel.run("x = 2")
    granted(broker, epoch=2)
    kernel.run("x = 3")
    broker.push("wanted")
    broker.wait_for("resting", count=2)
    assert len(broker.seen("resting")) == 2


def test_cells_run_without_a_broker_and_show_no_message(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel]
) -> None:
    kernel = start()
    broker.die()
    assert kernel.run("print(1)").outputs == [{"name": "stdout", "text": "1\n"}]


# ---------------------------------------------------------------------- variables of the process


SEE = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['GPUPOOL_VISIBLE'])"


def test_children_see_the_devices_of_the_lease(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel]
) -> None:
    kernel = start()
    assert kernel.run(SEE).text == f"{DEVICE} {DEVICE}\n"
    granted(broker, OTHER_DEVICE)
    read_pushes(kernel)
    assert kernel.run(SEE).text == f"{OTHER_DEVICE} {OTHER_DEVICE}\n"
    kernel.run("os.environ['CUDA_VISIBLE_DEVICES'] = ''")
    granted(broker, DEVICE, epoch=2)
    read_pushes(kernel)
    assert kernel.run(SEE).text == f" {OTHER_DEVICE}\n"  # the user's own value stays


def test_guarded_kernel_sets_no_framework_cap(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel]
) -> None:
    kernel = start()
    kernel.run(
        "import sys, types\n"
        "torch = types.ModuleType('torch'); calls = []\n"
        "torch.cuda = torch\n"
        "torch.is_initialized = lambda: True\n"
        "torch.get_device_properties = lambda n: calls.append(n)\n"
        "torch.set_per_process_memory_fraction = lambda *a: calls.append(a)\n"
        "sys.modules['torch'] = torch"
    )
    granted(broker)
    read_pushes(kernel)
    kernel.run("pass")
    assert kernel.run("calls").text == "[]"


def test_tooltip_does_not_touch_suspended_state(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel]
) -> None:
    kernel = start()
    kernel.run("class Tensor:\n    def __repr__(self): raise SystemExit('touched')\nt = Tensor()")

    def tooltip() -> str:
        content = kernel.client.inspect("kernel_pid", reply=True, timeout=60)["content"]
        return content["data"]["text/plain"] if content["found"] else ""

    kernel.run("kernel_pid = 7")
    assert "int" in tooltip()
    page.process(os.getpid(), flags=SLOT_CONTEXT)  # the state of a child process does not count
    assert "int" in tooltip()
    page.process(pid_of(kernel), flags=SLOT_CONTEXT)
    assert tooltip().startswith("The GPU state of this kernel is in host memory")
    page.grant(DEVICE, 4 * GiB, 4 * GiB)
    assert "int" in tooltip()
    assert "hold" not in kinds(broker)


# ---------------------------------------------------------------------- the wait inside a call


def test_wait_of_a_call_is_shown_only_until_the_call_returns(
    broker: ScriptedBroker,
    page: GuardPage,
    start: Callable[..., Kernel],
    python: str,
    flag: Path,
) -> None:
    kernel = start(python)
    cell = kernel.start(INSIDE.format(flag=str(flag)) + "print('hi')")
    inside(flag)
    page.process(pid_of(kernel), waiting=1)
    queued(broker, 2, "Alice has it.")
    shown = cell.until("display_data")["content"]
    assert shown["data"]["text/plain"] == (
        "Waiting for a GPU slice of 4 GiB: position 2 of 3, 30 to 60 min left. Alice has it. "
        "A CUDA call of this cell waits; interrupt the kernel to end the cell."
    )
    queued(broker, 1)
    update = cell.until("update_display_data")["content"]
    assert update["transient"] == shown["transient"]
    assert "position 1 of 3" in update["data"]["text/html"]
    page.process(pid_of(kernel), waiting=0)
    granted(broker)
    gone(cell, "position")
    flag.touch()
    assert cell.done().outputs == [{"name": "stdout", "text": "hi\n"}]
    assert set(kinds(broker)) == {"hello", "why"}


def test_waiting_cell_shows_what_its_user_can_do(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel], flag: Path
) -> None:
    lease = {"session": "s2", "own": True, "label": "alpha.ipynb", "bytes": 6 * GiB, "use": "busy"}
    other = {**lease, "session": "s3", "own": False, "label": ""}
    broker.scripts["why"] = lambda _: {
        "starts_with_bytes": 3 * GiB,
        "holders": [lease, {**lease, "session": "s4", "use": "leaving"}, other],
    }
    kernel = start()
    cell = kernel.start(INSIDE.format(flag=str(flag)))
    inside(flag)
    page.process(pid_of(kernel), waiting=1)
    broker.push("lease", state="queued", epoch=0, slices=[], reason="", pinned_reason="")
    queued(broker)
    deadline = time.monotonic() + 60
    while "3 GiB" not in cell.text:
        kernel.read(deadline, cell)
    assert (
        "This cell would start now with 3 GiB: stop waiting, run %gpu 3GiB, then run the cell "
        "again. Your kernel alpha.ipynb has 6 GiB: to free this memory, run %gpu release there."
    ) in cell.text
    shown = [m["content"] for m in cell.messages if m["msg_type"].endswith("display_data")]
    data = shown[0]["data"]["application/vnd.gpupool.wait+json"]
    assert data["text"].startswith("Waiting for a GPU slice of 4 GiB")
    assert data["session"] in broker.sessions
    page.process(pid_of(kernel), waiting=0)
    flag.touch()
    cell.done()


def test_wait_shows_that_an_interrupt_had_no_effect(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel], flag: Path
) -> None:
    kernel = start()
    cell = kernel.start(INSIDE.format(flag=str(flag)))
    inside(flag)
    page.process(pid_of(kernel), waiting=1)
    queued(broker, 1, "Alice has it.")
    cell.until("display_data")
    page.process(pid_of(kernel), waiting=1, held=1)
    update = cell.until("update_display_data")["content"]["data"]["text/plain"]
    assert update.startswith("Waiting for a GPU slice of 4 GiB: position 1 of 3")
    assert "The interrupt changed nothing, because a library such as JAX waits" in update
    assert "Interrupt the kernel once more to end the call." in update
    page.process(pid_of(kernel), waiting=0)
    granted(broker)
    gone(cell, "position")
    flag.touch()
    assert cell.done().reply["status"] == "ok"


def test_interrupt_after_a_wait_shows_no_message_of_the_pool(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel], flag: Path
) -> None:
    kernel = start()
    cell = kernel.start(INSIDE.format(flag=str(flag)))
    inside(flag)
    page.process(pid_of(kernel), waiting=1)
    queued(broker)
    cell.until("display_data")
    page.process(pid_of(kernel), waiting=0)
    granted(broker)
    gone(cell, "position")
    kernel.manager.interrupt_kernel()
    cell.done()
    assert [o.get("ename") for o in cell.outputs if "ename" in o] == ["KeyboardInterrupt"]
    assert "GPU pool" not in cell.text


def test_output_of_the_cell_stays_after_a_wait(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel], flag: Path
) -> None:
    kernel = start()
    before = "print('before', flush=True)\n"
    cell = kernel.start(before + INSIDE.format(flag=str(flag)) + "print('after')")
    cell.until("stream")
    page.process(pid_of(kernel), waiting=1)
    queued(broker)
    cell.until("display_data")
    page.process(pid_of(kernel), waiting=0)
    granted(broker)
    gone(cell, "Waiting for a GPU slice")
    updates = [m["content"] for m in cell.messages if m["msg_type"] == "update_display_data"]
    emptied = updates[-1]
    assert emptied["data"] == {"text/plain": "", "text/html": ""}
    # A second wait in the same cell uses the same display.
    page.shut()
    page.process(pid_of(kernel), waiting=1)
    broker.push("lease", state="queued", epoch=1, slices=[], reason="", pinned_reason="")
    seen = len(cell.messages)
    while not any("position" in str(m["content"]) for m in cell.messages[seen:]):
        broker.push("queue", position=1, length=1, waited=0.0, left=None, reason="")
        kernel.read(time.monotonic() + 20, cell)
    page.process(pid_of(kernel), waiting=0)
    granted(broker, epoch=2)
    flag.touch()
    cell.done()
    assert "clear_output" not in [m["msg_type"] for m in cell.messages]
    assert [o["text"] for o in cell.outputs if "text" in o] == ["before\n", "after\n"]
    last = [m for m in cell.messages if m["msg_type"] == "update_display_data"][-1]
    assert last["content"]["data"]["text/plain"] == ""


def test_display_of_a_wait_is_removed_if_its_cell_ends_first(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel], flag: Path
) -> None:
    kernel = start()
    cell = kernel.start(INSIDE.format(flag=str(flag)))
    inside(flag)
    page.process(pid_of(kernel), waiting=1)
    queued(broker)
    cell.until("display_data")
    flag.touch()
    assert cell.done().outputs == []
    assert kernel.run("print(1)").outputs == [{"name": "stdout", "text": "1\n"}]


def test_wait_is_shown_only_for_a_cell_with_a_waiting_thread(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel], flag: Path
) -> None:
    kernel = start()
    page.process(pid_of(kernel), waiting=1)
    queued(broker)
    # A thread waits while no cell runs, for example in a widget's callback. No cell can show this
    # wait.
    read_pushes(kernel)
    page.process(pid_of(kernel), waiting=0)
    cell = kernel.start(INSIDE.format(flag=str(flag)) + "print(1)")
    inside(flag)
    queued(broker)  # the slice is granted at once: no thread waits now
    page.grant(DEVICE, 4 * GiB, 4 * GiB)
    page.process(pid_of(kernel), waiting=1)
    # The gate is open: the thread waits for its turn on the GPU, not for the slice.
    queued(broker)
    # A display would appear within this sleep. On a slow machine, a wrong display may appear later,
    # and the test then misses the fault.
    time.sleep(2 * waits.PATIENCE + waits.TICK)
    flag.touch()
    assert cell.done().outputs == [{"name": "stdout", "text": "1\n"}]
    assert "display_data" not in [m["msg_type"] for m in cell.messages]


def test_an_interrupt_ends_the_cell_and_removes_the_display(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel], python: str, flag: Path
) -> None:
    kernel = start(python)
    cell = kernel.start(INSIDE.format(flag=str(flag)))
    inside(flag)
    page.process(pid_of(kernel), waiting=1)
    queued(broker)
    cell.until("display_data")
    kernel.manager.interrupt_kernel()
    cell.done()
    assert [o.get("ename") for o in cell.outputs if "ename" in o] == ["KeyboardInterrupt"]
    assert "position" not in cell.text
    assert cell.text.endswith(
        "GPU pool: you stopped the wait for a GPU slice. Nothing on the GPU has changed, and the "
        "lines before the call that waited have run.\n"
    )
    page.process(pid_of(kernel), waiting=0)  # a guard does this when the call ends
    assert kernel.run("1 + 1").text == "2"


#: A cell that raises KeyboardInterrupt as soon as the agent has read that its queue position is 2.
INTERRUPTED = """
import time
from jupyter_gpupool.kernel import _agents, call_waits
call_waits.PATIENCE = 600  # the wait is too short to be shown
link = next(iter(_agents.values())).link
print('before')
while link.queue is None or link.queue.position != 2:
    time.sleep(0.01)
raise KeyboardInterrupt
"""


def test_interrupted_short_wait_gets_a_message_and_no_display(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel]
) -> None:
    kernel = start()
    page.process(pid_of(kernel), waiting=1)
    cell = kernel.start(INTERRUPTED)
    cell.until("stream")
    queued(broker, 1)
    queued(broker, 2)
    cell.done()
    assert "display_data" not in [m["msg_type"] for m in cell.messages]
    assert cell.text.endswith(
        "GPU pool: you stopped the wait for a GPU slice. Nothing on the GPU has changed, and the "
        "lines before the call that waited have run.\n"
    )


def test_waiting_call_names_a_broker_that_is_away(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel], flag: Path
) -> None:
    kernel = start()
    cell = kernel.start(INSIDE.format(flag=str(flag)) + "print('hi')")
    inside(flag)
    page.process(pid_of(kernel), waiting=1)
    broker.die()
    shown = cell.until("display_data")["content"]["data"]["text/plain"]
    assert shown.startswith(f"Waiting for the GPU pool broker at {broker.path}.")
    page.process(pid_of(kernel), waiting=0)
    broker.start()
    gone(cell, "Waiting")
    flag.touch()
    assert cell.done().outputs == [{"name": "stdout", "text": "hi\n"}]


# ---------------------------------------------------------------------- refusals


def raising(kernel: Kernel, broker: ScriptedBroker, flag: Path, text: str, push: Any) -> str:
    """Call ``push`` while a cell runs, and let the cell fail; return the line below its error."""
    cell = kernel.start(INSIDE.format(flag=str(flag)) + f"raise RuntimeError({text!r})")
    inside(flag)
    if push is not None:
        push()
    flag.touch()
    cell.done()
    error, *lines = cell.outputs
    assert error["evalue"] == text
    assert len(lines) <= 1
    return lines[0]["text"] if lines else ""


OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 6.00 GiB"
NOT_READY = "CUDA_ERROR_SYSTEM_NOT_READY: 802"


def test_refused_allocation_is_explained_with_figures(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel], flag: Path
) -> None:
    kernel = start()
    page.grant(DEVICE, 4 * GiB, 8 * GiB)
    page.process(pid_of(kernel), used=3 * GiB)
    page.process(os.getpid(), used=512 * MiB, number=1)
    granted(broker)

    def push() -> None:
        broker.push(
            "refused",
            what="grow",
            code="no-memory",
            message="GPU 0 has no more room.",
            next_step="Free memory.",
        )

    assert raising(kernel, broker, flag, OUT_OF_MEMORY, push) == (
        "GPU pool: GPU 0 has no more room. This kernel uses 3.5 GiB of the 4 GiB of device memory "
        "granted to it, and its limit is 8 GiB. Free memory.\n"
    )
    flag.unlink()
    assert raising(kernel, broker, flag, OUT_OF_MEMORY, None) == (
        "GPU pool: this kernel uses 3.5 GiB of the 4 GiB of device memory granted to it, and its "
        "limit is 8 GiB. It may ask for up to 16 GiB. Type: %gpu 10GiB\n"
    )


def test_advice_follows_a_refusal_without_a_next_step(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel], flag: Path
) -> None:
    kernel = start()
    page.grant(DEVICE, 4 * GiB, 4 * GiB)
    granted(broker)

    def push() -> None:
        broker.push("refused", what="grow", code="limit", message="it is at its limit")

    line = raising(kernel, broker, flag, OUT_OF_MEMORY, push)
    assert line == (
        "GPU pool: It is at its limit. This kernel uses 0 B of the 4 GiB of device memory granted "
        "to it. It may ask for up to 16 GiB. Type: %gpu 10GiB\n"
    )


@pytest.mark.parametrize(
    ("what", "text"),
    [("grow", "CUDA error: operation not supported"), ("attach", NOT_READY), ("attach", "odd")],
)
def test_refusal_is_shown_under_the_error_it_caused(
    broker: ScriptedBroker,
    page: GuardPage,
    start: Callable[..., Kernel],
    flag: Path,
    what: str,
    text: str,
) -> None:
    kernel = start()

    def push() -> None:
        broker.push("refused", what=what, code="x", message="no, because", next_step="Do that.")
        broker.push("yield", epoch=0)
        broker.wait_for("yielded")  # now the agent has read the push

    line = raising(kernel, broker, flag, text, push)
    assert line == "GPU pool: No, because. Do that.\n"
    flag.unlink()
    assert raising(kernel, broker, flag, "later", None) == ""


def test_refused_managed_memory_is_explained_in_its_cell(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel], flag: Path
) -> None:
    kernel = start()
    text = "CUDA_ERROR_NOT_SUPPORTED: operation not supported"
    assert "managed memory" in raising(kernel, broker, flag, text, None)
    page.page.set_policy(managed=True, context_bytes=0)
    flag.unlink()
    assert raising(kernel, broker, flag, text, None) == ""


def test_bytes_of_a_dead_process_are_not_counted(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel]
) -> None:
    kernel = start()
    page.grant(DEVICE, 4 * GiB, 4 * GiB)
    granted(broker)
    page.process(pid_of(kernel), used=1 * GiB)
    child = subprocess.Popen(["sleep", "60"])
    page.process(child.pid, used=2 * GiB, number=1)
    assert "3 GiB of 4 GiB" in kernel.run("%gpu").text
    child.kill()
    child.wait()
    assert "1 GiB of 4 GiB" in kernel.run("%gpu").text


def test_failed_cell_waits_briefly_for_the_brokers_reason(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel], flag: Path
) -> None:
    kernel = start()
    kernel.run(
        "from jupyter_gpupool.kernel import cells; cells.WORD = 20\n"
        "from jupyter_gpupool.kernel import _agents\n"
        "gate = next(iter(_agents.values())).gate\n"
        "word = gate._word\n"
        f"def told(refusals):\n    open({str(flag)!r}, 'w').close()\n    return word(refusals)\n"
        "gate._word = told"
    )
    cell = kernel.start(f"raise RuntimeError({NOT_READY!r})")
    deadline = time.monotonic() + 20
    while not flag.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    broker.push("refused", what="attach", code="max-wait", message="You have waited 1 s.")
    cell.done()
    assert cell.outputs[-1]["text"] == "GPU pool: You have waited 1 s.\n"


def test_error_of_a_call_without_a_broker_is_explained(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel], flag: Path
) -> None:
    kernel = start()
    line = raising(kernel, broker, flag, NOT_READY, broker.die)
    assert line.startswith("GPU pool: a CUDA call waited for a GPU slice. ")
    assert str(broker.path) in line
    assert "or run `jupyter gpupool broker`" in line
    assert "jupyter gpupool doctor" in line
    broker.start()
    broker.wait_for("hello", count=2)
    flag.unlink()
    # This call has failed although the broker is back.
    line = raising(kernel, broker, flag, NOT_READY, None)
    assert str(broker.path) in line
    assert "Run the cell again." in line


def test_no_explanation_follows_an_interrupt_or_a_success(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel], flag: Path
) -> None:
    kernel = start()

    def push() -> None:
        before = len(broker.seen("yielded"))
        broker.push("refused", what="grow", code="x", message="no")
        broker.push("yield", epoch=0)
        broker.wait_for("yielded", count=before + 1)

    cell = kernel.start(INSIDE.format(flag=str(flag)) + "raise KeyboardInterrupt")
    inside(flag)
    push()
    flag.touch()
    assert "GPU pool" not in cell.done().text
    flag.unlink()
    cell = kernel.start(INSIDE.format(flag=str(flag)) + "print(1)")
    inside(flag)
    push()
    flag.touch()
    assert cell.done().text == "1\n"


# ---------------------------------------------------------------------- %gpu


def test_gpu_shows_the_figures_of_the_guard(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel]
) -> None:
    kernel = start()
    first = kernel.run("%gpu details").text
    assert "no slice now; the next CUDA call gets it" in first
    assert "on: CUDA calls wait for the slice" in first
    broker.sessions["s1"]["pid"] = pid_of(kernel)
    granted(broker)
    page.grant(DEVICE, 4 * GiB, 8 * GiB)
    page.process(pid_of(kernel), used=3 * GiB + 512 * MiB)
    (shown,) = kernel.run("%gpu").outputs
    assert "3.5 GiB of 4 GiB, may grow to 8 GiB" in shown["data"]["text/plain"]
    assert "3.5 GiB of 4 GiB, may grow to 8 GiB" in shown["data"]["text/html"]
    page.process(os.getpid(), waiting=2, number=1)
    assert "2 threads wait for the slice" in kernel.run("%gpu").text
    broker.die()  # the figures come from the page, which still exists
    assert "3.5 GiB of 4 GiB" in kernel.run("%gpu").text


def test_a_new_size_takes_effect_on_the_next_allocation(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel]
) -> None:
    text = start().run("%gpu 12GiB --limit 20GiB").text
    assert text == (
        "Asked for 12 GiB of device memory, limit 20 GiB. "
        "The change takes effect on the next allocation.\n"
    )


def test_unloading_the_extension_restores_the_kernel(
    broker: ScriptedBroker, page: GuardPage, start: Callable[..., Kernel]
) -> None:
    kernel = start(this_python())
    kernel.run("%unload_ext jupyter_gpupool.kernel")
    where = "get_ipython().kernel.session.send.__func__.__module__"
    assert kernel.run(where).text == "'jupyter_client.session'"
