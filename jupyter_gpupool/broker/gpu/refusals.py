# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Decides when a suspended state counts as lost because the driver refuses to restore it.

After a restore that failed for lack of room, driver 580.159.04 still reports CHECKPOINTED, and
refuses each later restore even if there is room (see ``docs/driver-facts.md``). Such a state is
lost. But a refusal may also be temporary: another program uses the memory, the GPU fails, or a
service that the GPU needs fails. So this module counts only refusals in a row on the same GPUs.
The broker tests these GPUs after each refusal. If one of the GPUs fails the test, the count starts
again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

#: The state counts as lost after MOST refusals in a row. The last refusal must come at least
#: PATIENCE seconds after the first.
MOST, PATIENCE = 5, 120.0
#: After this many seconds without a try, the count starts again.
STALE = 600.0


@dataclass
class Refusals:
    """The refused restores of one session since its last restore that worked."""

    count: int = 0
    first: float = 0.0
    last: float = 0.0
    devices: frozenset[str] = frozenset()

    def another(self, devices: Collection[str], now: float) -> bool:
        """Count a refusal on these GPUs at ``now``; return whether the state counts as lost."""
        if self.devices != frozenset(devices) or now - self.last > STALE:
            self.forget()
        if not self.count:
            self.first, self.devices = now, frozenset(devices)
        self.count += 1
        self.last = now
        return self.count >= MOST and now - self.first >= PATIENCE

    def blame(self, device: str) -> None:
        """Forget the refusals if they were on ``device``, because this GPU has failed a test."""
        if device in self.devices:
            self.forget()

    def forget(self) -> None:
        """Begin the count again."""
        self.count, self.devices = 0, frozenset()
