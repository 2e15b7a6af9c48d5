# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Runs each question in a child process, so that a crash of the library is an answer, too."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from typing import Any

#: Seconds to wait for an answer. cuInit takes 0.1 s to look for devices.
BOUND = 60.0


class Hung(Exception):
    """A question got no answer within the time-out; the text of the error is the question."""


def ask(question: Callable[..., Any], *arguments: Any, bound: float = BOUND) -> Any:
    """Return the result of ``question(*arguments)`` in a child; "signal N" or "exit N" if the
    child ends.

    Raises
    ------
    Hung
        If the child has not answered and ended within ``bound`` seconds.
    RuntimeError
        If the question raises an exception in the child.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        _answer(writing, question, arguments)
    os.close(writing)
    deadline, text = time.monotonic() + bound, b""
    try:
        while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
            piece = os.read(reading, 1 << 16)
            if not piece:
                break
            text += piece
        else:
            os.kill(pid, signal.SIGKILL)
            raise Hung(f"{question.__name__}{arguments}"[:200])
    finally:
        os.close(reading)
        status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    if os.WEXITSTATUS(status) or not text:
        return f"exit {os.WEXITSTATUS(status)}"
    said = json.loads(text)
    if "raised" in said:
        raise RuntimeError(said["raised"])
    return said["answer"]


def _answer(out: int, question: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Answer a question in the child, and end the child. The answer does not contain text that the
    library prints.
    """
    try:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        try:
            said = {"answer": question(*arguments)}
        except Exception as error:
            said = {"raised": f"{question.__name__}{arguments}: {error!r}"}
        text = json.dumps(said).encode()
        while text:
            text = text[os.write(out, text) :]
        os._exit(0)
    finally:
        os._exit(99)
