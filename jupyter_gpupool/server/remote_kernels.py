# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Kernels of this server on other machines: the sessions that their brokers have for them.

Brokers and agents of both machines carry each question. So the server asks a machine at most once a
second, and not again before the last question has ended. A machine that does not answer keeps its
last sessions, marked as such, because its kernels probably run on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Callable, Mapping, Protocol, Sequence

from ..deadlines import within
from ..errors import Code, GPUPoolError, RefusedError
from ..protocol import MOST_LOOKED, Message
from .views import View

#: Least seconds between two questions to a machine.
LEAST = 1.0

#: Seconds for an answer. The broker here waits longer for one that gets lost on its way.
PATIENCE = 10.0

#: A machine's clock counts as changed if it moved by so many seconds: a message takes some time.
MOVED = 0.5

#: What the views read of each session.
_NEEDED = frozenset(
    {"id", "kernel_id", "owner", "label", "state", "granted_bytes", "slices", "devices", "request"}
)

#: Fields that are points in time on the clock of the machine.
_TIMES = ("opened_at", "idle_since", "leaves_at", "queued_at", "keep_until", "recall_at")


class RemoteKernel(Protocol):
    """A kernel on another machine, as its provisioner."""

    @property
    def node(self) -> str:
        """The machine of the kernel; empty before it was chosen."""

    async def look(self, kernels: Sequence[str]) -> Mapping[str, Any]:
        """Return ``now``, ``sessions`` and ``gpus`` of these kernels."""

    async def tell(self, request: str, session: str, fields: Mapping[str, Any]) -> Message:
        """Send the machine's broker a request; return the answer."""


class _MachineAnswers:
    """What is known of one machine, and the question to it that is under way."""

    def __init__(self, node: str, changed: Callable[[], None], log: logging.Logger) -> None:
        self._node = node
        self._changed = changed
        self._log = log
        #: When it was last asked, and when it last answered, on our monotonic clock.
        self._asked, self._heard = float("-inf"), 0.0
        #: Its clock when it last answered.
        self._now = 0.0
        #: Seconds to add to a time on its clock for one on the clock of our broker.
        self._shift: float | None = None
        self._sessions: list[Message] = []
        self._gpus: list[View] = []
        #: Why it did not answer the last question; empty if it did.
        self._silent = ""
        self.question: asyncio.Task[None] | None = None

    def ask(self, kernels: Mapping[str, RemoteKernel]) -> None:
        """Ask for these kernels, unless it was asked lately."""
        if self.question is None and time.monotonic() - self._asked >= LEAST:
            self._asked = time.monotonic()
            self.question = asyncio.get_running_loop().create_task(self._ask(kernels))

    def ask_soon(self) -> None:
        """Have it asked the next time, however short ago the last one was."""
        self._asked = float("-inf")

    def close(self) -> None:
        """End the question."""
        if self.question is not None:
            self.question.cancel()

    def kernel_of(self, session: str) -> str | None:
        """Return the kernel of a session there; None if it has no such session."""
        found = (str(row["kernel_id"]) for row in self._sessions if row["id"] == session)
        return next(found, None)

    def sessions(self, now: float) -> list[View]:
        """Return the sessions, with times on the clock whose time is ``now``."""
        shift = now - (time.monotonic() - self._heard) - self._now
        if self._shift is None or abs(shift - self._shift) > MOVED:
            self._shift = shift
        return [self._shown(session, self._shift) for session in self._sessions]

    async def _ask(self, kernels: Mapping[str, RemoteKernel]) -> None:
        before = self._sessions, self._gpus, self._silent
        try:
            sessions, gpus, names = [], {}, [*kernels]
            for first in range(0, len(names), MOST_LOOKED):
                part = names[first : first + MOST_LOOKED]
                answer = await within(kernels[part[0]].look(part), PATIENCE)
                sessions += list(answer["sessions"])
                gpus.update({gpu["uuid"]: gpu for gpu in answer["gpus"]})
            for session in sessions:
                # Raises here, and not in each view, if it has another form.
                self._shown(session, 0.0)
            self._now, self._heard = float(answer["now"]), time.monotonic()
            self._sessions, self._gpus = sessions, [*gpus.values()]
            self._silent = ""
        except asyncio.TimeoutError:
            self._silent = f"{self._node} has not answered for {PATIENCE:g} s."
        except GPUPoolError as error:
            # A busy machine is not a silent one, unless that lasts.
            if error.code is not Code.TOO_MANY or time.monotonic() - self._heard > PATIENCE:
                self._silent = error.message
        except Exception:
            # Another version's answer must not end the watch.
            self._silent = f"{self._node} gave an answer that this server cannot read."
            self._log.exception("GPU pool: the answer of %s is malformed", self._node)
        finally:
            self.question = None
        if before != (self._sessions, self._gpus, self._silent):
            self._changed()

    def _shown(self, session: Mapping[str, Any], shift: float) -> View:
        if not session.keys() >= _NEEDED:
            raise KeyError(*(_NEEDED - session.keys()))
        times: View = {
            name: round(float(session[name]) + shift, 3)
            for name in _TIMES
            if session.get(name) is not None
        }
        expected = session.get("expected")
        if expected is not None:
            times["expected"] = {name: round(at + shift, 3) for name, at in expected.items()}
        queued = session.get("queue_position") is not None
        return {
            **session,
            **times,
            "queue_length": session.get("queue_length") if queued else None,
            # A share of time needs the moment of each count, on one clock.
            "busy_seconds": None,
            "mine": True,
            "here": True,
            "machine": self._node,
            "gpus": [gpu for gpu in self._gpus if gpu["uuid"] in session["devices"]],
            "unreachable": self._silent,
        }


class RemoteKernels:
    """Asks the machines, as the module describes.

    Parameters
    ----------
    kernels:
        Returns this server's kernels on other machines by their ids.
    changed:
        Called when a machine has answered something new.
    """

    def __init__(
        self,
        kernels: Callable[[], Mapping[str, RemoteKernel]],
        changed: Callable[[], None],
        log: logging.Logger,
    ) -> None:
        self._kernels = kernels
        self._changed = changed
        self._log = log
        self._machines: dict[str, _MachineAnswers] = {}

    def where(self) -> dict[str, str]:
        """Return the machine of each kernel."""
        return {name: kernel.node for name, kernel in self._kernels().items() if kernel.node}

    def ask(self) -> None:
        """Ask the machines that were not asked lately; returns at once."""
        kernels, where = self._kernels(), self.where()
        for node in self._machines.keys() - set(where.values()):
            self._machines.pop(node).close()
        for node in dict.fromkeys(where.values()):
            if node not in self._machines:
                self._machines[node] = _MachineAnswers(node, self._changed, self._log)
            self._machines[node].ask({name: kernels[name] for name in where if where[name] == node})

    def sessions(self, now: float) -> list[View]:
        """Return the sessions of the kernels, with times on the clock whose time is ``now``.

        Besides the fields of a session here, each has ``machine``; ``gpus``, the GPUs that it uses;
        and ``unreachable``, why that machine does not answer, or "".
        """
        where = self.where()
        return [
            row
            for node, machine in self._machines.items()
            for row in machine.sessions(now)
            if where.get(str(row["kernel_id"])) == node
        ]

    def has(self, session: str) -> bool:
        """Return whether a session is on another machine."""
        return any(machine.kernel_of(session) for machine in self._machines.values())

    async def tell(self, request: str, session: str, fields: Mapping[str, Any]) -> Message:
        """Send a request about a session to its broker; return the answer.

        Raises
        ------
        GPUPoolError
            If the broker refuses, or its machine does not answer.
        """
        kernels = self._kernels()
        for machine in self._machines.values():
            kernel = machine.kernel_of(session)
            if kernel is not None and kernel in kernels:
                answer = await kernels[kernel].tell(request, session, fields)
                machine.ask_soon()
                return answer
        raise RefusedError("This kernel has ended.", code=Code.UNKNOWN_SESSION)

    async def close(self) -> None:
        """End all questions."""
        for machine in self._machines.values():
            machine.close()
        self._machines.clear()
