# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The snapshot that ``status`` answers with, and what a kernel is told about the machine.

``devices`` and ``host`` are for everybody; of other users' sessions only what explains the use of
the devices and the place in the queue is shown. Sizes are bytes, times seconds; what nobody could
read is null, never 0.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping

from ... import __version__, cgroups
from ...config import BrokerSettings
from ...config.differences import shown
from ...pool.limits import most_memory
from ...pool.model import DeviceView, Owner, PoolView, SessionRecord, SessionView
from ...protocol import VERSION
from ..gpu.actions import DeviceEffects
from ..pages.activity import Activity
from ..runner import Runner
from ..sessions import Session
from ..store.records import request_to_json
from ..transport.auth import Access, Peer, owner_of

if TYPE_CHECKING:
    from ..gpu.maintenance import Maintenance


#: Seconds for which a view serves new kernels: a class of a hundred starts at ten o'clock.
RECENT = 0.5


class Snapshots:
    """Reads the pool for people."""

    def __init__(
        self,
        runner: Runner,
        effects: DeviceEffects,
        access: Access,
        *,
        socket: Path,
        emulated: bool,
        machine: str,
        journal_note: str = "",
    ) -> None:
        self.socket = socket
        self.access = access
        self._runner = runner
        self._effects = effects
        self._emulated = emulated
        self.machine = machine
        self._journal_note = journal_note
        self._recent: PoolView | None = None
        #: What the guard tells; None where nobody runs under it.
        self.activity: Activity | None = None

    # ------------------------------------------------------------------ for kernels

    def recent(self) -> PoolView:
        """Return a view that may be RECENT seconds old: it reads all sessions."""
        view = self._recent
        if (
            view is None
            or view.settings is not self._runner.pool.settings
            or self._runner.now() - view.now > RECENT
        ):
            view = self._recent = self._view()
        return view

    def capacities(self) -> list[int]:
        """Return the bytes that each device can give at most."""
        return [view.capacity for view in self.recent().devices]

    def limits(self, owner: Owner) -> dict[str, Any]:
        """Return what a session of ``owner`` may ask for: ``memory`` per device, ``devices``."""
        return self._limits(owner, self.recent())

    def _limits(self, owner: Owner, view: PoolView) -> dict[str, Any]:
        settings = view.settings
        devices = [len(view.devices), settings.quota_of(owner.name).devices]
        return {
            "memory": Most(view).of(owner, 1),
            "devices": min(d for d in devices if d is not None),
            "max_wait": settings.max_wait,
            "priorities": sorted(settings.priority_classes),
        }

    # ------------------------------------------------------------------ status

    def broker(self, counters: Mapping[str, int]) -> dict[str, Any]:
        """Return the part of the snapshot that is about the broker itself."""
        return {
            "machine_wide": self.access.machine_wide,
            "journal": str(self._runner.journal.path),
            "journal_problem": self._runner.journal.problem,
            "journal_note": self._journal_note,
            "counters": dict(counters),
        }

    def status(self, peer: Peer) -> dict[str, Any]:
        """Return the snapshot as ``peer`` may see it, without :meth:`broker`."""
        view = self._view()
        settings, most = view.settings, Most(view)
        return {
            "version": __version__,
            "socket": str(self.socket),
            "pid": os.getpid(),
            "now": view.now,
            "emulated": self._emulated,
            "machine": self.machine,
            "problem": self.problem,
            "driver_warning": self.driver_warning,
            "limited": self.limited,
            "limits": self._limits(owner_of(peer.uid, peer.gid), view),
            "devices": [self._device(v) for v in view.devices],
            "sessions": [
                self._session(v, view.now, peer, most)
                for v in view.sessions
                if not self._empty(v.record, peer)
            ],
            "maintenance": self.maintenance.status(peer) if self.maintenance else [],
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
                "attach": self.attach,
                "attach_reason": self.attach_reason,
            },
            "config": self.config(peer),
        }

    #: The policy of a session that does not choose, and why it is not the configured one; the
    #: application sets both.
    attach: str = "cell"
    attach_reason: str = ""
    #: What is known to go wrong with the driver; the application sets it.
    driver_warning: str = ""
    #: What an admin has taken out of service; the application sets it.
    maintenance: Maintenance | None = None
    #: Why there is no device; empty if there are some. The application sets it.
    problem: str = ""
    #: What limits the pool to some of the machine's GPUs, in sentences. The application sets it.
    limited: str = ""

    def config(self, peer: Peer) -> dict[str, Any]:
        """Return the configuration in force, for servers with another one."""
        if self.settings is None:
            return {}
        return shown(self.settings, private=self.access.is_admin(peer))

    #: The configuration; the application sets it.
    settings: BrokerSettings | None = None

    def _view(self) -> PoolView:
        return self._runner.pool.view(self._runner.now())

    def _device(self, view: DeviceView) -> dict[str, Any]:
        device = view.device
        sample = self._effects.recent(device.uuid)
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
            # Nobody gets what seems free there.
            "memory_free": None if view.drained_reason else view.free,
            "memory_used": sample.used if sample else None,
            "utilisation": sample.utilisation if sample else None,
            "drained_reason": view.drained_reason,
        }

    def _empty(self, record: SessionRecord, peer: Peer) -> bool:
        """Return whether it is another user's session without a kernel yet: it explains nothing."""
        session = self._runner.sessions.find(record.id)
        return (
            session is not None
            and session.process is None
            and not record.slices
            and not self.access.may_act(peer, session.uid)
        )

    def _session(self, view: SessionView, now: float, peer: Peer, most: Most) -> dict[str, Any]:
        record = view.record
        session = self._runner.sessions.find(record.id)
        devices = [piece.device for piece in record.slices]
        device = devices[0] if devices else None
        if session is None or not self.access.may_act(peer, session.uid):
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
            }
        used = self._used(session, record)
        pinned = record.pinned_reason or session.use.pins
        return {
            "id": record.id,
            "pid": session.process.pid if session.process else None,
            "owner": record.owner.name,
            "label": record.label,
            "kernel_id": session.kernel_id,
            "state": record.state,
            "attach": record.attach,
            "priority": record.request.priority,
            "granted_bytes": record.granted_bytes,
            "footprint_bytes": measured(record, session.cuda),
            "suspended_bytes": record.suspended_bytes,
            "request": request_to_json(record.request),
            "holds": [{"id": h.id, "kind": h.kind, "since": h.since} for h in record.holds],
            "device": device,
            "devices": devices,
            "landing": sorted({*session.landing}),
            "slices": self._slices(session, view),
            "queue_position": view.queue_position,
            "queue_length": view.queue_length,
            "eta_seconds": view.eta_seconds,
            "queued_at": view.queued_at,
            "wait_reason": record.wait_reason,
            "pinned_reason": pinned,
            "stays_reason": "" if pinned else view.stays_reason,
            "host_note": session.host_short or session.host_limit,
            "release_asked": record.release_asked,
            "wait_seconds_total": view.wait_seconds_total,
            "attached_seconds_total": view.attached_seconds_total,
            "opened_at": record.opened_at,
            "idle_since": record.idle_since if record.state == "idle" else None,
            "idle_seconds": max(0.0, now - record.idle_since) if record.state == "idle" else 0.0,
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
            "overuse_bytes": session.use.overuse,
            "busy_seconds": session.use.busy_seconds,
            "messages": session.messages,
        }

    def _used(self, session: Session, record: SessionRecord) -> int | None:
        """Return the device bytes that the guard counts now, None if there is no guard."""
        if session.page is None:
            return None
        if not record.slices:
            return 0
        if self.activity is not None:
            self.activity.read(session)
        return sum(session.use.counted.values())

    def _slices(self, session: Session, view: SessionView) -> list[dict[str, Any]]:
        """Return what it has on each device, and uses there: as the guard counts, or as measured.

        To be called after :meth:`_used`, which reads what the guard counts.
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


class Most:
    """What sessions may ask for on each device at most, by the rules of one view; found once."""

    def __init__(self, view: PoolView) -> None:
        self._settings = view.settings
        self._capacities = sorted((v.capacity for v in view.devices if v.capacity), reverse=True)
        self._suspends = any(v.device.can_suspend for v in view.devices)
        self._known: dict[tuple[str, int], int | None] = {}

    def of(self, owner: Owner, devices: int) -> int | None:
        """Return the bytes on each of so many devices; None if there is no size that is given."""
        # All who are not named have the same quota.
        key = (owner.name if owner.name in self._settings.quotas else ""), devices
        if key not in self._known:
            self._known[key] = most_memory(
                devices, owner, self._settings, self._capacities, suspends=self._suspends
            )
        return self._known[key]


def _available() -> int | None:
    try:
        return cgroups.available()
    except OSError:
        return None  # no descriptor is left, say


def measured(record: SessionRecord, cuda: bool | None) -> int | None:
    """Return the device bytes that a session uses, None if nobody has measured them.

    Without a slice or (``cuda``, as its agent last said) without CUDA, a process uses none; of any
    other, 0 means that no sample was taken since the attach.
    """
    if record.footprint or not record.slices or cuda is False:
        return record.footprint
    return None


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
    """Encoded answers to ``status``, made once for each viewer and change of the pool."""

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
