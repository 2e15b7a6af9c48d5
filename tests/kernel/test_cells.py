# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The gate for cells, in a real ipykernel with a scripted broker."""

from __future__ import annotations

import time
from typing import Callable

from harness import Kernel
from scripted_broker import DEVICE, OTHER_DEVICE, GiB, ScriptedBroker

from jupyter_gpupool.errors import RefusedError


def test_a_cell_keeps_the_slice_while_it_runs(broker: ScriptedBroker, kernel: Kernel) -> None:
    cell = kernel.run("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    assert cell.status == "ok"
    assert cell.text.strip() == DEVICE
    hold = broker.wait_for("hold")
    assert hold["kind"] == "cell"
    assert hold["wait"] is True
    broker.wait_for("drop", hold=hold["hold"])
    assert broker.live_holds() == set()


def test_an_attached_cell_makes_no_round_trip(broker: ScriptedBroker, kernel: Kernel) -> None:
    kernel.run("pass")
    kernel.run("pass")
    second = broker.wait_for("hold", count=2)
    assert second["wait"] is False
    assert "id" not in second
    assert second["epoch"] == 1
    broker.wait_for("drop", count=2)


def test_wait_in_a_cell_is_shown_and_removed(broker: ScriptedBroker, kernel: Kernel) -> None:
    broker.hold_back()
    # The text about the time left stays the same for minutes, so the agent sends no update for it.
    broker.push(
        "queue", position=2, length=3, waited=0.0, left=[2400.0, 3500.0], reason="Alice has it."
    )
    kernel.run("%gpu pool")  # after this answer, the agent has read the push
    cell = kernel.start("print('hi')")
    hold = broker.wait_for("hold")["hold"]
    shown = cell.until("display_data")["content"]
    assert shown["data"]["text/plain"].startswith(
        "Waiting for a GPU slice of 4 GiB: position 2 of 3, 30 to 60 min left. Alice has it."
    )
    assert "position 2 of 3" in shown["data"]["text/html"]
    # JupyterLab finds the output by this field.
    assert shown["metadata"] == {"gpupool": {"wait": True}}
    broker.push("queue", position=1, length=2, waited=0.0, left=[2400.0, 3500.0], reason="")
    update = cell.until("update_display_data")["content"]
    assert update["transient"] == shown["transient"]
    assert "position 1 of 2" in update["data"]["text/plain"]
    broker.grant(hold)
    cell.done()
    assert cell.outputs == [{"name": "stdout", "text": "hi\n"}]
    kinds = [m["msg_type"] for m in cell.messages]
    assert kinds.count("display_data") == 1
    assert kinds.count("update_display_data") == 1  # the agent sends an update only after a change


def test_an_interrupted_wait_does_not_run_the_cell(broker: ScriptedBroker, kernel: Kernel) -> None:
    broker.hold_back()
    cell = kernel.start("ran = True")
    hold = broker.wait_for("hold")["hold"]
    behind = kernel.start("also_ran = True")
    broker.push("queue", position=1, length=1, waited=0.0, left=None, reason="")
    cell.until("display_data")
    kernel.manager.interrupt_kernel()
    # This test does not check how soon the wait ends. The tests in e2e/test_policy check it.
    broker.wait_for("cancel", hold=hold)
    cell.done()
    assert cell.status == "error"
    assert cell.reply is not None
    assert cell.reply["ename"] == "GPUWaitInterrupted"
    assert [o.get("ename") for o in cell.outputs] == ["GPUWaitInterrupted"]
    assert behind.done().status == "aborted"
    assert kernel.value("sorted(n for n in globals() if n.endswith('ran'))") == "[]"
    # The kernel continues after the interrupt.
    del broker.scripts["hold"]
    assert kernel.run("1 + 1").text == "2"
    broker.wait_for("drop", hold=broker.seen("hold")[-1]["hold"])
    assert broker.live_holds() == set()


def test_refusal_becomes_the_error_of_the_cell(broker: ScriptedBroker, kernel: Kernel) -> None:
    def refuse(message: object) -> None:
        raise RefusedError(
            "You have waited 60 s, the longest allowed here.", next_step="Try again later."
        )

    broker.scripts["hold"] = refuse
    cell = kernel.run("ran = True")
    assert cell.status == "error"
    assert cell.text == (
        "GPURefused: You have waited 60 s, the longest allowed here. Try again later."
    )
    assert kernel.value("'ran' in globals()") == "False"


def test_cells_with_only_gpu_magic_or_no_code_need_no_hold(
    broker: ScriptedBroker, start: Callable[..., Kernel]
) -> None:
    kernel = start()
    for code in ("", "   \n", "%gpu help", "# mine\n%gpu help\n\n%gpu help", "%gpu?"):
        assert kernel.run(code).status == "ok"
        assert broker.seen("hold") == [], code


def test_tagged_and_silent_cells_need_no_hold(
    broker: ScriptedBroker, start: Callable[..., Kernel]
) -> None:
    kernel = start()
    assert kernel.run("x = 1", metadata={"tags": ["no-gpu"]}).status == "ok"
    assert kernel.run("x = 1", metadata={"no-gpu": True}).status == "ok"
    assert kernel.run("x = 1", silent=True).status == "ok"
    assert broker.seen("hold") == []


def test_cells_do_not_wait_under_the_manual_policy(
    broker: ScriptedBroker, start: Callable[..., Kernel]
) -> None:
    broker.attach = "manual"
    broker.hold_back()
    kernel = start()
    assert kernel.run("x = 1").status == "ok"
    assert broker.seen("hold") == []
    attach = kernel.start("%gpu attach")
    hold = broker.wait_for("hold")
    assert hold["kind"] == "manual"
    broker.grant(hold["hold"])
    assert attach.done().text.startswith("Attached: 4 GiB on")
    assert kernel.run("x = 2").status == "ok"
    cell = broker.wait_for("hold", kind="cell")
    assert cell["wait"] is False
    assert broker.ask_back()["yielded"] is True
    assert kernel.run("x = 3").status == "ok"
    assert len(broker.seen("hold")) == 2
    tagged = kernel.start("x = 4", metadata={"tags": ["gpu"]})
    asked = broker.wait_for("hold", count=3)
    assert asked["wait"] is True
    broker.grant(asked["hold"])
    assert tagged.done().status == "ok"


def test_a_kernel_with_a_running_cell_does_not_yield(
    broker: ScriptedBroker, kernel: Kernel
) -> None:
    cell = kernel.start("import threading; go = threading.Event(); print('in'); go.wait(60)")
    cell.until("stream")
    assert broker.ask_back()["yielded"] is False
    kernel.manager.interrupt_kernel()
    assert cell.done().status == "error"
    broker.wait_for("drop")
    assert broker.ask_back() == {
        **broker.seen("yielded")[-1],
        "epoch": 1,
        "yielded": True,
        "cuda": False,
    }
    # The session is detached, so the agent asks for a slice before the next cell.
    kernel.run("pass")
    assert broker.wait_for("hold", count=2)["wait"] is True


def test_a_yield_with_an_old_epoch_is_refused(broker: ScriptedBroker, kernel: Kernel) -> None:
    kernel.run("pass")
    broker.push("lease", state="detached", epoch=1, slices=[], reason="", pinned_reason="")
    broker.state = "detached"
    broker.push("yield", epoch=1)
    # The agent reads pushes in order. When it has answered the yield, it has read ``detached``.
    broker.wait_for("yielded")
    kernel.run("pass")
    assert broker.wait_for("hold", count=2)["wait"] is True
    broker.wait_for("drop", count=2)
    broker.push("yield", epoch=1)
    assert broker.wait_for("yielded", count=2)["yielded"] is False


def test_a_new_device_is_made_visible(broker: ScriptedBroker, kernel: Kernel) -> None:
    see = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    assert kernel.run(see).text.strip() == DEVICE
    assert broker.ask_back()["yielded"] is True
    broker.device = OTHER_DEVICE
    assert kernel.run(see).text.strip() == OTHER_DEVICE
    kernel.run("os.environ['CUDA_VISIBLE_DEVICES'] = '0'")
    assert kernel.run(see).text.strip() == "0"  # the user's own value stays


def test_nested_cells_take_only_one_hold(broker: ScriptedBroker, kernel: Kernel) -> None:
    kernel.run("get_ipython().run_cell('x = 1'); get_ipython().run_cell('%time x = 2')")
    broker.wait_for("drop")
    assert len(broker.seen("hold")) == 1


def test_cell_that_fails_or_exits_drops_its_hold(broker: ScriptedBroker, kernel: Kernel) -> None:
    codes = [
        "1/0",
        "def",
        "await __import__('asyncio').sleep(0)",
        "%%bash\ntrue",
        "raise SystemExit",
    ]
    for number, code in enumerate(codes, 1):
        kernel.run(code)
        broker.wait_for("drop", count=number)
    assert broker.live_holds() == set()


def test_silent_requests_wait_while_the_state_is_suspended(
    broker: ScriptedBroker, start: Callable[..., Kernel]
) -> None:
    """A silent request waits, like a cell.

    Otherwise its CUDA call would block the kernel until the state is resumed.
    """
    kernel = start()
    kernel.run("pass")
    kernel.run(
        "from jupyter_gpupool.kernel import _agents\n"
        "link = next(iter(_agents.values())).link\n"
        "link._cuda = lambda: True"
    )
    assert broker.ask_back()["cuda"] is True
    before = len(broker.seen("hold", wait=True))
    assert kernel.client.inspect("link", reply=True, timeout=60)["content"]["data"][
        "text/plain"
    ].startswith("The GPU state of this kernel is in host memory")
    broker.hold_back()
    silent = kernel.start("x = 1", silent=True)
    hold = broker.wait_for("hold", wait=True, count=before + 1)
    broker.grant(hold["hold"])
    assert silent.done().status == "ok"
    assert silent.outputs == []
    found = kernel.client.inspect("link", reply=True, timeout=60)["content"]
    assert "SessionLink" in found["data"]["text/plain"]


def beats(kernel: Kernel) -> None:
    """Wait until the kernel answers a heartbeat. On a busy machine, an answer may be late."""
    deadline = time.monotonic() + 60
    while not kernel.client.hb_channel.is_beating():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_kernel_answers_requests_while_a_cell_waits(broker: ScriptedBroker, kernel: Kernel) -> None:
    broker.hold_back()
    cell = kernel.start("x = 1")
    hold = broker.wait_for("hold")["hold"]
    assert kernel.control("kernel_info_request")["status"] == "ok"
    beats(kernel)
    broker.grant(hold)
    assert cell.done().status == "ok"


def test_interrupted_cell_keeps_its_number(broker: ScriptedBroker, kernel: Kernel) -> None:
    """A cell also gets an execution number if an interrupt or a refusal stops it before it runs."""
    broker.hold_back()
    cell = kernel.start("x = 1")
    broker.wait_for("hold")
    kernel.manager.interrupt_kernel()
    assert cell.done().reply is not None
    assert cell.reply["execution_count"] == 1
    del broker.scripts["hold"]
    after = kernel.run("In[1]")
    assert after.reply is not None
    assert after.reply["execution_count"] == 2
    assert after.text == "'x = 1'"
    assert broker.request["memory"] == 4 * GiB
