# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``%gpu`` and ``%%gpu`` in a real kernel, including every kind of wrong use."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest
from harness import Kernel, start_kernel, this_python
from scripted_broker import DEVICE, GiB, ScriptedBroker

from jupyter_gpupool.errors import RefusedError


def error_of(cell: Any) -> str:
    """Return the error message of a failed magic; fail if the cell also shows a traceback."""
    assert cell.status == "error"
    assert cell.reply["ename"] == "UsageError"
    assert "Traceback" not in cell.text
    (output,) = cell.outputs
    assert output["text"] == f"UsageError: {cell.reply['evalue']}\n"
    assert output["text"].count("\n") == 1
    return cell.reply["evalue"]


def test_gpu_shows_the_status(broker: ScriptedBroker, kernel: Kernel) -> None:
    cell = kernel.run("%gpu")
    (output,) = cell.outputs
    assert "no slice now" in output["data"]["text/plain"]
    assert "<table" in output["data"]["text/html"]
    assert "EMULATED" in output["data"]["text/plain"]
    kernel.run("pass")
    text = kernel.run("%gpu status").text
    assert "granted" in text
    assert "4 GiB on GPU 0 (Scripted GPU)" in text
    assert len(broker.seen("hold")) == 1


def test_gpu_shows_the_pool_and_the_help(calm: Kernel) -> None:
    (pool,) = calm.run("%gpu pool").outputs
    assert "Scripted GPU" in pool["data"]["text/plain"]
    assert "this kernel" in pool["data"]["text/html"]
    assert "no kernel waits" in pool["data"]["text/plain"]
    (text,) = calm.run("%gpu help").outputs
    for name in ("%gpu 12GiB", "%gpu attach", "%gpu keep 10m", "%%gpu 16GiB"):
        assert name in text["data"]["text/plain"]


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("12GiB", {"memory": 12 * GiB, "limit": 12 * GiB}),
    ("12 GiB", {"memory": 12 * GiB, "limit": 12 * GiB}),
    ("memory 12GiB --limit 20GiB", {"memory": 12 * GiB, "limit": 20 * GiB}),
    ("memory 12GiB --limit=20GiB --devices 2", {"memory": 12 * GiB, "devices": 2}),
    ("12", {"memory": 12 * GiB}),
    ("1,5 --limit 20", {"memory": 3 * GiB // 2, "limit": 20 * GiB}),
    ("devices 2", {"devices": 2}),
    ("compute 50", {"compute": 50}),
    ("compute 25%", {"compute": 25}),
    ("priority batch", {"priority": "batch"}),
]


def test_gpu_sends_a_new_request(broker: ScriptedBroker, start: Callable[..., Kernel]) -> None:
    kernel = start()
    for number, (line, fields) in enumerate(REQUESTS, 1):
        cell = kernel.run(f"%gpu {line}")
        assert cell.status == "ok", line
        assert cell.text.startswith("Asked for "), line
        sent = broker.wait_for("request", count=number)
        assert {name: sent[name] for name in fields} == fields, line


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("12 parsecs", "'12 parsecs' is not a size."),
        ("-5GiB", "'-5GiB' is not a size."),
        ("0", "'0' is not a size above zero."),
        ("1,500", "'1,500' is not a size."),
        ("99999999TiB", "is more than any machine has."),
        ("atach", "There is no subcommand 'atach' of %gpu. Did you mean %gpu attach?"),
        ("xyzzy", "There is no subcommand 'xyzzy' of %gpu. Sizes are written like %gpu 12GiB."),
        ("release now", "%gpu release takes no argument, and 'now' was given."),
        ("keep", "%gpu keep needs a value."),
        ("keep forever", "'forever' is not a duration."),
        ("devices two", "devices must be a whole number above zero, not 'two'."),
        ("devices 0", "not '0'. Write %gpu devices 2."),
        ("compute 101", "a share from 1 to 100, not '101'. Write %gpu compute 50."),
        ("memory 1GiB --devices 0", "not '0'. Write for example --devices 2."),
        ("devices 1 2", "%gpu devices takes one value, and '1 2' was given."),
        ("memory", "%gpu memory needs a value."),
        ("memory 12GiB --limt 20GiB", "Did you mean --limit?"),
        ("memory 12GiB --limit", "The option --limit needs a value."),
        ("memory 12 --limit 2", "The limit 2 is below the guaranteed memory 12."),
        ("memory 12GiB --limit 2GiB", "The limit 2GiB is below the guaranteed memory 12GiB."),
        ("memory 12GiB --compute 101", "compute must be a share from 1 to 100, not '101'."),
    ],
)
def test_wrong_arguments_get_one_message(one_kernel: Kernel, line: str, message: str) -> None:
    assert message in error_of(one_kernel.run(f"%gpu {line}"))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("%%gpu", "%%gpu needs a size: the device memory for its cell."),
        ("%%gpu 12 parsecs", "'12 parsecs' is not a size."),
        ("%%gpu release", "write %gpu release, with one per cent sign"),
    ],
)
def test_cell_with_a_wrong_header_does_not_run(
    one_kernel: Kernel, header: str, message: str
) -> None:
    cell = one_kernel.run(f"{header}\nran = True")
    assert cell.status == "error"
    assert message in cell.text
    assert one_kernel.value("'ran' in globals()") == "False"


def test_refusal_names_the_rule_behind_it(broker: ScriptedBroker, kernel: Kernel) -> None:
    def refuse(message: Any) -> None:
        raise RefusedError(
            "You asked for 99 GiB and may have 16 GiB (c.GPUPool.max_memory_per_kernel).",
            code="over-quota",
            next_step="Ask for at most 16GiB.",
        )

    broker.scripts["request"] = refuse
    assert error_of(kernel.run("%gpu 99GiB")) == (
        "You asked for 99 GiB and may have 16 GiB (c.GPUPool.max_memory_per_kernel). "
        "Ask for at most 16GiB."
    )


def test_gpu_releases_and_keeps_a_slice(broker: ScriptedBroker, kernel: Kernel) -> None:
    assert kernel.run("%gpu release").text == "The slice goes back to the pool now.\n"
    assert kernel.run("%gpu keep 10m").text == "The GPU slice is kept for 10 min, even when idle.\n"
    assert broker.wait_for("keep")["seconds"] == 600
    assert broker.seen("hold") == []
    kernel.run("pass")
    broker.state = "idle"
    text = kernel.run("%gpu").text
    assert "10 min from now" in text
    assert "back to the pool" not in text
    kernel.run("%gpu release")
    text = kernel.run("%gpu").text
    assert "kept" not in text
    assert "back to the pool in 4:57" in text


def test_gpu_why_names_other_machines_while_the_kernel_waits(
    broker: ScriptedBroker, kernel: Kernel
) -> None:
    share, machine = "You have 2 GiB of 8 GiB.", "gpu2: no, it has no GPU in service."
    broker.scripts["elsewhere"] = lambda _: {"machines": [machine]}
    cases = [(True, "queued", machine), (True, "active", share), (False, "queued", share)]
    for clustered, state, last in cases:
        found = {"lines": [], "standing": [share], "state": state, "clustered": clustered}
        broker.scripts["why"] = lambda _, found=found: found  # type: ignore[misc]
        assert kernel.run("%gpu why").outputs[0]["data"]["text/plain"].splitlines()[-1] == last


def test_attach_shows_its_wait_and_can_be_interrupted(
    broker: ScriptedBroker, kernel: Kernel
) -> None:
    broker.hold_back()
    cell = kernel.start("%gpu attach")
    hold = broker.wait_for("hold")["hold"]
    broker.push("queue", position=1, length=1, waited=0.0, left=[20.0, 5.0], reason="")
    cell.shows("position 1 of 1")
    kernel.manager.interrupt_kernel()
    assert "You stopped the wait" in error_of(cell.done())
    broker.wait_for("cancel", hold=hold)
    cell = kernel.start("%gpu attach")
    hold = broker.wait_for("hold", count=2)["hold"]
    broker.grant(hold)
    assert cell.done().text == (
        "Attached: 4 GiB on GPU 0 (Scripted GPU). The slice stays until the kernel is idle too "
        "long, or is idle while another kernel waits.\n"
    )
    broker.wait_for("drop", hold=hold)
    assert broker.live_holds() == set()


def test_one_cell_gets_a_larger_slice(broker: ScriptedBroker, kernel: Kernel) -> None:
    cell = kernel.run("%%gpu 16GiB\nx = 1\nprint(In[-1][:5])\n1/0")
    assert cell.status == "error"
    assert cell.reply is not None
    assert cell.reply["ename"] == "ZeroDivisionError"
    assert any("line 4" in line or "4 1/0" in line for line in cell.reply["traceback"]), cell.reply
    kinds = [m["type"] for m in broker.messages if m["type"] in ("request", "hold", "drop")]
    broker.wait_for("request", count=2)
    kinds = [m["type"] for m in broker.messages if m["type"] in ("request", "hold", "drop")]
    assert kinds == ["request", "hold", "drop", "request"]
    first, second = broker.seen("request")
    assert (first["memory"], first["limit"]) == (16 * GiB, 16 * GiB)
    assert (second["memory"], second["limit"]) == (4 * GiB, 4 * GiB)
    assert kernel.value("get_ipython().history_manager.input_hist_raw[1][:11]") == "'%%gpu 16GiB'"


def test_gpu_cell_magic_works_with_another_cell_magic(calm: Kernel) -> None:
    cell = calm.run("%%gpu 16GiB\n%%capture out\nprint('hidden')")
    assert cell.status == "ok"
    assert calm.value("out.stdout") == repr("hidden\n")


def test_cell_with_a_larger_slice_may_use_top_level_await(calm: Kernel) -> None:
    cell = calm.run("%%gpu 16GiB\nimport asyncio\nawait asyncio.sleep(0)\nprint('done')")
    assert cell.text == "done\n"


def test_attached_kernel_gets_a_larger_slice_for_one_cell(
    broker: ScriptedBroker, start: Callable[..., Kernel]
) -> None:
    """The attached slice is too small, so the kernel releases it and waits for a larger slice."""
    kernel = start()
    kernel.run("pass")

    def keep_the_size(message: Any) -> dict[str, Any]:
        return {"request": {**broker.request, "memory": message["memory"]}, "note": ""}

    def release(message: Any) -> dict[str, Any]:
        broker._agents[-1].write(b'{"v":1,"type":"yield","epoch":%d}\n' % broker.epoch)
        broker.state = "detached"
        return {"note": ""}

    slices = broker.slices()
    broker.scripts["request"] = keep_the_size
    broker.scripts["release"] = release
    assert slices[0]["bytes"] == 4 * GiB
    assert kernel.run("%%gpu 16GiB\npass").status == "ok"
    assert broker.wait_for("yielded")["yielded"] is True
    assert broker.wait_for("hold", count=2)["wait"] is True


def test_a_cell_with_an_impossible_request_does_not_run(
    broker: ScriptedBroker, kernel: Kernel
) -> None:
    def refuse(message: Any) -> None:
        raise RefusedError("You asked for 99 GiB and may have 16 GiB.")

    broker.scripts["request"] = refuse
    cell = kernel.run("%%gpu 99GiB\nran = True")
    assert cell.text == "GPURefused: You asked for 99 GiB and may have 16 GiB."
    assert kernel.value("'ran' in globals()") == "False"
    assert broker.seen("hold") == []


def test_misplaced_cell_magic_says_where_it_belongs(calm: Kernel) -> None:
    cell = calm.run("%%time\n%%gpu 16GiB\nx = 1")
    assert "works only as the first line of a cell" in cell.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("%gpu ", ["attach", "release", "keep", "pool", "help", "memory", "devices", "4GiB"]),
        ("%gpu at", ["attach"]),
        ("%gpu keep ", ["10m"]),
        ("%gpu memory 4GiB --li", ["--limit"]),
        ("%%gpu ", ["16GiB"]),
    ],
)
def test_arguments_are_completed(one_kernel: Kernel, text: str, expected: list[str]) -> None:
    found = completed(one_kernel, text)
    assert found.issuperset(expected), found


def completed(kernel: Kernel, text: str) -> set[str]:
    reply = kernel.client.complete(text, len(text), reply=True, timeout=60)["content"]
    assert reply["status"] == "ok"
    return {m.strip() for m in reply["matches"]}


def test_inspection_shows_the_help_of_gpu(one_kernel: Kernel) -> None:
    reply = one_kernel.client.inspect("%gpu", reply=True, timeout=60)["content"]
    assert "Show and change this kernel's share" in reply["data"]["text/plain"]


def test_gpu_without_a_broker_names_its_socket(broker: ScriptedBroker, kernel: Kernel) -> None:
    kernel.run("pass")
    broker.die()
    message = error_of(kernel.run("%gpu 12GiB"))
    assert str(broker.path) in message
    assert (
        "Open another Pooled GPU kernel, which starts a broker with your server's options, or run "
        in message
    )
    assert str(broker.path.with_suffix(".log")) in message
    cell = kernel.run("%gpu")
    assert cell.status == "ok"
    assert f"4 GiB on {DEVICE}" in cell.text  # the agent knows its slice without the broker
    assert str(broker.path) in cell.text


def test_agent_knows_the_names_of_devices_without_the_broker(
    broker: ScriptedBroker, kernel: Kernel
) -> None:
    kernel.run("pass")
    kernel.run("%gpu pool")
    broker.die()
    text = kernel.run("%gpu").text
    assert "4 GiB on GPU 0 (Scripted GPU)" in text
    assert "EMULATED" in text


def test_gpu_says_that_the_kernel_has_no_session(python: str) -> None:
    kernel = start_kernel(python, {})
    try:
        assert "has no GPU pool session" in error_of(kernel.run("%gpu"))
        assert kernel.run("1 + 1").text == "2"
        assert kernel.run("%gpu help").status == "ok"
    finally:
        kernel.stop()


def test_extension_can_be_unloaded_and_loaded_again(broker: ScriptedBroker, kernel: Kernel) -> None:
    assert kernel.run("%unload_ext jupyter_gpupool.kernel").status == "ok"
    assert kernel.run("%gpu").status == "error"
    assert completed(kernel, "%gpu ").isdisjoint({"attach", "release"})
    before = len(broker.seen("hold"))
    assert kernel.run("x = 1").status == "ok"
    assert len(broker.seen("hold")) == before
    kernel.run("%load_ext jupyter_gpupool.kernel")
    broker.wait_for("hello", count=2)
    kernel.run("x = 2")
    broker.wait_for("hold", count=before + 1)
    assert completed(kernel, "%gpu ").issuperset({"attach", "release"})


@contextmanager
def alone(python: str) -> Iterator[Kernel]:
    """Start a kernel with a broker that grants everything."""
    with tempfile.TemporaryDirectory(prefix="gpupool-") as folder:
        broker = ScriptedBroker(Path(folder) / "broker.sock").start()
        opened = broker._on_open({"type": "open", "kernel_id": "test"})
        kernel = start_kernel(python, opened["env"])
        broker.wait_for("hello")
        yield kernel
        kernel.stop()
        broker.die()
        assert broker.problems == []


@pytest.fixture(scope="module")
def one_kernel() -> Iterator[Kernel]:
    """Return one kernel for all cases that do not change it."""
    with alone(this_python()) as kernel:
        yield kernel


@pytest.fixture(scope="module", params=["ipykernel 7", "ipykernel 6"])
def calm(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """Return a kernel whose broker grants every request. Tests run with each ipykernel version."""
    old = request.param == "ipykernel 6"
    with alone(request.getfixturevalue("old_python") if old else this_python()) as kernel:
        yield kernel
