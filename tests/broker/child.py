# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A process that acts as a kernel: it has the agent's link to the broker, and CUDA memory.

It runs with the environment variables that the broker returns for ``open``. Tests control it: it
reads one JSON command per line on stdin, and writes one JSON answer per line on stdout. An answer
is ``{"ok": ...}`` or ``{"error": ..., "code": ...}``.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time

from jupyter_gpupool.errors import GPUPoolError
from jupyter_gpupool.kernel.link import SessionLink
from tests.broker.readback import has_byte


def cu_initialised():
    """Return whether this process called cuInit; the agent calls this function."""
    return STATE["device"] is not None


STATE = {"device": None, "buffers": [], "unfilled": []}
WAITS = {}
CHILDREN = []
LINK = SessionLink(
    os.environ["GPUPOOL_SOCKET"],
    os.environ["GPUPOOL_SESSION"],
    os.environ["GPUPOOL_TOKEN"],
    cuda=cu_initialised,
    on_lost=lambda message: STATE.update(lost=message),
    on_notice=lambda message: STATE.update(notice=message),
)


def settle(wait, changed, seconds):
    """Wait until the broker has answered the request for a hold; return slices and epoch."""
    deadline = time.monotonic() + seconds
    while wait.answer is None:
        if not changed.wait(deadline - time.monotonic()):
            raise TimeoutError("no answer to the hold")
        changed.clear()
    if isinstance(wait.answer, GPUPoolError):
        raise wait.answer
    return {"epoch": LINK.epoch, "slices": [list(s) for s in LINK.slices]}


def do_start(_):
    LINK.start()


def do_close(_):
    # Do not wait until ``close`` ends: the test only checks what the broker sees.
    threading.Thread(target=LINK.close, daemon=True).start()


def do_start_in_child(_):
    """Start a child process that acts as the agent."""
    import subprocess

    CHILDREN.append(
        subprocess.Popen([sys.executable, "-m", __spec__.name, "--start"], stdin=subprocess.PIPE)
    )


def do_ask(command):
    """Begin to wait for a hold."""
    changed = threading.Event()
    wait = LINK.wait(command["hold"], command.get("kind", "cell"), changed.set)
    WAITS[command["hold"]] = wait, changed


def do_got(command):
    """Wait for the answer to a hold that ``ask`` requested."""
    return settle(*WAITS.pop(command["hold"]), command.get("seconds", 60))


def do_take(command):
    """Take a hold without a round trip to the broker; return False if no slice is attached."""
    return LINK.take(command["hold"], command.get("kind", "cell"))


def do_drop(command):
    LINK.drop(command["hold"])


def do_link(_):
    """Return the agent's view of its lease."""
    return {
        "state": LINK.state,
        "attached": LINK.attached,
        "epoch": LINK.epoch,
        "slices": [list(s) for s in LINK.slices],
        "holds": list(LINK.holds),
        "queue": LINK.queue._asdict() if LINK.queue else None,
        "greeted": LINK.unreachable_for() == 0.0,
        "lost": STATE.get("lost"),
        "notice": STATE.get("notice"),
        "reason": LINK.reason,
        "refused": list(LINK.refused) if LINK.refused else None,
    }


def do_call(command):
    """Send a request of this session."""
    return LINK.call(command["type"], **command.get("fields", {}))


def do_alloc(command):
    """Allocate memory on the slice's device; fill it with ``byte`` if this field is given."""
    from cuda.core import Device

    if STATE["device"] is None:
        slices = command.get("devices") or [s.device for s in LINK.slices]
        if slices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(slices)
        STATE["device"] = Device()
    device = STATE["device"]
    device.set_current()
    stream = device.create_stream()
    buffer = device.allocate(command["bytes"], stream=stream)
    if command["byte"] is None:
        STATE["unfilled"].append(buffer)
        return
    buffer.fill(command["byte"], stream=stream)
    stream.sync()
    STATE["buffers"].append((buffer, stream, command["byte"]))


def do_check(_):
    """Copy everything back and compare; return the number of bytes."""
    from cuda.bindings import driver

    STATE["device"].set_current()
    for buffer, _stream, byte in STATE["buffers"]:

        def copy(host, offset, count, start=int(buffer.handle)):
            (result,) = driver.cuMemcpyDtoH(host, start + offset, count)
            assert result == driver.CUresult.CUDA_SUCCESS, result

        assert has_byte(copy, buffer.size, byte), "bytes differ"
    return sum(b.size for b, _, _ in STATE["buffers"])


def do_sleep_holding_gil(command):
    """Block like a long call into a C library that does not let Python run."""
    ctypes.PyDLL(None).usleep(int(command["seconds"] * 1e6))


def main():
    if "--start" in sys.argv:
        LINK.start()
        sys.stdin.read()
        return
    print(json.dumps({"ok": os.getpid()}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"ok": globals()[f"do_{command['do']}"](command)}
        except GPUPoolError as error:
            answer = {"error": str(error), "code": error.code}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}", "code": "exception"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
