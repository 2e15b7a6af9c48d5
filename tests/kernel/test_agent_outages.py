# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The agent when the broker dies, comes back, is slow, or loses the session."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Callable

import pytest
from harness import Kernel
from scripted_broker import DEVICE, GiB, ScriptedBroker

from jupyter_gpupool.errors import RefusedError

#: Makes the agent believe that this process has called cuInit.
USED_CUDA = """
from jupyter_gpupool.kernel import _agents
link = next(iter(_agents.values())).link
link._cuda = lambda: True
"""


def test_a_running_cell_survives_the_death_of_the_broker(
    broker: ScriptedBroker, kernel: Kernel, tmp_path: Path
) -> None:
    go_on = tmp_path / "go-on"
    cell = kernel.start(
        "import os, time; print('in', flush=True)\n"
        f"while not os.path.exists({str(go_on)!r}): time.sleep(0.02)\n"
        "print('out')"
    )
    cell.until("stream")
    hold = broker.wait_for("hold")["hold"]
    broker.die()
    broker.start()
    hello = broker.wait_for("hello", count=2)
    assert hello["holds"] == [{"id": hold, "kind": "cell"}]
    assert hello["epoch"] == 1
    go_on.touch()
    assert cell.done().text.split() == ["in", "out"]
    broker.wait_for("drop", hold=hold)
    kernel.run("pass")
    assert broker.wait_for("hold", count=2)["wait"] is False


def test_attached_cells_run_without_a_broker(broker: ScriptedBroker, kernel: Kernel) -> None:
    kernel.run("pass")
    broker.die()
    assert kernel.run("1 + 1").text == "2"
    broker.start()
    assert broker.wait_for("hello", count=2)["holds"] == []


def test_waiting_cell_asks_the_new_broker(broker: ScriptedBroker, kernel: Kernel) -> None:
    broker.hold_back()
    cell = kernel.start("print('hi')")
    hold = broker.wait_for("hold")["hold"]
    broker.die()
    shown = cell.until("display_data")["content"]["data"]["text/plain"]
    assert shown.startswith("Waiting for ")
    broker.start()
    again = broker.wait_for("hold", count=2)
    assert (again["hold"], again["wait"]) == (hold, True)
    broker.grant(hold)
    assert cell.done().outputs == [{"name": "stdout", "text": "hi\n"}]


def test_cpu_cells_run_without_a_broker_with_one_notice(
    broker: ScriptedBroker, kernel: Kernel
) -> None:
    broker.die()
    first = kernel.run("print('ran')")
    assert first.status == "ok"
    notice, output = first.outputs
    assert output["text"] == "ran\n"
    assert str(broker.path) in notice["text"]
    assert "cells run without a GPU slice and must not use the GPU" in notice["text"]
    assert (
        "Open another Pooled GPU kernel, which starts a broker with your server's options"
        in notice["text"]
    )
    assert str(broker.path.with_suffix(".log")) in notice["text"]
    assert kernel.run("print('again')").outputs == [{"name": "stdout", "text": "again\n"}]
    # After the broker's return, cells wait for a slice again.
    broker.start()
    broker.wait_for("hello", count=2)
    assert kernel.run("1").text == "1"
    assert broker.wait_for("hold")["wait"] is True


def test_cell_with_a_larger_slice_waits_for_the_brokers_return(
    broker: ScriptedBroker, kernel: Kernel
) -> None:
    broker.die()
    cell = kernel.start("%%gpu 16GiB\nprint('hi')")
    cell.until("execute_input")
    broker.start()
    assert cell.done().text == "hi\n"
    first, second = (broker.wait_for("request", count=n) for n in (1, 2))
    assert (first["memory"], second["memory"]) == (16 * GiB, 4 * GiB)


def test_agent_sends_the_old_request_when_the_broker_returns(
    broker: ScriptedBroker, kernel: Kernel
) -> None:
    cell = kernel.start("%%gpu 16GiB\nimport threading; print('in'); threading.Event().wait(60)")
    cell.until("stream")
    broker.die()
    kernel.manager.interrupt_kernel()
    assert cell.done().status == "error"
    broker.start()
    broker.wait_for("hello", count=2)
    assert broker.wait_for("request", count=2)["memory"] == 4 * GiB
    # The kernel shows the old request only after the broker has answered it.
    deadline = time.monotonic() + 60
    while "This kernel asks for 4 GiB" not in (text := kernel.run("%gpu help").text):
        assert time.monotonic() < deadline, text


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        ("%gpu 8GiB", "request", "Asked for 8 GiB of device memory"),
        ("%gpu release", "release", "The slice goes back to the pool now."),
        ("%gpu pool", "status", "GPU pool (EMULATED devices)"),
        ("%%gpu 8GiB\nprint('hi')", "request", "hi\n"),
    ],
)
def test_unanswered_request_goes_to_the_next_broker(
    broker: ScriptedBroker, start: Callable[..., Kernel], code: str, kind: str, text: str
) -> None:
    kernel = start()
    broker.hold_back(kind)
    cell = kernel.start(code)
    for count in (1, 2):  # the second broker dies, too
        broker.wait_for(kind, count=count)
        broker.die()
        if count == 2:
            del broker.scripts[kind]
        broker.start()
    assert cell.done().text.startswith(text)
    assert broker.wait_for(kind, count=3).get("memory") == broker.seen(kind)[0].get("memory")


def test_old_request_is_sent_until_a_broker_answers_it(
    broker: ScriptedBroker, start: Callable[..., Kernel]
) -> None:
    kernel = start()
    cell = kernel.start("%%gpu 16GiB\nimport threading; print('in'); threading.Event().wait(60)")
    cell.until("stream")
    broker.hold_back("request")
    broker.die()
    kernel.manager.interrupt_kernel()
    assert cell.done().status == "error"
    broker.start()
    assert broker.wait_for("request", count=2)["memory"] == 4 * GiB
    broker.die()
    broker.start()
    assert broker.wait_for("request", count=3)["memory"] == 4 * GiB


def test_agent_withdraws_an_unanswered_request_of_a_failed_cell(
    broker: ScriptedBroker, start: Callable[..., Kernel]
) -> None:
    """A broker may store the request of a cell and then die.

    So the agent sends the old request to the next broker.
    """
    kernel = start()
    broker.hold_back("request")
    cell = kernel.start("%%gpu 16GiB\nprint('hi')")
    assert broker.wait_for("request")["memory"] == 16 * GiB
    broker.die()
    assert cell.done().status == "error"
    broker.start()
    assert broker.wait_for("request", count=2)["memory"] == 4 * GiB


def test_kernel_with_policy_manual_tells_of_a_release_only_once(
    broker: ScriptedBroker, start: Callable[..., Kernel]
) -> None:
    broker.attach = "manual"
    kernel = start()
    kernel.run("%gpu attach")
    kernel.run(USED_CUDA)
    assert broker.ask_back()["yielded"] is True
    first, second = kernel.run("print(1)"), kernel.run("print(2)")
    assert "Type %gpu attach before you use the GPU" in first.text
    assert second.text == "2\n"


def test_cell_of_a_suspended_kernel_fails_without_a_broker(
    broker: ScriptedBroker, kernel: Kernel
) -> None:
    """The cell must not run. Without a broker, its CUDA calls would hang."""
    kernel.run(USED_CUDA)
    assert broker.ask_back() == {
        **broker.seen("yielded")[-1],
        "yielded": True,
        "cuda": True,
    }
    broker.die()
    cell = kernel.run("ran = True")
    assert cell.status == "error"
    assert cell.reply is not None
    assert cell.reply["ename"] == "BrokerUnavailable"
    assert "is in host memory and cannot be brought back" in cell.reply["evalue"]
    assert str(broker.path) in cell.reply["evalue"]
    assert str(broker.path.with_suffix(".log")) in cell.reply["evalue"]
    assert kernel.run("x = 1", metadata={"tags": ["no-gpu"]}).status == "ok"
    assert kernel.run("'ran' in globals()", metadata={"tags": ["no-gpu"]}).text == "False"


def test_agent_asks_a_new_broker_for_the_lost_slice(broker: ScriptedBroker, kernel: Kernel) -> None:
    cell = kernel.start("import threading; go = threading.Event(); print('in'); go.wait(60)")
    cell.until("stream")
    hold = broker.wait_for("hold")["hold"]
    broker.die()
    broker.state = "detached"
    broker.start()
    again = broker.wait_for("hold", count=2)
    assert (again["hold"], again["wait"]) == (hold, True)
    kernel.manager.interrupt_kernel()
    cell.done()
    broker.wait_for("drop", hold=hold)
    assert broker.live_holds() == set()


def test_user_learns_of_a_forgotten_session(broker: ScriptedBroker, kernel: Kernel) -> None:
    broker.die()

    def unknown(message: Any) -> None:
        raise RefusedError("There is no session 's1' in this pool.", code="unknown-session")

    broker.scripts["hello"] = unknown
    broker.start()
    broker.wait_for("hello", count=2)
    cell = kernel.run("print('ran')")
    assert "There is no session 's1' in this pool." in cell.text
    assert cell.text.endswith("ran\n")


def test_invalid_or_unknown_message_does_not_end_the_agent(
    broker: ScriptedBroker, kernel: Kernel
) -> None:
    broker.push("lease", state="active")  # A lease without its fields must not end the agent.
    broker.push("whatever", of="the future")
    broker.push("yield", epoch=99)
    assert broker.wait_for("yielded")["yielded"] is True
    assert kernel.run("1 + 1").text == "2"


def test_user_is_told_of_lost_state_at_once_and_at_the_next_cell(
    broker: ScriptedBroker, kernel: Kernel
) -> None:
    cell = kernel.start("import threading; go = threading.Event(); print('in'); go.wait(60)")
    cell.until("stream")
    broker.push("lost", message="The driver could not restore this kernel: device lost.")
    seen = len(cell.messages)
    while not any("device lost" in m["content"].get("text", "") for m in cell.messages):
        kernel.read(time.monotonic() + 20, cell)
    assert len(cell.messages) > seen
    kernel.manager.interrupt_kernel()
    cell.done()
    after = kernel.run("print('on')")
    assert "could not restore this kernel: device lost" in after.text


def test_agent_shows_the_new_size_of_its_slice(broker: ScriptedBroker, kernel: Kernel) -> None:
    kernel.run("pass")
    broker.push(
        "lease",
        state="active",
        epoch=1,
        slices=[{"device": DEVICE, "bytes": 6 * GiB}],
        reason="resized",
        pinned_reason="",
    )
    # The agent reads messages in order. So the answer to this request comes after the push.
    kernel.run("%gpu pool")
    broker.die()
    assert "6 GiB on" in kernel.run("%gpu").text


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        (
            "OutOfMemoryError",
            "CUDA out of memory. Tried to allocate 6.00 GiB. GPU 0 has a total capacity of 16 GiB",
            (
                "GPU pool: this kernel has a slice of 4 GiB. It may ask for up to "
                "16 GiB. Type: %gpu 10GiB\n"
            ),
        ),
        (
            "CUDAError",
            "CUDA_ERROR_OUT_OF_MEMORY: The API call failed because it was unable to allocate",
            (
                "GPU pool: this kernel has a slice of 4 GiB. It may ask for up to "
                "16 GiB. Type: %gpu 8GiB\n"
            ),
        ),
        ("RuntimeError", "CUDA error: out of memory", "Type: %gpu 8GiB\n"),
        ("ValueError", "out of ideas", ""),
    ],
)
def test_out_of_memory_error_is_followed_by_one_line_of_advice(
    broker: ScriptedBroker, start: Callable[..., Kernel], name: str, text: str, line: str
) -> None:
    kernel = start()
    cell = kernel.run(f"class {name}(Exception): pass\nraise {name}({text!r})")
    assert cell.outputs[0]["ename"] == name
    if not line:
        assert len(cell.outputs) == 1
        return
    _, added = cell.outputs
    assert added["name"] == "stderr"
    assert added["text"].endswith(line)
    assert added["text"].count("\n") == 1


def test_error_at_the_limit_suggests_no_larger_size(
    broker: ScriptedBroker, start: Callable[..., Kernel]
) -> None:
    broker.limits = {"memory": 4 * GiB}
    kernel = start()
    cell = kernel.run("raise RuntimeError('CUDA out of memory.')")
    assert "It may ask for at most 4 GiB. Free memory" in cell.text


def test_holds_of_a_dead_kernel_are_not_renewed(
    broker: ScriptedBroker, start: Callable[..., Kernel]
) -> None:
    kernel = start()
    cell = kernel.start("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    broker.wait_for("hold")
    kernel.manager.provisioner.process.wait(60)
    assert cell.reply is None
    assert len(broker.seen("hello")) == 1
