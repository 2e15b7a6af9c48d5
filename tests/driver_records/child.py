# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Runs each question in a child process. So a crash of the library counts as an answer."""

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

#: The time-out of one question, in seconds. For comparison: cuInit takes 0.1 s.
BOUND = 60.0


class Hung(Exception):
    """A question got no answer before its time-out. The error message shows the question."""


def ask(question: Callable[..., Any], *arguments: Any, bound: float = BOUND) -> Any:
    """Call ``question(*arguments)`` in a child process; return its answer.

    If the child ends before it answers, return "signal N" or "exit N".

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
    """Answer a question in the child, and end the child. Everything that the library prints is
    discarded.
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
