# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Sessions that have more device memory than they were granted, by NVML's word, and what is done.

The guard keeps ordinary software within its slice. What goes around it (a cleared ``LD_PRELOAD``,
the driver opened by its path) is seen here, a few samples late, and treated as ``overuse`` says.
``pool/attribution.py`` decides what counts.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Collection, Mapping

from ...config.settings import OverusePolicy
from ...pool import attribution
from ...pool import events as e
from ...pool.model import Refusal
from ...units import format_bytes
from ..pages.control import ATTACHED, CLOSED, Pages
from ..runner import Runner
from ..sessions import Session
from .actions import DeviceEffects

#: Seconds for which the gate stays closed for a suspend that does not begin.
PATIENCE, POLL = 5.0, 0.02


class Watchdog:
    """Acts once for each time that a session goes beyond its slices."""

    def __init__(
        self,
        runner: Runner,
        effects: DeviceEffects,
        pages: Pages,
        log: logging.Logger,
        *,
        policy: OverusePolicy,
    ) -> None:
        self.policy = policy
        self._runner = runner
        self._effects = effects
        self._pages = pages
        self._log = log
        self._tasks: set[asyncio.Task[None]] = set()

    def seen(self, sizes: Mapping[str, Mapping[str, int]], old: Collection[str]) -> None:
        """Take note of a sample: bytes by session and device, as NVML shows them.

        ``old`` are devices that could not be read, or of which the sample is old news.
        """
        for session in self._runner.sessions:
            used = sizes.get(session.id)
            if used or (session.use.overuse and not old):
                self._judge(session, used or {})

    def _judge(self, session: Session, used: Mapping[str, int]) -> None:
        record, use = self._runner.record(session.id), session.use
        if record is None or session.id in self._effects.busy or session.forced:
            return
        granted = {piece.device: piece.bytes for piece in record.slices}
        totals = {uuid: sample.total for uuid, sample in self._effects.samples.items()}
        use.overuse = attribution.overuse(used, granted, use.explained, totals)
        use.overused, act = attribution.confirmed(use.overused, use.overuse)
        if act:
            self._act(session, used, granted, use.overuse)

    def _act(
        self, session: Session, used: Mapping[str, int], granted: Mapping[str, int], over: int
    ) -> None:
        sentence = (
            f"The kernel uses {format_bytes(sum(used.values()))} of GPU memory and was granted "
            f"{format_bytes(sum(granted.values()))}: part of it was allocated around the guard."
        )
        self._log.warning("Session %s: %s (%s)", session.id, sentence, self.policy)
        for device, size in used.items():
            self._runner.note(
                "overuse", session, device=device, bytes=size, reason=sentence,
                detail={"granted": granted.get(device, 0), "over": over, "policy": self.policy},
            )  # fmt: skip
        if self.policy == "end":
            self._effects.end_session(
                e.EndSession(
                    session=session.id,
                    message=f"{sentence} This pool ends such kernels (c.GPUPool.overuse).",
                )
            )
        elif self.policy == "suspend":
            task = asyncio.get_running_loop().create_task(self._suspend(session, used))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------------ suspend by rule

    async def _suspend(self, session: Session, used: Mapping[str, int]) -> None:
        """Take the slice although it may be in use, and ask for one that covers what is used."""
        record = self._runner.record(session.id)
        if record is None or record.state not in ATTACHED:
            return  # it has no slice that could be taken
        if session.page is not None:
            session.forced = True
            self._pages.set_gate(session, CLOSED)
            # Nothing of it can reach the device now, whatever its holds say.
            self._drop_holds(session)
        rid, answer = f"w{session.id}", []  # type: str, list[Refusal | None]
        self._runner.expect(rid, lambda refusal, _note: answer.append(refusal))
        try:
            self._runner.handle(e.ReleaseAsked(now=self._runner.now(), session=session.id, rid=rid))
            if answer and answer[0] is not None:
                self._log.warning("Session %s keeps its slice: %s", session.id, answer[0])
            elif session.page is not None:
                await self._begun(session)
        finally:
            # Whatever happened: a gate that stays shut with nobody to open it is a hung kernel.
            if session.forced and not self._going(session):
                session.forced = False
            if self._runner.guard is not None:
                self._runner.guard.changed(session)
        self._ask_for_more(session, used)

    def _drop_holds(self, session: Session) -> None:
        session.use.held = False
        record = self._runner.record(session.id)
        for hold in record.holds if record is not None else ():
            self._runner.handle(
                e.HoldDropped(
                    now=self._runner.now(), session=session.id, hold=hold.id, cuda=session.cuda
                )
            )

    def _going(self, session: Session) -> bool:
        record = self._runner.record(session.id)
        return record is not None and record.state == "detaching"

    async def _begun(self, session: Session) -> None:
        """Wait until the suspend is over, or is not going to begin."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + PATIENCE
        while session.forced and (self._going(session) or loop.time() < give_up):
            await asyncio.sleep(POLL)

    def _ask_for_more(self, session: Session, used: Mapping[str, int]) -> None:
        record = self._runner.record(session.id)
        request = attribution.larger_request(record.request, used) if record is not None else None
        if request is None:
            return
        rid = f"w{session.id}"

        def reply(refusal: Refusal | None, _note: str) -> None:
            if refusal is not None:
                self._log.warning("Session %s may not have more: %s", session.id, refusal)

        self._runner.expect(rid, reply)
        self._runner.handle(
            e.RequestChanged(now=self._runner.now(), session=session.id, request=request, rid=rid)
        )
