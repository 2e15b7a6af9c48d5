# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Lets a command call a cluster's ledger, with a time-out for each call.

A call of Ray blocks: if no head runs, the call fails only after two minutes, and no argument of Ray
makes this time shorter. So a child process makes the calls. If the child does not answer in time,
this module kills it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from ..errors import Code, GPUPoolError, RefusedError

#: Time-outs in seconds. ``PROBE``: to connect to the head's port. ``JOIN``: to join the cluster and
#: get the first answer. ``ANSWER``: to get a later answer.
PROBE, JOIN, ANSWER = 3.0, 20.0, 10.0

#: Number of Ray's attempts to reach its head, one per second. Ray's default is 20.
TRIES = "6"

_PROGRAM = (sys.executable, "-m", "jupyter_gpupool.cluster.ledger_calls")


class LedgerCalls:
    """A command's connection to the ledger of the cluster whose head is at ``address``."""

    def __init__(self, address: str, *, program: Sequence[str] = _PROGRAM) -> None:
        self.address = address
        self._program = [*program, address]
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> LedgerCalls:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()

    def call(self, asked: str, method: str, *arguments: Any) -> Any:
        """Call a method of the ledger; return its answer. ``asked`` describes the call in errors.

        Raises
        ------
        RefusedError
            If ``address`` is not an address, or no ledger answers in time.
        """
        first = self._child is None
        if self._child is None:
            self._probe(asked)
            self._child = subprocess.Popen(
                self._program, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True,
                env={**os.environ, "RAY_NUM_REDIS_GET_RETRIES": TRIES},
            )  # fmt: skip
        seconds = JOIN if first else ANSWER
        line = self._exchange(self._child, json.dumps([method, *arguments]), seconds)
        if line is None:
            self.close()
            raise self._silent(asked, f"did not answer within {seconds:g} s")
        found = json.loads(line) if line else {"error": "its call ended without an answer"}
        if "error" in found:
            self.close()
            raise self._silent(asked, f"did not answer: {found['error']}")
        return found["answer"]

    def _probe(self, asked: str) -> None:
        """Raise an error if nothing accepts a connection at the head's port.

        This finds out in at most :data:`PROBE` seconds whether the head is gone.
        """
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdecimal():
            raise RefusedError(
                f"{self.address[:80]} is not the address of a cluster's head.",
                code=Code.BAD_REQUEST,
                next_step="Write an address such as 10.0.0.1:6379.",
            )
        try:
            socket.create_connection((host, int(port)), PROBE).close()
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error) or "no answer"
            raise self._silent(asked, f"cannot be reached: {why}") from None

    def _exchange(self, child: subprocess.Popen[str], line: str, seconds: float) -> str | None:
        """Send a line; return the answer, "" if the child has ended, None if it is silent."""
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(line + "\n")
            child.stdin.flush()
        except BrokenPipeError:
            return ""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            # ``select`` does not see lines that Python has already read into its buffer. But the
            # child answers each request with one line, so the buffer is empty.
            if select.select([child.stdout], [], [], left)[0]:
                return child.stdout.readline()
        return None

    def _silent(self, asked: str, how: str) -> GPUPoolError:
        return RefusedError(
            f"The cluster's head at {self.address} {how}. The request was {asked}.",
            code=Code.NO_HEAD,
            next_step="Check that `jupyter gpupool node --head` runs on the head, that this "
            "machine reaches its port, and that both machines have the same token. Kernels "
            "continue to run. To see the kernels of a machine, run `jupyter gpupool status` there.",
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Answer requests until standard input ends; each line is one request."""
    (address,) = sys.argv[1:] if argv is None else argv
    # Ctrl-C reaches the command, which then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The command reads the answers from standard output, and Ray prints there, too. So send Ray's
    # text to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from .ray_ledger import ask

    for line in sys.stdin:
        method, *arguments = json.loads(line)
        try:
            found = {"answer": ask(address, method, *arguments)}
        except Exception as error:  # the command reports any failure of Ray to its user
            text = str(error).strip().splitlines() or [type(error).__name__]
            found = {"error": text[0][:300]}
        print(json.dumps(found), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
