# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The sessions of this server's kernels on other machines, as the brokers there report them.

A question goes through four processes: the broker and the cluster's agent on this machine, and then
the cluster's agent and the broker on the other machine. So the server asks a machine at most once a
second, and only when the last question to that machine has ended. If a machine does not answer, its
kernels probably still run. The server then shows the last known sessions of that machine, marked as
unreachable.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Callable, Mapping, Protocol, Sequence

from ..deadlines import within
from ..errors import Code, GPUPoolError, RefusedError
from ..protocol import MOST_LOOKED, Message
from . import openapi
from .views import View

#: Two questions to a machine are at least this many seconds apart.
LEAST = 1.0

#: This server waits at most this many seconds for an answer. An answer can be lost on its way, and
#: this machine's broker would wait for it longer.
PATIENCE = 10.0

#: Each answer shows how far the clocks of the two machines are apart. If this difference changes by
#: more than this many seconds, a clock was probably set, and the server uses the new difference.
#: Smaller changes come from the time that a message takes.
MOVED = 0.5

#: The fields of a session that the views need.
_NEEDED = frozenset(
    {"id", "kernel_id", "owner", "label", "state", "granted_bytes", "slices", "devices", "request"}
)


class RemoteKernel(Protocol):
    """A kernel on another machine; its provisioner has this interface."""

    @property
    def node(self) -> str:
        """The machine of the kernel; "" before a machine is chosen."""

    async def look(self, kernels: Sequence[str]) -> Mapping[str, Any]:
        """Return the machine's ``now``, and the ``sessions`` and ``gpus`` of these kernels."""

    async def tell(self, request: str, session: str, fields: Mapping[str, Any]) -> Message:
        """Send a request to that machine's broker; return the answer."""


class _MachineAnswers:
    """The last answers of one machine, and the present question to this machine."""

    def __init__(self, node: str, changed: Callable[[], None], log: logging.Logger) -> None:
        self._node = node
        self._changed = changed
        self._log = log
        #: When the machine was last asked, and when it last answered, on this server's monotonic
        #: clock.
        self._asked, self._heard = float("-inf"), 0.0
        #: The time on the machine's clock when it last answered.
        self._now = 0.0
        #: Seconds by which the clock of this machine's broker is ahead of the other machine's
        #: clock.
        self._shift: float | None = None
        self._sessions: list[Message] = []
        self._gpus: list[View] = []
        #: Why the machine did not answer the last question; "" if it did.
        self._silent = ""
        self.question: asyncio.Task[None] | None = None

    def ask(self, kernels: Mapping[str, RemoteKernel]) -> None:
        """Ask the machine about these kernels, at most once in :data:`LEAST` seconds."""
        if self.question is None and time.monotonic() - self._asked >= LEAST:
            self._asked = time.monotonic()
            self.question = asyncio.get_running_loop().create_task(self._ask(kernels))

    def ask_soon(self) -> None:
        """Let the next :meth:`ask` ask, even if the last question is not LEAST seconds old."""
        self._asked = float("-inf")

    def close(self) -> None:
        """Cancel the question that is under way."""
        if self.question is not None:
            self.question.cancel()

    def kernel_of(self, session: str) -> str | None:
        """Return the kernel of a session on the machine; None if it has no such session."""
        found = (str(row["kernel_id"]) for row in self._sessions if row["id"] == session)
        return next(found, None)

    def sessions(self, now: float) -> list[View]:
        """Return the machine's sessions.

        ``now`` is the present time of this machine's broker. All times in the result are on the
        same broker's clock.
        """
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
                # Check each session now: a malformed session must not raise an error later, in each
                # view.
                self._shown(session, 0.0)
            self._now, self._heard = float(answer["now"]), time.monotonic()
            self._sessions, self._gpus = sessions, [*gpus.values()]
            self._silent = ""
        except asyncio.TimeoutError:
            self._silent = f"{self._node} has not answered for {PATIENCE:g} s."
        except GPUPoolError as error:
            # The code TOO_MANY means that too many orders wait now. The machine then counts as
            # silent only after PATIENCE seconds without an answer.
            if error.code is not Code.TOO_MANY or time.monotonic() - self._heard > PATIENCE:
                self._silent = error.message
        except Exception:
            # The other machine may have another version of this package. Its answer must not end
            # the watch with an error.
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
            for name in openapi.marked("x-time")
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
            # The history divides these seconds by the time between two counts. The server does not
            # know the exact times at which another machine counts, so it leaves the seconds out.
            "busy_seconds": None,
            "mine": True,
            "here": True,
            "machine": self._node,
            "gpus": [gpu for gpu in self._gpus if gpu["uuid"] in session["devices"]],
            "unreachable": self._silent,
        }


class RemoteKernels:
    """Asks the other machines about this server's kernels, as the module describes.

    Parameters
    ----------
    kernels:
        Returns this server's kernels on other machines, by kernel id.
    changed:
        Called when a machine's answer differs from its last answer.
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
        """Ask the machines that were not asked lately, without waiting for the answers."""
        kernels, where = self._kernels(), self.where()
        for node in self._machines.keys() - set(where.values()):
            self._machines.pop(node).close()
        for node in dict.fromkeys(where.values()):
            if node not in self._machines:
                self._machines[node] = _MachineAnswers(node, self._changed, self._log)
            self._machines[node].ask({name: kernels[name] for name in where if where[name] == node})

    def sessions(self, now: float) -> list[View]:
        """Return the sessions of the kernels.

        Each session has the fields of a session on this machine and three more: ``machine``;
        ``gpus``, the GPUs that it uses; and ``unreachable``, the reason why its machine does not
        answer, or "". ``now`` is the present time of this machine's broker. All times in the result
        are on the same broker's clock.
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
        """Cancel all questions."""
        for machine in self._machines.values():
            machine.close()
        self._machines.clear()
