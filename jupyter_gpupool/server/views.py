# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The part of the broker's snapshot that this server shows, and what changed in it. Pure.

The OpenAPI document says which fields of a session other users see, and which fields change
too often to publish each change: see :mod:`.openapi`.
"""

from __future__ import annotations

from typing import Any, Callable, Collection, Iterable, Mapping

from . import openapi

View = dict[str, Any]

#: The fields of the snapshot that the user interface gets. The other fields are for admins on the
#: machine.
_SHOWN = (
    *("version", "now", "emulated", "machine", "clustered", "problem", "devices", "sessions"),
    *("queue_length", "host", "settings", "limits", "maintenance", "admin"),
)

#: The fields of an admin's order that users see here. The command line shows one field more: what
#: the order waits for.
_OF_ORDERS = ("kind", "device", "reason", "by", "since", "closed")

#: The fields of other users' sessions that the server does not copy as they are. The server makes
#: them itself, and only admins see the label.
_OTHERWISE = frozenset({"owner", "label", "slices", "mine", "here"})

#: A step is this part of a daily budget. The server publishes the budget again after each step that
#: the user spends, and when nothing is left.
_STEP = 0.01

#: The server publishes the machine's free memory again when the free memory has changed by this
#: many bytes or by 5 %, whichever is less.
_MOVED = 1 << 30


def is_mine(local: Collection[str], user: str) -> Callable[[Mapping[str, Any]], bool]:
    """Return a function that tells whether this server may show a session in full.

    A broker shows root and the admins all sessions in full. Even then, a server shows in full only
    the sessions of its own kernels (their ids are in ``local``) and of the operating system user
    ``user`` who runs the server.
    """

    def mine(session: Mapping[str, Any]) -> bool:
        # Only sessions that the broker shows in full have a "label".
        return "label" in session and (
            session.get("kernel_id") in local or session.get("owner") == user
        )

    return mine


def visible(
    status: Mapping[str, Any], mine: Callable[[Mapping[str, Any]], bool], local: Collection[str]
) -> View:
    """Return the broker's ``status`` as this server shows it.

    Each session gets two more fields: ``mine``, whether this server may show it in full, and
    ``here``, whether it is a kernel of this server. The view does not show how others use their
    slices. Only an admin's server shows the owners of other sessions.
    """
    admin = bool(status.get("admin"))
    of_others = [name for name in openapi.fields_of_others() if name not in _OTHERWISE]
    view = {name: status.get(name) for name in _SHOWN}
    view["maintenance"] = [
        {name: order[name] for name in _OF_ORDERS} for order in status.get("maintenance") or ()
    ]
    view["sessions"] = [
        {
            **session,
            # Only queued sessions get this value. If all sessions had it, all of them would change
            # whenever the length of the queue changes.
            "queue_length": (
                session.get("queue_length") if session.get("queue_position") is not None else None
            ),
            "mine": True,
            "here": session.get("kernel_id") in local,
        }
        if mine(session)
        else {
            **{name: session[name] for name in of_others if name in session},
            "slices": [
                {name: piece[name] for name in ("device", "granted_bytes")}
                for piece in session.get("slices", ())
            ],
            "owner": session["owner"] if admin else "other",
            **({"label": session["label"]} if admin and "label" in session else {}),
            "mine": False,
            "here": False,
        }
        for session in status.get("sessions", ())
    ]
    return view


def session_of(view: Mapping[str, Any], kernel_id: str) -> View | None:
    """Return the newest session of a kernel, if this server may show it; else None."""
    found = [s for s in view["sessions"] if s["mine"] and s.get("kernel_id") == kernel_id]
    return found[-1] if found else None


def delta(
    old: Mapping[str, Any], new: Mapping[str, Any], available: int | None = None
) -> View | None:
    """Return the changes from ``old`` to ``new``; None if nothing relevant changed.

    In the result, ``devices`` and ``sessions`` contain the changed entries in full, and ``removed``
    contains the ids of ended sessions. ``available`` is the value of the machine's free memory that
    clients last got. None means that clients last got the value in ``old``.
    """
    changes: View = {
        name: new[name]
        for name in (*_SHOWN, "configuration_notice", "remote_kernels")
        if name not in ("now", "devices", "sessions", "host") and new.get(name) != old.get(name)
    }
    name = "available_bytes"
    before, now = old["host"] or {}, new["host"] or {}
    told = before.get(name) if available is None else available
    if _without(before, {name}) != _without(now, {name}) or _moved(told, now.get(name)):
        changes["host"] = new["host"]
    clocks = openapi.marked("x-grows")
    for part, key in (("devices", "uuid"), ("sessions", "id")):
        before = {entry[key]: entry for entry in old[part]}
        changed = [
            entry
            for entry in new[part]
            if entry[key] not in before
            or _without(entry, clocks) != _without(before[entry[key]], clocks)
            or _steps(entry) != _steps(before[entry[key]])
        ]
        if changed:
            changes[part] = changed
        removed = before.keys() - {entry[key] for entry in new[part]}
        if removed:
            changes.setdefault("removed", []).extend(sorted(removed))
    return {"now": new["now"], **changes} if changes else None


def changes(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> Iterable[tuple[str, View]]:
    """Yield (kind, data) for each event of this server's kernels between two views."""
    # A restarted kernel has a new session, but for its user it is the same kernel.
    before = {s["kernel_id"]: s for s in old["sessions"] if s["here"]} if old else {}
    now = {s["kernel_id"]: s for s in new["sessions"] if s["here"]}
    for kernel_id, session in now.items():
        was = before.pop(kernel_id, None)
        if was is None or _differ(was, session, ("id", "state", "granted_bytes", "devices")):
            yield "lease", _lease(session, was)
        places = ("queue_position", "queue_length", "wait_reason")
        if session.get("queue_position") is not None and (
            was is None or _differ(was, session, places)
        ):
            yield "queue", _queue(session, new["now"])
    for session in before.values():
        ended = {**session, "state": "ended", "granted_bytes": 0, "devices": []}
        yield "lease", _lease({**ended, "suspended_bytes": 0}, session)


def _lease(session: Mapping[str, Any], was: Mapping[str, Any] | None) -> View:
    return {
        "kernel_id": session.get("kernel_id", ""),
        "state": session["state"],
        "previous": was["state"] if was else None,
        "devices": list(session.get("devices", ())),
        "granted_bytes": session["granted_bytes"],
        "suspended_bytes": session.get("suspended_bytes") or 0,
    }


def _queue(session: Mapping[str, Any], now: float) -> View:
    expected = session.get("expected") or {}
    least, most = (
        max(0.0, expected[name] - now) if name in expected else None for name in ("since", "until")
    )
    return {
        "kernel_id": session.get("kernel_id", ""),
        "position": session["queue_position"],
        "length": session.get("queue_length") or session["queue_position"],
        "least_seconds": least,
        "most_seconds": most,
        "reason": session.get("wait_reason", ""),
    }


def seconds_left(session: Mapping[str, Any], now: float) -> float | None:
    """Return the seconds until ``leaves_at``; None if the session has no such time."""
    at = session.get("leaves_at")
    return None if at is None else max(float(at) - now, 0.0)


def _moved(before: int | None, now: int | None) -> bool:
    """Return whether the machine's free memory has changed enough to publish it."""
    if before is None or now is None:
        return before is not now
    return abs(now - before) >= min(_MOVED, before // 20 or 1)


def _differ(one: Mapping[str, Any], other: Mapping[str, Any], names: Iterable[str]) -> bool:
    return any(one.get(name) != other.get(name) for name in names)


def _steps(session: Mapping[str, Any]) -> list[Any]:
    """Return a session's share and budgets, rounded so that each change is worth publishing."""
    return [
        *(
            (part["of"], round(part["used"] * 100), round(part["due"] * 100))
            for part in session.get("share") or ()
        ),
        *(
            (b["group"], b["seconds"], b["spent"], b["left"] // (b["seconds"] * _STEP or 1.0))
            for b in session.get("budgets") or ()
        ),
    ]


def _without(entry: Mapping[str, Any] | None, names: Collection[str]) -> View:
    return {name: value for name, value in (entry or {}).items() if name not in names}
