# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The loop of a child process: requests and answers, one JSON object per line.

Request: ``{"id": 7, "op": "sample", ...}``. Answer: ``{"id": 7, ...}`` with what the handler
returned, or ``{"id": 7, "error": text, "code": text}``. Unasked: ``{"event": ...}``. The first line
is ``{"event": "ready", ...}``.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from typing import Any, Callable, Mapping

from ..errors import Code, GPUPoolError

Handler = Callable[..., Mapping[str, Any]]

_PR_SET_PDEATHSIG = 1

_write_lock = threading.Lock()


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, whatever this one is doing.

    The end of stdin says the same, but a process that hangs in a driver call does not read.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the line above. Its pid is the first argument.
    if len(sys.argv) > 1 and os.getppid() != int(sys.argv[1]):
        os._exit(0)


def claim_stdout() -> int:
    """Return a descriptor for answers, and send what anybody else prints to stderr."""
    out = os.dup(1)
    os.set_inheritable(out, False)
    os.dup2(2, 1)
    return out


def emit(out: int, message: Mapping[str, Any]) -> None:
    """Write one line, whole, from any thread. A parent that is gone ends this process."""
    line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
    try:
        with _write_lock:
            while line:
                line = line[os.write(out, line) :]
    except OSError:
        os._exit(0)


def serve(out: int, handlers: Mapping[str, Handler]) -> None:
    """Answer requests from stdin until it ends."""
    for line in sys.stdin.buffer:
        request = json.loads(line)
        request_id, op = request.pop("id"), request.pop("op")
        answer: Mapping[str, Any]
        try:
            answer = handlers[op](**request)
        except GPUPoolError as error:
            answer = {"error": str(error), "code": error.code}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}", "code": Code.INTERNAL}
        emit(out, {"id": request_id, **answer})
