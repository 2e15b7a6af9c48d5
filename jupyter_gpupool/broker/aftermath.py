# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""After the end of a restored process, where the driver is known to hang when that happens.

The pool and its servers suspend a kernel again before they end it. Nobody does that for the
out-of-memory killer, for a user's ``kill -9``, or for a kernel that ends by itself. If the
machine has survived, its GPU may hang for whoever uses it next, so no kernel gets it before a test
has passed there.
"""

from __future__ import annotations

import logging
from typing import Callable

from ..pool import events as e
from ..pool.model import SessionRecord
from . import processes
from .health import Health
from .runner import Runner


class Aftermath:
    """Has the GPUs tested of restored processes that ended without being suspended first.

    ``hazard`` returns what is known of the loaded driver; "" if such an end is harmless there.
    """

    def __init__(
        self, runner: Runner, health: Health, hazard: Callable[[], str], log: logging.Logger
    ) -> None:
        self._runner = runner
        self._health = health
        self._hazard = hazard
        self._log = log

    def ending(self, event: e.SessionEnded) -> None:
        """A session is about to end, for whatever reason."""
        session = self._runner.sessions.find(event.session)
        record = self._runner.record(event.session)
        if session is None or record is None or session.retired or session.process is None:
            return
        if not processes.alive(session.process):
            self.ended(record)

    def ended(self, record: SessionRecord) -> None:
        """A kernel has ended that nobody had suspended first."""
        if not self._hazard() or not record.resumes or not record.slices:
            return
        why = (
            "A kernel that had been suspended and resumed ended here without being suspended "
            "first, which is known to hang this driver."
        )
        for uuid in dict.fromkeys(piece.device for piece in record.slices):
            if uuid in self._health.devices:
                self._log.error(
                    "GPU %d: %s (Session %s; the pool did not end it: it called exit(), or was "
                    "killed from outside, see dmesg.) No kernel gets the GPU before it has "
                    "passed a test", self._health.devices[uuid].index, why, record.id,
                )  # fmt: skip
                self._health.suspect(uuid, why)
