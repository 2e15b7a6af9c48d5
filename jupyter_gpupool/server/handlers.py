# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""REST under ``/gpupool/api``; ``openapi.yaml`` describes requests and answers."""

from __future__ import annotations

import json
from http.client import responses
from typing import Any

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from tornado import web

from ..errors import Code, GPUPoolError, RefusedError
from ..units import parse_bytes
from . import openapi, views
from .watch import Watch

#: The server's authorizer sees all routes as this one resource. Its actions are "read" and "write".
RESOURCE = "gpupool"

#: The fields of a session's request that users may change, except ``priority``. True means that the
#: field is a size: a number of bytes, or text such as "12GiB".
_FIELDS = {"memory": True, "limit": True, "devices": False, "compute": False}

#: The key is the status code of an HTTP error that is not an error of the pool. The value is the
#: ``next_step`` of the answer.
_NEXT_STEPS = {
    403: "Log in to this Jupyter server, or give its token.",
    404: "See gpupool/api/openapi.json for all requests.",
    405: "See gpupool/api/openapi.json for all requests.",
}


class BadRequest(GPUPoolError):
    """The HTTP request is malformed."""

    code = Code.BAD_REQUEST


class Route(APIHandler):  # type: ignore[misc]
    """Base class of the routes. Every error is JSON with ``code``, ``message``, ``next_step``."""

    auth_resource = RESOURCE
    #: Requests to these routes do not count as activity, so an idle server can still be culled.
    _track_activity = False

    @property
    def watch(self) -> Watch:
        """The extension's view of the pool."""
        found: Watch = self.settings["gpupool_watch"]
        return found

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Answer with the error as JSON; called by tornado."""
        error = kwargs.get("exc_info", (None, None, None))[1]
        text = responses.get(status_code, "Unknown error")
        answer: dict[str, Any] = {"code": text.lower().replace(" ", "-"), "message": f"{text}."}
        answer["next_step"] = _NEXT_STEPS.get(status_code, "")
        answer["details"] = {}
        if isinstance(error, GPUPoolError):
            status_code = error.code.status
            answer["code"], answer["message"] = error.code, error.message
            answer["next_step"], answer["details"] = error.next_step, error.details
        elif isinstance(error, web.HTTPError) and error.log_message:
            answer["message"] = error.log_message
        elif status_code >= 500:
            answer["next_step"] = "Please report it with the server's log."
        self.set_status(status_code)
        if status_code == 405:
            methods = [m for m in self.SUPPORTED_METHODS if m.lower() in type(self).__dict__]
            self.set_header("Allow", ", ".join([*methods, "OPTIONS"]))
        self.finish(json.dumps(answer))

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        """Log faults. Refusals are not logged, because a refusal is an ordinary answer.

        Called by tornado.
        """
        if not isinstance(value, GPUPoolError):
            super().log_exception(typ, value, tb)

    def body(self) -> dict[str, Any]:
        """Return the JSON object in the body of the request."""
        try:
            found = json.loads(self.request.body)
        except (ValueError, RecursionError):
            raise BadRequest("The body of the request is not JSON.") from None
        if not isinstance(found, dict):
            raise BadRequest("The body of the request must be a JSON object.")
        return found

    async def session(self, kernel_id: str) -> tuple[views.View, views.View]:
        """Return the pool's snapshot, and the session of a kernel in this snapshot.

        Raises
        ------
        RefusedError
            With code ``unknown-session``, if the kernel has no session that this server may show.
        """
        view = await self.watch.look()
        found = views.session_of(view, kernel_id)
        if found is None:
            raise RefusedError(
                f"The kernel {kernel_id[:80]!r} has no session of yours in the GPU pool.",
                code=Code.UNKNOWN_SESSION,
                next_step="Choose the kernel Pooled GPU, or restart this kernel.",
            )
        return view, found


class PoolRoute(Route):
    """``GET``: the pool as it is now."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        self.finish(json.dumps(await self.watch.look()))


class HistoryRoute(Route):
    """``GET``: the figures of the last minutes."""

    @web.authenticated
    @authorized
    def get(self) -> None:
        self.finish(json.dumps(self.watch.past(devices=self._flag("devices"))))

    def _flag(self, name: str) -> bool:
        """Return whether a parameter of the query is 1. Its default is 0."""
        values = self.get_query_arguments(name, strip=False) or ["0"]
        if values not in (["0"], ["1"]):
            raise BadRequest(f"{name} must be 0 or 1.", next_step=f"Ask with ?{name}=1.")
        return values == ["1"]


class HourRoute(Route):
    """``GET``: the last hour of the devices and the queue."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        self.finish(json.dumps(await self.watch.hour()))


class MachinesRoute(Route):
    """``GET``: the machines of the cluster; an empty list if this machine is in no cluster."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        self.finish(json.dumps(await self.watch.machines()))


class SessionsRoute(Route):
    """``GET``: all sessions; sessions of other users are anonymous."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        view = await self.watch.look()
        self.finish(json.dumps({"now": view["now"], "sessions": view["sessions"]}))


class SessionRoute(Route):
    """``GET``: one kernel's session. ``PATCH``: change its request."""

    @web.authenticated
    @authorized
    async def get(self, kernel_id: str) -> None:
        _, session = await self.session(kernel_id)
        self.finish(json.dumps(session))

    @web.authenticated
    @authorized
    async def patch(self, kernel_id: str) -> None:
        wanted = read_changes(self.body())
        _, session = await self.session(kernel_id)
        answer = await self.watch.act("request", session["id"], **wanted)
        self.finish(json.dumps({"request": answer["request"], "note": answer["note"]}))


class ReleaseRoute(Route):
    """``POST``: release the slice now."""

    @web.authenticated
    @authorized
    async def post(self, kernel_id: str) -> None:
        _, session = await self.session(kernel_id)
        answer = await self.watch.act("release", session["id"])
        self.finish(json.dumps({"note": answer["note"]}))


class KeepRoute(Route):
    """``POST``: keep the slice for some time, even if it is idle."""

    @web.authenticated
    @authorized
    async def post(self, kernel_id: str) -> None:
        seconds = read_seconds(self.body())
        _, session = await self.session(kernel_id)
        answer = await self.watch.act("keep", session["id"], seconds=seconds)
        self.finish(json.dumps({"note": answer["note"]}))


class WhyRoute(Route):
    """``GET``: why the kernel waits, or why it may lose its slice."""

    @web.authenticated
    @authorized
    async def get(self, kernel_id: str) -> None:
        _, session = await self.session(kernel_id)
        self.finish(json.dumps(await self.watch.why(session["id"])))


class DocumentRoute(Route):
    """``GET``: the OpenAPI description of this interface."""

    @web.authenticated
    @authorized
    def get(self) -> None:
        self.finish(json.dumps(openapi.document(self.base_url)))


class NothingRoute(Route):
    """All other paths below ``/gpupool/api``: the answer is "not found" as JSON."""

    @web.authenticated
    def prepare_nothing(self) -> None:
        raise web.HTTPError(404)

    get = post = put = patch = delete = head = prepare_nothing


def read_changes(body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a session's request that ``body`` changes; sizes are in bytes."""
    unknown = body.keys() - {*_FIELDS, "priority"}
    if unknown:
        raise BadRequest(
            f"There is no field {min(unknown)[:40]!r}.",
            next_step=f"The fields are {', '.join(_FIELDS)} and priority.",
        )
    if not body:
        raise BadRequest(
            "The request is empty.", next_step=f"Send {', '.join(_FIELDS)} or priority."
        )
    wanted: dict[str, Any] = {}
    for name, is_size in _FIELDS.items():
        if name in body:
            wanted[name] = _number(name, body[name], is_size)
    if "priority" in body:
        if not isinstance(body["priority"], str):
            raise BadRequest("priority must be the name of a priority class.")
        wanted["priority"] = body["priority"]
    return wanted


def _number(name: str, value: Any, is_size: bool) -> int:
    if is_size and isinstance(value, str):
        try:
            return parse_bytes(value)
        except ValueError as error:
            raise BadRequest(f"{name}: {error}") from None
    # JSON has only one type of number, so a whole number may arrive as a float.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not 0 < value < 1 << 60:
        what = "a number of bytes or text like '12GiB'" if is_size else "a whole number above zero"
        raise BadRequest(f"{name} must be {what}, not {str(value)[:40]!r}.")
    return value


def read_seconds(body: dict[str, Any]) -> int | float:
    """Return for how many seconds to keep a slice. The broker checks the range."""
    unknown = body.keys() - {"seconds"}
    seconds = body.get("seconds")
    if unknown or isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise BadRequest("seconds must be a number.", next_step='Send {"seconds": 600}.')
    return seconds
