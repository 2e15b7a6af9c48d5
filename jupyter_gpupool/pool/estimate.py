# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""How long a waiting session will probably wait, from what was observed.

Leases come free at the rate *holders / mean time a holder stays busy*, so that the session at
position p waits about p * mean / holders seconds. The mean is over the sessions that have a lease
now, each with its own exponentially weighted mean of past busy spells (first hold to last drop).
There is no estimate before a spell was observed. Schedules and time slices will bound the mean.

A session that has waited for longer than its estimate has shown that the estimate was wrong; it
gets none from then on, and its user is told how long it has waited.
"""

from __future__ import annotations

from .lease import Session

#: Weight of the newest observation.
WEIGHT = 0.3


def weighted(mean: float | None, seconds: float) -> float:
    """Return an exponentially weighted mean with one more observation."""
    return seconds if mean is None else mean + WEIGHT * (seconds - mean)


class Estimates:
    """Observed times, kept as sums so that one more observation costs nothing."""

    def __init__(self) -> None:
        self._holders = 0
        self._sum = 0.0
        self._known = 0
        self._swap: float | None = None

    def holds(self, session: Session, sign: int) -> None:
        """``session`` got (1) or gave back (-1) a lease."""
        self._holders += sign
        if session.busy_mean is not None:
            self._known += sign
            self._sum += sign * session.busy_mean
        if not self._known:
            # No error of rounding survives.
            self._sum = 0.0

    def busy(self, session: Session, seconds: float) -> None:
        """A session with a lease was busy for ``seconds``."""
        if session.busy_mean is None:
            session.busy_mean = seconds
            self._known += 1
            self._sum += seconds
        else:
            change = WEIGHT * (seconds - session.busy_mean)
            session.busy_mean += change
            self._sum += change

    def swapped(self, seconds: float) -> None:
        """A suspend or resume took ``seconds``."""
        self._swap = weighted(self._swap, seconds)

    def moving(self, session: Session) -> float:
        """Return the seconds that suspending ``session`` (or resuming it) will probably take."""
        return session.moving / 2 or self._swap or 0.0

    def wait(self, position: int, *, planned: bool, waited: float) -> float | None:
        """Return the seconds that the session at ``position`` will probably wait, None if unknown.

        ``planned``: it only waits for suspends that are under way, and then for its own resume.
        ``waited``: the seconds that it has waited so far.
        """
        if planned:
            return None if self._swap is None else 2 * self._swap
        if not self._known or not self._holders:
            return None
        expected = position * (self._sum / self._known) / self._holders
        return max(0.0, expected) if waited <= expected else None
