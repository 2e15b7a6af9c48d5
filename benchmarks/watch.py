# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Watches a broker: records each group's usage, and notes grants beyond a device's memory."""

from __future__ import annotations

import threading
import time
from typing import Any

from jupyter_gpupool.client import Client

#: Seconds between two looks.
LOOK = 0.5


class Watch(threading.Thread):
    """Asks the broker for its status twice a second."""

    def __init__(self, socket: str) -> None:
        super().__init__(daemon=True)
        self._socket = socket
        self._stopped = threading.Event()
        #: Pairs of a time and a dict: the GPU-seconds of each group from the start to this time.
        self.samples: list[tuple[float, dict[str, float]]] = []
        self.problems: list[str] = []

    def run(self) -> None:
        last: dict[str, float] = {}
        total: dict[str, float] = {}
        with Client(self._socket) as client:
            while not self._stopped.wait(LOOK):
                status = client.call("status")
                for session in status["sessions"]:
                    if session["group_usage"] is None:
                        continue
                    name, today = session["group"], session["group_usage"]["today"]
                    more = today - last.get(name, today)
                    # ``today`` starts again at 0 when a new day of the daily budgets begins.
                    total[name] = total.get(name, 0.0) + (more if more >= 0 else today)
                    last[name] = today
                self.samples.append((time.time(), dict(total)))
                for device in status["devices"]:
                    if device["memory_granted"] > device["memory_capacity"]:
                        self.problems.append(f"granted more than there is: {device}")

    def stop(self) -> None:
        self._stopped.set()
        self.join(60)

    def used(self, since: float, until: float) -> dict[str, float]:
        """Return the GPU-seconds that each group has used between two times."""
        inside: list[Any] = [figures for at, figures in self.samples if since <= at <= until]
        if not inside:
            return {}
        first, last = inside[0], inside[-1]
        return {name: last[name] - first.get(name, 0.0) for name in last}
