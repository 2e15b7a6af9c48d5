# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""REST for admins of the pool, below ``/gpupool/api/admin``: all sessions, and orders about them.

The broker decides whether this server's user is an admin. This module only checks the body of a
request and passes the order on.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Mapping

from jupyter_server.auth.decorator import authorized
from tornado import web

from ..errors import Code, RefusedError
from .handlers import BadRequest, Route

#: A reason has at most MAX_REASON characters. An order takes a slice back after at most MAX_MINUTES
#: minutes. The broker has the same limits.
MAX_REASON, MAX_MINUTES = 200, 7 * 24 * 60

#: A session's id has at most MAX_ID characters. A device's UUID matches _UUID.
MAX_ID = 40
_UUID = re.compile(r"[A-Za-z0-9/-]{8,100}")

#: The fields of a session in the table.
_SHOWN = (
    *("id", "owner", "group", "label", "kernel_id", "state", "priority", "devices"),
    *("granted_bytes", "used_bytes", "footprint_bytes", "suspended_bytes", "request"),
    *("busy_seconds", "counted_seconds", "idle_since", "keep_until", "recall_at", "queued_at"),
    *("queue_position", "expected", "wait_reason", "wait_seconds_total", "pinned_reason"),
    "opened_at",
)


def table(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an admin sees of a broker's status.

    Raises
    ------
    RefusedError
        With code ``not-allowed``, if the broker does not show all sessions to this server.
    """
    if not status.get("admin"):
        raise RefusedError(
            "This Jupyter server runs as a user who is not an admin of the GPU pool.",
            code=Code.NOT_ALLOWED,
            next_step="Ask root, or one of c.GPUPool.admins.",
        )
    return {
        "now": status["now"],
        "devices": status["devices"],
        "priorities": status["limits"]["priorities"],
        "maintenance": [
            {name: order[name] for name in ("kind", "device", "reason", "by", "closed", "text")}
            for order in status.get("maintenance") or ()
        ],
        "sessions": [
            {name: session[name] for name in _SHOWN}
            for session in status["sessions"]
            if "label" in session
        ],
    }


class AdminRoute(Route):
    """``GET``: every session with its owner."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        self.finish(json.dumps(table(await self.watch.status())))


class OrderRoute(Route):
    """Base class of the routes for an admin's orders about one session."""

    async def order(self, kind: str, session: str, body: dict[str, Any], **fields: Any) -> None:
        """Send the broker an order; answer the client with the broker's note."""
        reason = read_reason(body)
        if not session.isalnum() or len(session) > MAX_ID:
            raise RefusedError(
                f"There is no session {session[:MAX_ID]!r} in this pool.", code=Code.UNKNOWN_SESSION
            )
        answer = await self.watch.act(kind, session, reason=reason, **fields)
        self.finish(json.dumps({"note": answer["note"]}))


class RecallRoute(OrderRoute):
    """``POST``: take the slice back after some minutes, or cancel such an order."""

    @web.authenticated
    @authorized
    async def post(self, session: str) -> None:
        body = self.body()
        check_fields(body, "minutes", "cancel")
        if body.get("cancel") is True and "minutes" not in body:
            await self.order("recall", session, body, cancel=True)
            return
        if "cancel" in body:
            raise BadRequest("Send either minutes, or cancel: true.")
        await self.order("recall", session, body, minutes=read_minutes(body.get("minutes")))


class PriorityRoute(OrderRoute):
    """``POST``: give the session another priority class."""

    @web.authenticated
    @authorized
    async def post(self, session: str) -> None:
        body = self.body()
        check_fields(body, "priority")
        name = body.get("priority")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_REASON:
            raise BadRequest("priority must be the name of a priority class.")
        await self.order("prioritise", session, body, priority=name)


class EndRoute(OrderRoute):
    """``POST``: end the session and its processes."""

    @web.authenticated
    @authorized
    async def post(self, session: str) -> None:
        body = self.body()
        check_fields(body)
        await self.order("end", session, body)


class DeviceRoute(Route):
    """``POST``: take a GPU out of service, or put it back."""

    @web.authenticated
    @authorized
    async def post(self, device: str) -> None:
        body = self.body()
        check_fields(body, "action")
        action, reason = body.get("action"), read_reason(body)
        if action not in ("drain", "pause", "resume"):
            raise BadRequest("action must be drain, pause or resume.")
        if not _UUID.fullmatch(device):
            raise BadRequest(f"{device[:60]!r} is not the UUID of a GPU.")
        answer = await self.watch.maintain(action, device, reason)
        self.finish(json.dumps({"note": answer["note"]}))


def check_fields(body: Mapping[str, Any], *names: str) -> None:
    """Refuse a body that has other fields than ``names`` and ``reason``."""
    unknown = body.keys() - {*names, "reason"}
    if unknown:
        known = ", ".join([*names, "reason"])
        raise BadRequest(f"There is no field {min(unknown)[:40]!r}.", next_step=f"Send {known}.")


def read_reason(body: Mapping[str, Any]) -> str:
    """Return the reason that the owners of sessions will see; "" if the body has none."""
    reason = body.get("reason", "")
    if not isinstance(reason, str) or len(reason) > MAX_REASON:
        raise BadRequest(f"reason must be text of at most {MAX_REASON} characters.")
    return reason


def read_minutes(value: Any) -> float:
    """Return the minutes after which a slice is taken back.

    Only a number above 0 takes a slice back. An empty field, text, null and 0 are refused.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not 0 < value <= MAX_MINUTES:
        raise BadRequest(
            "minutes must be a number above 0.",
            next_step=f'Send {{"minutes": 5}}; at most {MAX_MINUTES} (7 days).',
        )
    return float(value)
