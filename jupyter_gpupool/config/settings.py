# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The broker's settings, and checks that depend on the machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Mapping

from ..pool.model import PoolSettings
from ..states import AttachPolicy
from .grouping import Members
from .reading import HostReserve, HubGroups
from .schedules import Schedule

#: The environment variable that has the value of ``c.GPUPool.emulate`` if no configuration sets it.
EMULATE_VARIABLE = "GPUPOOL_EMULATE"

ForeignPolicy = Literal["count", "report", "end"]
ManagedPolicy = Literal["refuse", "allow"]
OverusePolicy = Literal["report", "end"]
OnLedgerLoss = Literal["closed", "min_share"]


@dataclass(frozen=True)
class BrokerSettings:
    """The checked configuration. Sizes are in bytes, times in seconds.

    A field has the name and meaning of its option (:class:`.GPUPool`). The settings of the pool's
    rules are in ``pool``.
    """

    pool: PoolSettings
    #: The configured policy. :func:`usable_attach` returns the policy that takes effect.
    attach: AttachPolicy
    guard: bool
    allow_unguarded: bool
    quiet_after: float
    turn: float
    retest_after: float
    managed_memory: ManagedPolicy
    overuse: OverusePolicy
    emulate: str
    devices: tuple[str, ...] | None
    #: The configured socket; "" means that :func:`jupyter_gpupool.endpoint.find_socket` decides.
    socket: str
    #: The Python interpreter for the broker's child processes that use the driver; "" means that
    #: the broker searches for an interpreter.
    device_python: str
    state_dir: Path
    journal_size: int
    foreign_processes: ForeignPolicy
    sample_interval: float
    lock_timeout: float
    linger: float
    max_sessions_per_user: int
    metrics_port: int
    user_sockets: bool
    admins: tuple[str, ...]
    host_reserve: HostReserve
    #: The machines that share limits; () if this machine is in no cluster.
    cluster_nodes: tuple[str, ...] = ()
    cluster_node: str = ""
    cluster_agent: str = "gpupool"
    cluster_identity: str = ""
    cluster_address: str = ""
    cluster_min_uid: int = 1000
    cluster_data: tuple[str, ...] = ()
    on_ledger_loss: OnLedgerLoss = "closed"
    cluster_min_share: int = 4 << 30
    schedules: tuple[Schedule, ...] = ()
    #: Who is in each group of ``pool.groups``.
    members: Mapping[str, Members] = field(default_factory=dict)
    #: The function that returns a user's Hub groups; None means that no user is in a Hub group.
    hub_groups: HubGroups | None = None
    #: Messages for the log. Each names a setting that does not have the effect that an admin
    #: expects.
    notes: tuple[str, ...] = ()
    #: The configuration files that were read, lowest precedence first.
    files: tuple[Path, ...] = ()
    #: The values of the options that differ from their defaults, as JSON values.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: For each configured option: the file, command or environment variable that has set it.
    origins: Mapping[str, str] = field(default_factory=dict)


def usable_attach(
    policy: AttachPolicy, guarded: bool, reason: str = ""
) -> tuple[AttachPolicy, str]:
    """Return the attach policy that takes effect if ``policy`` is requested, and a message.

    The message says why the result differs from ``policy``; "" if it does not differ.

    Parameters
    ----------
    policy:
        The policy from the configuration or from a kernelspec.
    guarded:
        Whether a device of the pool has the tier "guarded".
    reason:
        A sentence that says why no device has this tier (``DeviceService.guard_problem``).
    """
    if policy != "lazy" or guarded:
        return policy, ""
    because = f" {reason}" if reason else ""
    return "cell", (
        "Attach policy 'lazy' needs the guard, which is not available here, so kernels get "
        f"their slice when a cell starts ('cell').{because}"
    )


def wrong_machine(text: str) -> str:
    """Return why the machine ``text`` cannot be emulated; "" if it can."""
    # The import is here, because most brokers do not need the emulator.
    from .. import emulation

    try:
        emulation.check(text)
    except ValueError as error:
        return str(error)
    return ""
