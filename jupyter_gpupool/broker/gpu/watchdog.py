# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Sessions that have more device memory than they were granted, by NVML's word, and what is done.

The guard keeps ordinary software within its slice. What goes around it (a cleared ``LD_PRELOAD``,
the driver opened by its path) is seen here, a few samples late, and treated as ``overuse`` says.
``pool/attribution.py`` decides what counts.
"""

from __future__ import annotations

import logging
from typing import Collection, Mapping

from ...config.settings import OverusePolicy
from ...pool import attribution
from ...pool import events as e
from ...units import format_bytes
from ..runner import Runner
from ..sessions import Session
from .actions import DeviceEffects


class Watchdog:
    """Acts once for each time that a session goes beyond its slices."""

    def __init__(
        self,
        runner: Runner,
        effects: DeviceEffects,
        log: logging.Logger,
        *,
        policy: OverusePolicy,
    ) -> None:
        self.policy = policy
        self._runner = runner
        self._effects = effects
        self._log = log

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
        if record is None or session.id in self._effects.busy:
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
