# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Widget messages, subshells, and other work during a cell that runs or waits."""

from __future__ import annotations

import time
from typing import Any, Callable

from harness import Kernel
from scripted_broker import ScriptedBroker

from jupyter_gpupool.kernel.waits import HOW_TO_STOP, HOW_TO_STOP_BESIDE

COMM = """
import comm, threading
seen = []
def opened(channel, message):
    channel.on_msg(lambda m: seen.append(m['content']['data']))
get_ipython().kernel.comm_manager.register_target('test', opened)
"""


def send_comm(kernel: Kernel, kind: str, **content: Any) -> str:
    message = kernel.client.session.msg(kind, {"comm_id": "c1", "data": {}, **content})
    kernel.client.shell_channel.send(message)
    return message["header"]["msg_id"]


def comm_done(kernel: Kernel, msg_id: str) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        message = kernel.client.get_iopub_msg(timeout=60)
        if (
            message["parent_header"].get("msg_id") == msg_id
            and message["msg_type"] == "status"
            and message["content"]["execution_state"] == "idle"
        ):
            return
    raise AssertionError("the comm message was not handled")


def test_a_widget_callback_takes_a_hold_while_attached(
    broker: ScriptedBroker, kernel: Kernel
) -> None:
    kernel.run(COMM)
    send_comm(kernel, "comm_open", target_name="test")
    comm_done(kernel, send_comm(kernel, "comm_msg", data={"n": 1}))
    hold = broker.wait_for("hold", kind="comm")
    assert hold["wait"] is False
    broker.wait_for("drop", hold=hold["hold"])
    assert len(broker.seen("hold", kind="comm")) == 1
    assert kernel.value("seen") == "[{'n': 1}]"


def test_a_widget_callback_needs_no_slice_while_detached(
    broker: ScriptedBroker, kernel: Kernel
) -> None:
    kernel.run(COMM)
    send_comm(kernel, "comm_open", target_name="test")
    assert broker.ask_back()["yielded"] is True
    comm_done(kernel, send_comm(kernel, "comm_msg", data={"n": 1}))
    assert [m["kind"] for m in broker.seen("hold")] == ["cell"]
    assert kernel.value("seen") == "[{'n': 1}]"


def test_widget_callback_waits_while_its_state_is_suspended(
    broker: ScriptedBroker, kernel: Kernel
) -> None:
    kernel.run(COMM)
    kernel.run(
        "from jupyter_gpupool.kernel import _agents\n"
        "next(iter(_agents.values())).link._cuda = lambda: True"
    )
    send_comm(kernel, "comm_open", target_name="test")
    comm_done(kernel, send_comm(kernel, "comm_msg", data={"n": 0}))
    assert broker.ask_back()["yielded"] is True
    broker.hold_back()
    msg_id = send_comm(kernel, "comm_msg", data={"n": 1})
    asked = broker.wait_for("hold", kind="comm", wait=True)
    broker.grant(asked["hold"])
    comm_done(kernel, msg_id)
    assert kernel.value("[s['n'] for s in seen]") == "[0, 1]"
    broker.wait_for("drop", hold=asked["hold"])


def subshell(kernel: Kernel) -> str:
    return kernel.control("create_subshell_request")["subshell_id"]


def test_subshell_has_its_own_hold(broker: ScriptedBroker, start: Callable[..., Kernel]) -> None:
    kernel = start()
    other = subshell(kernel)
    main = kernel.start("import threading; go = threading.Event(); print('in'); go.wait(60)")
    main.until("stream")
    side = kernel.run("go.set(); print(1 + 1)", header={"subshell_id": other})
    assert side.text == "2\n"
    assert main.done().status == "ok"
    broker.wait_for("drop", count=2)
    holds = [m["hold"] for m in broker.seen("hold")]
    assert len(set(holds)) == 2
    assert broker.live_holds() == set()


def test_kernel_keeps_its_slice_while_another_shell_runs(
    broker: ScriptedBroker, start: Callable[..., Kernel]
) -> None:
    kernel = start()
    other = subshell(kernel)
    main = kernel.start("import threading; go = threading.Event(); print('in'); go.wait(60)")
    main.until("stream")
    kernel.run("pass", header={"subshell_id": other})
    broker.wait_for("drop")
    assert broker.ask_back()["yielded"] is False
    kernel.run("go.set()", header={"subshell_id": other})
    main.done()
    broker.wait_for("drop", count=3)
    assert broker.ask_back()["yielded"] is True


def test_an_interrupt_ends_the_wait_of_a_subshell(
    broker: ScriptedBroker, start: Callable[..., Kernel]
) -> None:
    """While the main shell is idle, ipykernel ignores SIGINT. A subshell's wait must still end."""
    kernel = start()
    other = subshell(kernel)
    broker.hold_back()
    side = kernel.start("ran = True", header={"subshell_id": other})
    hold = broker.wait_for("hold")["hold"]
    broker.push("queue", position=1, length=1, waited=0.0, left=None, reason="")
    side.shows(HOW_TO_STOP)
    kernel.manager.interrupt_kernel()
    broker.wait_for("cancel", hold=hold)
    assert side.done().status == "error"
    assert [o["ename"] for o in side.outputs] == ["GPUWaitInterrupted"]
    assert kernel.value("'ran' in globals()") == "False"
    assert kernel.value("__import__('signal').getsignal(2).__name__") in (
        "'default_int_handler'",  # ipykernel sets this handler during this request
    )


def test_a_second_interrupt_ends_the_wait_of_a_subshell(
    broker: ScriptedBroker, start: Callable[..., Kernel]
) -> None:
    kernel = start()
    other = subshell(kernel)
    broker.hold_back()
    code = "import asyncio; print('in')\nwhile True:\n    await asyncio.sleep(0.01)"
    main = kernel.start(code, metadata={"tags": ["no-gpu"]})
    main.until("stream")
    side = kernel.start("ran = True", header={"subshell_id": other})
    hold = broker.wait_for("hold")["hold"]
    side.shows(HOW_TO_STOP_BESIDE)
    kernel.manager.interrupt_kernel()
    assert main.done().status == "error"
    side.shows(HOW_TO_STOP)
    assert broker.seen("cancel") == []
    kernel.manager.interrupt_kernel()
    broker.wait_for("cancel", hold=hold)
    assert side.done().status == "error"


def test_the_main_shell_serves_widgets_while_a_cell_waits(
    broker: ScriptedBroker, start: Callable[..., Kernel]
) -> None:
    kernel = start()
    kernel.run(COMM.replace("seen.append(", "channel.send("))
    send_comm(kernel, "comm_open", target_name="test")
    comm_done(kernel, send_comm(kernel, "comm_msg", data={"n": 0}))
    broker.wait_for("drop", count=2)
    assert broker.ask_back()["yielded"] is True
    broker.hold_back()
    cell = kernel.start("x = 1")
    hold = broker.wait_for("hold", count=3)["hold"]
    send_comm(kernel, "comm_msg", data={"n": 1})
    while (message := kernel.client.get_iopub_msg(timeout=60))["msg_type"] != "comm_msg":
        pass
    assert message["content"]["data"] == {"n": 1}
    assert cell.reply is None
    broker.grant(hold)
    assert cell.done().status == "ok"


def test_a_forked_child_that_ends_does_not_close_the_connection(
    broker: ScriptedBroker, start: Callable[..., Kernel]
) -> None:
    kernel = start()
    cell = kernel.run(
        "import os\npid = os.fork()\nif pid == 0:\n    os._exit(0)\nos.waitpid(pid, 0)[1]"
    )
    assert cell.text.strip().endswith("0")
    kernel.run("pass")
    assert len(broker.seen("hello")) == 1
