# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The accounts of an owner and of a group, and a cache of when the pool suspends idle sessions."""

from __future__ import annotations

from dataclasses import dataclass, field

from .model import Charge


@dataclass(slots=True)
class OwnerUsage:
    """The accounts of one owner."""

    memory: int = 0
    devices: int = 0
    leases: int = 0
    #: Host bytes of suspended state, including suspends under way.
    suspended: int = 0

    def add(self, charge: Charge, sign: int = 1) -> None:
        """Add a charge; ``sign`` -1 subtracts it."""
        self.memory += sign * charge[0]
        self.devices += sign * charge[1]
        self.leases += sign * charge[2]

    def copy(self) -> OwnerUsage:
        return OwnerUsage(self.memory, self.devices, self.leases, self.suspended)


@dataclass(slots=True)
class GroupUsage:
    """How many bytes of the leases of a group's members count against quotas."""

    memory: int = 0
    #: The part of ``memory`` that current suspends will free.
    leaving: int = 0

    @property
    def stays(self) -> int:
        """The part of ``memory`` that stays in use after all current suspends."""
        return self.memory - self.leaving


@dataclass(slots=True)
class Leaving:
    """For each idle session, when the pool suspends it even if no session waits.

    This is a cache of :func:`~.preemption.leaving`.
    """

    times: dict[str, float] = field(default_factory=dict)
    #: The :attr:`~.facts.Facts.version` at which the times were computed.
    version: int = -1
