# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Pool records to JSON and back, for the journal."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from operator import attrgetter
from typing import Any, Mapping, Sequence

from ...pool.model import Device, Hold, Owner, Request, SessionRecord, Slice
from ...procfs import ProcessId
from ..sessions import LiveSession

_FIELDS = tuple(f.name for f in fields(SessionRecord))
_VALUES = attrgetter(*_FIELDS)
#: Fields whose default is empty.
_EMPTY = {f.name for f in fields(SessionRecord) if not f.default}
_REQUEST_FIELDS = tuple(f.name for f in fields(Request))


def to_json(record: SessionRecord) -> dict[str, Any]:
    """Return ``record`` as JSON values, without ``asdict``, which takes ten times as long.

    The result leaves out empty values of fields that are empty by default, so that most records
    stay below a kilobyte. SQLite spreads a longer row over several pages, and each commit of the
    row writes all these pages.
    """
    values = zip(_FIELDS, _VALUES(record), strict=True)
    data = {name: value for name, value in values if value or name not in _EMPTY}
    data["owner"] = {"name": record.owner.name, "group": record.owner.group}
    data["request"] = request_to_json(record.request)
    if record.holds:
        data["holds"] = [{"id": h.id, "kind": h.kind, "since": h.since} for h in record.holds]
    if record.slices:
        data["slices"] = slices_to_json(record.slices)
    if record.suspended:
        data["suspended"] = slices_to_json(record.suspended)
    return data


def from_json(data: Mapping[str, Any]) -> SessionRecord:
    """Return the record that :func:`to_json` made.

    A journal may be of an older or newer version. So this function ignores unknown fields, and
    gives missing fields their default.

    Raises
    ------
    (KeyError, TypeError, ValueError)
        If this is not a record.
    """
    known = {f.name for f in fields(SessionRecord)}
    values = {name: value for name, value in data.items() if name in known}
    values["owner"] = Owner(values["owner"]["name"], values["owner"].get("group", ""))
    values["request"] = Request(**values["request"])
    values["holds"] = tuple(Hold(**hold) for hold in values.get("holds", ()))
    for name in ("slices", "suspended"):
        values[name] = tuple(Slice(**s) for s in values.get(name, ()))
    for name in ("bound", "last_devices"):
        values[name] = tuple(values.get(name, ()))
    return SessionRecord(**values)


def journaled(session: LiveSession, record: SessionRecord) -> dict[str, Any]:
    """Return the data of a session that a restart needs."""
    return {
        "record": to_json(record),
        "uid": session.uid,
        "token_digest": session.token_digest,
        "kernel_id": session.kernel_id,
        "pid": session.process.pid if session.process else None,
        "start_time": session.process.start_time if session.process else None,
        "moving": dict(session.moving),
        "frozen": [[process.pid, process.start_time] for process in session.frozen],
        "queued_at": session.queued_at,
        **({"model": session.model} if session.model else {}),
        **({"data": [*session.data]} if session.data else {}),
    }


def read_session(record: SessionRecord, entry: Mapping[str, Any]) -> LiveSession:
    """Return the session in ``entry``, which :func:`journaled` made; ``record`` is its record."""
    session = LiveSession(
        id=record.id,
        owner=record.owner,
        uid=entry["uid"] if isinstance(entry["uid"], str) else int(entry["uid"]),
        token_digest=str(entry["token_digest"]),
        kernel_id=str(entry["kernel_id"]),
        moving={str(k): int(v) for k, v in entry.get("moving", {}).items()},
    )
    session.frozen = frozen_in(entry)
    session.model = str(entry.get("model", ""))
    session.data = tuple(map(str, entry.get("data", ())))
    if entry["pid"] is not None:
        session.process = ProcessId(int(entry["pid"]), int(entry["start_time"]))
    if record.bound:
        session.cuda = True
    return session


def frozen_in(entry: Mapping[str, Any]) -> tuple[ProcessId, ...]:
    """Return a session's suspended processes from the journal; () if none can be read."""
    try:
        return tuple(ProcessId(int(pid), int(start)) for pid, start in entry.get("frozen", ()))
    except (TypeError, ValueError):
        return ()


def slices_to_json(slices: tuple[Slice, ...]) -> list[dict[str, Any]]:
    """Return slices as the protocol shows them."""
    return [{"device": s.device, "bytes": s.bytes} for s in slices]


def request_to_json(request: Request) -> dict[str, Any]:
    """Return a request as the protocol shows it."""
    return {name: getattr(request, name) for name in _REQUEST_FIELDS}


def devices_to_text(devices: Sequence[Device]) -> str:
    """Return devices with the verdicts of their self-tests, for the journal."""
    return json.dumps([asdict(device) for device in devices])


def devices_from_text(text: str) -> dict[str, Device]:
    """Return the devices in a text of :func:`devices_to_text`, by UUID; {} if unreadable."""
    known = {f.name for f in fields(Device)}
    try:
        rows = [{n: v for n, v in row.items() if n in known} for row in json.loads(text or "[]")]
        return {row["uuid"]: Device(**row) for row in rows}
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}
