# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Answers to ``status``: made once for each viewer and change of the pool, and sent again."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Mapping

from ..protocol import VERSION
from .auth import Peer
from .runner import Runner
from .status import Snapshots

#: Seconds for which an answer may be sent again: times in it go on, and what the guards count.
LASTS = 0.25

#: Viewers whose last answer is kept.
MAX_VIEWERS = 16


@dataclass(frozen=True, slots=True)
class _Answer:
    version: int
    made_at: float
    #: It depends on what the pages of attached sessions say, which changes without an event.
    volatile: bool
    #: Without the opening brace.
    rest: bytes


class Shown:
    """Encoded answers; see the module."""

    def __init__(self, runner: Runner, snapshots: Snapshots) -> None:
        self._runner = runner
        self._snapshots = snapshots
        self._answers: dict[tuple[int, int], _Answer] = {}
        self._now = asyncio.get_running_loop().time

    def line(
        self, peer: Peer, request_id: int, counters: Mapping[str, int], *, frugal: bool
    ) -> bytes:
        """Return the encoded answer to a ``status`` of ``peer``.

        ``frugal``: an answer of the last LASTS seconds is good enough, whatever has happened since.
        """
        viewer, now = (peer.uid, peer.gid), self._now()
        known = self._answers.get(viewer)
        if known is None or not self._still_good(known, now, frugal):
            known = self._make(peer, now)
            if len(self._answers) >= MAX_VIEWERS:
                self._answers.clear()
            self._answers[viewer] = known
        broker = json.dumps(self._snapshots.broker(counters), separators=(",", ":"))
        head = f'{{"v":{VERSION},"type":"ok","id":{request_id},"broker":{broker},'
        return head.encode() + known.rest

    def _still_good(self, answer: _Answer, now: float, frugal: bool) -> bool:
        if now - answer.made_at > LASTS:
            return False
        return frugal or (answer.version == self._runner.version and not answer.volatile)

    def _make(self, peer: Peer, now: float) -> _Answer:
        version = self._runner.version
        snapshot = self._snapshots.status(peer)
        volatile = any(s["slices"] and s.get("guard") for s in snapshot["sessions"])
        text = json.dumps(snapshot, separators=(",", ":"))
        return _Answer(version, now, volatile, text[1:].encode() + b"\n")
