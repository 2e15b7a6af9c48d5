# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``%%gpu 16GiB``: another request for one cell, and the old one after it.

The gate does this before it takes the cell's hold, so that the cell waits for the larger slice as
any cell waits, and can be interrupted.
"""

from __future__ import annotations

import time
from typing import Any, Callable, Mapping

from ..endpoint import MACHINE_SOCKET
from ..errors import BrokerUnavailable, Code, GPUPoolError, RefusedError
from ..units import format_bytes
from .command import CellRequest
from .interrupts import TICK, Alarm, Interrupts
from .link import Link

#: Seconds in which a request (not a wait) is answered.
ANSWER = 10.0


class GPUWaitInterrupted(GPUPoolError):
    """The user interrupted the wait for a slice; the cell has not run."""

    code = Code.INTERRUPTED


class OneCell:
    """Changes the session's request for one cell and back; ``notice`` shows a text to the user."""

    def __init__(self, link: Link, interrupts: Interrupts, notice: Callable[[str], None]) -> None:
        self._link = link
        self._interrupts = interrupts
        self._notice = notice

    async def ask_for(self, asked: CellRequest, before: dict[str, Any]) -> None:
        """Change the request for one cell; put the fields that undo it into ``before``."""
        old = {name: self._link.request.get(name) for name in asked.fields}
        try:
            answer = await self._call("request", **asked.fields)
        except BrokerUnavailable:
            await self.broker_expected(TICK)  # it died just now: it may be back in a moment
            answer = await self._call("request", **asked.fields)
        before.update({name: value for name, value in old.items() if value is not None})
        self._link.note_request(answer)
        smallest = min((s.bytes for s in self._link.slices), default=0)
        if self._link.attached and not self._link.holds and smallest < asked.memory:
            # Not enough room where it is: detach, so that the cell waits for the new size.
            await self._call("release")
            await self._until_detached(asked.memory)

    async def _until_detached(self, wanted: int) -> None:
        """Wait until the slice that was released is on its way back."""
        alarm = Alarm()
        give_up = time.monotonic() + ANSWER
        with self._interrupts.watch(alarm.interrupt):
            while self._link.attached and not alarm.interrupted and time.monotonic() < give_up:
                await alarm.wait()
        if alarm.interrupted:
            raise interrupted()
        if self._link.attached:
            why = self._link.pinned_reason or self._link.reason or "the kernel is busy"
            raise RefusedError(
                f"{format_bytes(wanted)} are not free on the GPU that this kernel is on, and it "
                f"could not leave it: {why}.",
                next_step="Try again later, or ask for less.",
            )

    async def give_back(self, before: dict[str, Any]) -> None:
        try:
            answer = await self._call("request", **before)
        except BrokerUnavailable:
            self._link.owe_request(before)
        except GPUPoolError as error:
            self._notice(f"GPU pool: the request of this kernel could not be set back: {error}")
        else:
            self._link.note_request(answer)

    async def broker_expected(self, at_least: float = 0.0) -> None:
        """Wait for a broker that is expected back; a new kernel is still greeting its own."""
        alarm = Alarm()
        begun = time.monotonic()
        with self._interrupts.watch(alarm.interrupt):
            while (
                0.0 < self._link.unreachable_for() < self._link.reviver.patience
                or time.monotonic() < begun + at_least
            ):
                await alarm.wait()
                if alarm.interrupted:
                    raise interrupted()

    async def _call(self, kind: str, **fields: Any) -> Mapping[str, Any]:
        """Send a request and return the answer, which is quick: an interrupt is not heard here.

        It must not reach the event loop either, which a KeyboardInterrupt would end.
        """
        alarm = Alarm()
        with self._interrupts.watch(alarm.ring):
            future = self._link.start_call(kind, **fields)
            future.add_done_callback(lambda _: alarm.ring())
            deadline = time.monotonic() + ANSWER
            while not future.done() and time.monotonic() < deadline:
                await alarm.wait()
        if future.done():
            return future.result()
        raise BrokerUnavailable(
            f"The GPU pool broker at {self._link.path} did not answer in {ANSWER:g} s.",
            code=Code.BROKER_SILENT,
            next_step="See `jupyter gpupool doctor`.",
        )


def no_broker(link: Link, error: GPUPoolError) -> GPUPoolError:
    """Return ``error``, that no broker can be used, with the way to start one if none is there."""
    named = str(link.path.with_suffix(".log")) in str(error)
    hint = "" if named else log_hint(link)
    if error.code in (Code.NO_BROKER, BrokerUnavailable.code):
        start = (
            "It is the one of the whole machine: ask its admin to start it."
            if link.path == MACHINE_SOCKET
            else "Open another Pooled GPU kernel, which starts it with your server's options, "
            "or run `jupyter gpupool broker`."
        )
    else:
        start = error.next_step  # a broker is not what is missing
    message = error.message
    if str(link.path) not in message:
        message += f" Its socket is {link.path}."
    return BrokerUnavailable(message, code=error.code, next_step=f"{start} {hint}".strip())


def log_hint(link: Link) -> str:
    """Return where to look when the broker does not answer."""
    if link.path == MACHINE_SOCKET:
        return ""
    return f"The broker's log is {link.path.with_suffix('.log')}, if it was started for you."


def interrupted() -> GPUWaitInterrupted:
    return GPUWaitInterrupted(
        "The wait for a GPU slice was interrupted; the cell has not run.",
        next_step="Run it again to queue again, or give it the tag no-gpu if it needs no GPU.",
    )
