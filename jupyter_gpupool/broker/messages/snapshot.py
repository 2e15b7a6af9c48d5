# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The answer to ``status``, and the limits that a kernel learns when it connects.

Every user sees ``devices`` and ``host``. Of other users' sessions, the answer shows only what
explains the use of the devices and the place in the queue. Sizes are bytes, times are seconds. A
figure that the broker could not read is null, never 0.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

from ... import __version__, cgroups
from ...devices import Devices
from ...pool.limits import most_devices, most_memory
from ...pool.machine import Pool
from ...pool.model import (
    Daily,
    DeviceView,
    Owner,
    PoolSettings,
    SessionRecord,
    Usage,
)
from ...pool.session_view import PoolView, SessionView
from ...protocol import VERSION
from ..configuration import Configuration
from ..core import Core
from ..gpu.maintenance import Maintenance
from ..gpu.samples import Samples
from ..membership import Memberships
from ..pages.activity import Activity
from ..pages.setup import GuardSetup
from ..sessions import LiveSession
from ..store.records import request_to_json
from ..transport.auth import Peer, User
from .explanation import budget, expected, shares


class Snapshots:
    """Reads the pool for people."""

    def __init__(
        self,
        core: Core,
        service: Devices,
        configuration: Configuration,
        *,
        samples: Samples,
        activity: Activity,
        setup: GuardSetup,
        maintenance: Maintenance,
        memberships: Memberships,
        no_device: str,
        journal_note: str,
    ) -> None:
        self._core = core
        self._service = service
        self._configuration = configuration
        self._samples = samples
        self._activity = activity
        self._setup = setup
        self._maintenance = maintenance
        self._memberships = memberships
        self._no_device = no_device
        self._journal_note = journal_note

    def limits(self, owner: Owner) -> dict[str, Any]:
        """Return the limits of one session of ``owner``; ``memory`` is the limit on each device."""
        settings, devices = self._core.pool.settings, self._core.pool.device_views()
        return {
            "memory": MostMemory(settings, devices).of(owner, 1),
            "devices": most_devices(owner, settings, len(devices)),
            "max_wait": settings.max_wait,
            "max_keep": settings.max_keep,
            "priorities": sorted(settings.priority_classes),
        }

    # ------------------------------------------------------------------ status

    def broker(self, counters: Mapping[str, int]) -> dict[str, Any]:
        """Return the part of ``status`` about the broker itself."""
        return {
            "machine_wide": self._configuration.machine_wide,
            "journal": str(self._core.journal.path),
            "journal_problem": self._core.journal.problem,
            "journal_note": self._journal_note,
            "counters": dict(counters),
        }

    def status(self, peer: Peer) -> dict[str, Any]:
        """Return all of ``status`` except the part of :meth:`broker`, as ``peer`` may see it."""
        self._memberships.learn_soon(peer.uid)
        view = self._core.view()
        settings, most = view.settings, MostMemory(view.settings, view.devices)
        viewer = self._memberships.owner(peer.uid)
        standings = Standings(self._core.pool, view, viewer.name)
        attach, attach_reason = self._setup.attach
        emulate = self._configuration.settings.emulate
        return {
            "version": __version__,
            "socket": str(self._configuration.socket),
            "pid": os.getpid(),
            "now": view.now,
            "emulated": bool(emulate),
            "machine": f"EMULATED {emulate}" if emulate else self._service.versions,
            # Whether the machine shares limits with other machines. If so, the broker answers the
            # message ``cluster``.
            "clustered": bool(self._configuration.settings.cluster_nodes),
            "problem": self._no_device,
            "driver_warning": self._service.hazard,
            "limited": self._service.limit,
            "limits": self.limits(viewer),
            "user": viewer.name,
            "groups": [*self._memberships.groups(peer.uid)],
            "admin": self._configuration.access.is_admin(peer),
            # A user without a session also sees their standing, because the standing may be the
            # reason why the pool refuses a new session.
            "standing": standings.of(viewer)["standing"],
            "devices": [self._device(v) for v in view.devices],
            "sessions": [
                self._session(v, view.now, peer, most, standings)
                for v in view.sessions
                if not self._empty(v.record, peer)
            ],
            "maintenance": self._maintenance.status(peer),
            "queue_length": sum(1 for s in view.sessions if s.record.state == "queued"),
            "host": {
                "budget_bytes": view.host_budget,
                "used_bytes": view.host_used,
                "available_bytes": _available(),
            },
            "settings": {
                "idle_timeout": settings.idle_timeout,
                "reclaim_after": settings.reclaim_after,
                "max_wait": settings.max_wait,
                "attach": attach,
                "attach_reason": attach_reason,
            },
            "schedule": self._configuration.schedule(time.time()),
            "config": self._configuration.shown(peer),
        }

    def _device(self, view: DeviceView) -> dict[str, Any]:
        device = view.device
        sample = self._samples.recent(device.uuid)
        return {
            "uuid": device.uuid,
            "index": device.index,
            "name": device.name,
            "emulated": device.emulated,
            "tier": device.tier,
            "tier_reason": device.tier_reason,
            "context_bytes": device.context_bytes,
            "can_suspend": device.can_suspend,
            "memory_total": device.memory_total,
            "memory_capacity": view.capacity,
            "memory_granted": view.granted,
            "memory_foreign": view.foreign,
            # None for a device out of service, because the pool grants nothing there.
            "memory_free": None if view.drained_reason else view.free,
            "memory_used": sample.used if sample else None,
            "utilisation": sample.utilisation if sample else None,
            "drained_reason": view.drained_reason,
        }

    def _empty(self, record: SessionRecord, peer: Peer) -> bool:
        """Return whether to hide this session: it belongs to another user and has no kernel yet."""
        session = self._core.sessions.find(record.id)
        return (
            session is not None
            and session.process is None
            and not record.slices
            and not self._configuration.access.may_act(peer, session.uid)
        )

    def _session(
        self,
        view: SessionView,
        now: float,
        peer: Peer,
        most: MostMemory,
        standings: Standings,
    ) -> dict[str, Any]:
        record = view.record
        session = self._core.sessions.find(record.id)
        devices = [piece.device for piece in record.slices]
        device = devices[0] if devices else None
        if session is None or not self._configuration.access.may_act(peer, session.uid):
            return {
                "id": record.id,
                "owner": "other",
                "state": record.state,
                "priority": record.request.priority,
                "granted_bytes": record.granted_bytes,
                "device": device,
                "devices": devices,
                "slices": [
                    {"device": piece.device, "granted_bytes": piece.bytes}
                    for piece in record.slices
                ],
                "queue_position": view.queue_position,
                "asks": _asks(record),
                "waits_for": view.waits_for,
                "queued_at": view.queued_at,
            }
        used = self._used(session, record)
        pinned = record.pinned_reason or session.use.pins
        idle = record.idle_since if record.state == "idle" else None
        return {
            "id": record.id,
            "pid": session.process.pid if session.process else None,
            "owner": record.owner.name,
            "group": record.owner.group,
            "label": record.label,
            "kernel_id": session.kernel_id,
            "state": record.state,
            "attach": record.attach,
            "priority": record.request.priority,
            "granted_bytes": record.granted_bytes,
            "footprint_bytes": measured(record, session.cuda),
            "suspended_bytes": record.suspended_bytes,
            "request": request_to_json(record.request),
            "asks": _asks(record),
            "holds": [{"id": h.id, "kind": h.kind, "since": h.since} for h in record.holds],
            "device": device,
            "devices": devices,
            "landing": sorted(session.leaves),
            "slices": self._slices(session, view),
            "queue_position": view.queue_position,
            "queue_length": view.queue_length,
            "expected": expected(view.expected),
            "queued_at": view.queued_at,
            "wait_reason": record.wait_reason,
            "waits_for": view.waits_for,
            "preempted": record.preempted,
            "pinned_reason": pinned,
            "stays_reason": "" if pinned else view.stays_reason,
            "host_note": session.host_short or session.host_limit,
            "release_asked": record.release_asked,
            "wait_seconds_total": view.wait_seconds_total,
            "attached_seconds_total": view.attached_seconds_total,
            "opened_at": record.opened_at,
            "leaves_at": None if pinned or view.leaves_at is None else round(view.leaves_at, 1),
            "wanted": view.wanted,
            "taken_reason": view.taken_reason,
            "idle_since": idle,
            "idle_seconds": None if idle is None else max(0.0, now - idle),
            "suspends": record.suspends,
            "resumes": record.resumes,
            "migrations": record.migrations,
            "agent": session.agent is not None,
            "guard": session.page is not None,
            "used_bytes": used,
            "limit": record.request.limit,
            "most_bytes": most.of(record.owner, record.request.devices),
            "compute": record.request.compute,
            "waiting": session.use.waiting if record.slices else len(session.guards),
            "keep_until": record.keep_until or None,
            "recall_at": record.recall_at or None,
            "recall_reason": record.recall_reason,
            "overuse_bytes": session.use.overuse,
            "busy_seconds": session.use.busy_seconds if session.page is not None else None,
            "counted_seconds": max(0.0, view.attached_seconds_total - session.use.attached_before),
            "messages": session.messages,
            **standings.of(record.owner),
        }

    def _used(self, session: LiveSession, record: SessionRecord) -> int | None:
        """Return the device bytes that the guard counts now, or None if there is no guard."""
        if session.page is None:
            return None
        if not record.slices:
            return 0
        self._activity.read(session)
        return sum(session.use.counted.values())

    def _slices(self, session: LiveSession, view: SessionView) -> list[dict[str, Any]]:
        """Return the granted bytes and the used bytes of the session on each device.

        The used bytes come from the guard's count, or from the last sample if the session has no
        guard. Call this after :meth:`_used`, because that method reads the guard's count.
        """
        record = view.record
        found: Mapping[str, int] = view.footprints
        if session.page is not None:
            found = session.use.counted
        elif not found and measured(record, session.cuda) == 0:
            found = dict.fromkeys((piece.device for piece in record.slices), 0)
        return [
            {
                "device": piece.device,
                "granted_bytes": piece.bytes,
                "used_bytes": found.get(piece.device),
            }
            for piece in record.slices
        ]


class Standings:
    """Computes the usage and the shares of users and their groups, once for each owner.

    Only the user ``viewer`` gets shares and budgets, because a share shows how much all other users
    have used.
    """

    def __init__(self, pool: Pool, view: PoolView, viewer: str) -> None:
        self._pool = pool
        self._settings = view.settings
        self._now = view.now
        self._usage = pool.usage(view.now)
        self._viewer = viewer
        self._known: dict[Owner, dict[str, Any]] = {}

    def of(self, owner: Owner) -> dict[str, Any]:
        """Return the usage of an owner and, for the viewer, also shares and budgets.

        The fields are ``usage``, ``group_usage`` (None if the owner has no group), ``share``,
        ``budgets`` and ``standing``. ``standing`` has the shares and the budgets as lines for
        people. For all owners but the viewer, the last three fields are empty.
        """
        found = self._known.get(owner)
        if found is None:
            found = self._known[owner] = self._find(owner)
        return found

    def _find(self, owner: Owner) -> dict[str, Any]:
        groups, group = self._settings.groups, None
        if owner.group in groups:
            daily = groups[owner.group].daily
            group = _figures(self._usage.groups.get(owner.group, _NO_USAGE), daily)
        daily = self._settings.quota_of(owner.name).daily
        usage = _figures(self._usage.users.get(owner.name, _NO_USAGE), daily)
        about: dict[str, Any] = {"share": None, "budgets": [], "standing": []}
        if owner.name == self._viewer:
            standing, lines = self._pool.standing(owner, self._now)
            about = {
                "share": shares(standing.shares),
                "budgets": [budget(b) for b in standing.budgets],
                "standing": [*lines],
            }
        return {"usage": usage, "group_usage": group, **about}


_NO_USAGE = Usage()


def _figures(usage: Usage, daily: Daily | None) -> dict[str, Any]:
    """Return the decayed usage, the usage of today and the daily budget, in GPU-seconds.

    The budget is None if the cluster's machines share it, because this machine knows only its own
    usage.
    """
    return {
        "counts": round(usage.dominant, 1),
        "today": round(usage.today, 1),
        "daily": None if daily is None or daily.is_shared else daily.seconds,
        "spent": usage.spent,
    }


class MostMemory:
    """The most memory that sessions may ask for on each device. Each result is computed once."""

    def __init__(self, settings: PoolSettings, devices: Sequence[DeviceView]) -> None:
        self._settings = settings
        self._capacities = sorted((v.capacity for v in devices if v.capacity), reverse=True)
        self._suspends = any(v.device.can_suspend for v in devices)
        self._known: dict[tuple[str, int], int | None] = {}

    def of(self, owner: Owner, devices: int) -> int | None:
        """Return the most bytes per device for ``devices`` devices; None if no size is possible."""
        # All users without a quota of their own have the same quota, so they share one entry.
        key = (owner.name if owner.name in self._settings.quotas else ""), devices
        if key not in self._known:
            self._known[key] = most_memory(
                devices, owner, self._settings, self._capacities, suspends=self._suspends
            )
        return self._known[key]


def _asks(record: SessionRecord) -> dict[str, int]:
    """Return what a session asks for. Other users also see it, because it explains the queue."""
    return {"memory": record.request.memory, "devices": record.request.devices}


def _available() -> int | None:
    try:
        return cgroups.available()
    except OSError:
        return None  # for example, no descriptor is left


def measured(record: SessionRecord, cuda: bool | None) -> int | None:
    """Return the device bytes that a session uses, or None if they were not measured.

    A session without a slice or without CUDA uses 0 bytes (``cuda`` is the last report of its
    agent). For any other session, a footprint of 0 means that there was no sample since the attach.
    """
    if record.footprint or not record.slices or cuda is False:
        return record.footprint
    return None


#: The broker may send the same answer again for this many seconds. After that, the times and the
#: guards' counts in the answer are too old.
LASTS = 0.25

#: The number of viewers whose last answer the broker keeps.
MAX_VIEWERS = 16


@dataclass(frozen=True, slots=True)
class _StatusText:
    version: int
    made_at: float
    #: Whether the answer depends on pages of attached sessions, which change without an event.
    volatile: bool
    #: The encoded answer without its opening brace.
    rest: bytes


class StatusAnswers:
    """Keeps the last encoded answer to ``status`` of each viewer, until the pool changes."""

    def __init__(self, core: Core, snapshots: Snapshots) -> None:
        self._core = core
        self._snapshots = snapshots
        self._answers: dict[tuple[User, int], _StatusText] = {}
        self._now = asyncio.get_running_loop().time

    def line(
        self, peer: Peer, request_id: int, counters: Mapping[str, int], *, frugal: bool
    ) -> bytes:
        """Return the encoded answer to a ``status`` of ``peer``.

        If ``frugal`` is true, an answer from the last LASTS seconds is good enough, even if the
        pool has changed since.
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

    def _still_good(self, answer: _StatusText, now: float, frugal: bool) -> bool:
        if now - answer.made_at > LASTS:
            return False
        return frugal or (answer.version == self._core.version and not answer.volatile)

    def _make(self, peer: Peer, now: float) -> _StatusText:
        version = self._core.version
        snapshot = self._snapshots.status(peer)
        volatile = any(s["slices"] and s.get("guard") for s in snapshot["sessions"])
        text = json.dumps(snapshot, separators=(",", ":"))
        return _StatusText(version, now, volatile, text[1:].encode() + b"\n")
