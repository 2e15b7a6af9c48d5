# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``GET /metrics`` on 127.0.0.1, from the broker's event loop, and nothing else.

Any local user may connect, so one request per connection, no body, a few connections at a time, and
none for longer than a healthy scrape can take. Nothing here waits for a client.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any, Awaitable, Callable, cast

from tornado.http1connection import HTTP1ServerConnection
from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPHeaders, HTTPServerRequest, ResponseStartLine
from tornado.iostream import IOStream
from tornado.netutil import bind_sockets

#: Connections at once. One more closes the oldest: that of a scraper is the youngest.
MOST = 32

#: Seconds from connecting to having the answer.
DEADLINE = 5.0

#: Bytes of a request's head.
MAX_HEAD = 16 << 10

TEXT = "text/plain; charset=utf-8"

#: Returns the page and its content type; asked for OpenMetrics (True) or Prometheus' text format.
Page = Callable[[bool], Awaitable[tuple[bytes, str]]]


class Endpoint:
    """Serves ``page`` at ``port``.

    Raises
    ------
    OSError
        If the port cannot be had.
    """

    def __init__(self, port: int, page: Page, log: logging.Logger) -> None:
        self._page = page
        self._log = log
        self._asked: set[asyncio.Task[None]] = set()
        # What strangers send is not worth a line of the broker's log.
        logging.getLogger("tornado").setLevel(logging.ERROR)
        sockets = bind_sockets(port, "127.0.0.1", family=socket.AF_INET)
        self._server = _Server(
            self._answer,
            no_keep_alive=True,
            max_header_size=MAX_HEAD,
            max_body_size=0,
            idle_connection_timeout=DEADLINE,
        )
        self._server.add_sockets(sockets)

    def close(self) -> None:
        """Listen no more, and close every connection."""
        self._server.stop()
        for task in self._asked:
            task.cancel()
        self._server.drop_all()

    def _answer(self, request: HTTPServerRequest) -> None:
        if request.method == "GET" and request.path == "/metrics":
            task = asyncio.get_running_loop().create_task(self._answer_page(request))
            self._asked.add(task)
            task.add_done_callback(self._asked.discard)
        else:
            _send(request, 404, "Not Found", b"There is only GET /metrics here.\n")

    async def _answer_page(self, request: HTTPServerRequest) -> None:
        try:
            body, kind = await self._page(_wants_openmetrics(request.headers.get("Accept", "")))
        except Exception:
            self._log.exception("The metrics could not be served")
            body = b"The metrics could not be told; the broker's log says why.\n"
            _send(request, 500, "Internal Server Error", body)
        else:
            _send(request, 200, "OK", body, kind)


class _Server(HTTPServer):
    """Ends connections that take too long or are too many."""

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """Set up; see :class:`tornado.util.Configurable`."""
        #: When each open connection is closed, oldest first.
        self._deadlines: dict[IOStream, asyncio.TimerHandle] = {}
        super().initialize(*args, **kwargs)

    def handle_stream(self, stream: IOStream, address: tuple[str, int]) -> None:
        """Serve a new connection."""
        while len(self._deadlines) >= MOST:
            self._drop(next(iter(self._deadlines)))
        loop = asyncio.get_running_loop()
        self._deadlines[stream] = loop.call_later(DEADLINE, self._drop, stream)
        super().handle_stream(stream, address)

    def on_close(self, server_conn: object) -> None:
        """Forget a connection that has ended."""
        timer = self._deadlines.pop(cast(HTTP1ServerConnection, server_conn).stream, None)
        if timer is not None:
            timer.cancel()
        super().on_close(server_conn)

    def _drop(self, stream: IOStream) -> None:
        timer = self._deadlines.pop(stream, None)
        if timer is not None:
            timer.cancel()
        stream.close()

    def drop_all(self) -> None:
        """Close what is open."""
        for stream in [*self._deadlines]:
            self._drop(stream)


def _wants_openmetrics(accept: str) -> bool:
    """Return whether a client that sends ``Accept`` like this reads OpenMetrics."""
    kinds = [part.split(";")[0].strip().lower() for part in accept.split(",")]
    return "application/openmetrics-text" in kinds


def _send(
    request: HTTPServerRequest, status: int, reason: str, body: bytes, kind: str = TEXT
) -> None:
    headers = HTTPHeaders({"Content-Type": kind, "Content-Length": str(len(body))})
    start = ResponseStartLine("HTTP/1.1", status, reason)
    connection = request.connection
    assert connection is not None
    connection.write_headers(start, headers, None if request.method == "HEAD" else body)
    connection.finish()
