# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The websocket ``/gpupool/api/events``: sends a snapshot and then the changes, as JSON messages.

The server sends ``{"type": "snapshot", "snapshot": ...}`` first, and again when the broker is back
after a failure. The other messages are ``{"type": "delta", "delta": ...}``, ``{"type": "lease" |
"queue" | "idle", "data": ...}`` and ``{"type": "broker", "available": ...}``. The server ignores
messages from clients.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from jupyter_core.utils import ensure_async
from jupyter_server.auth.decorator import ws_authenticated
from jupyter_server.base.handlers import JupyterHandler
from jupyter_server.base.websocket import WebSocketMixin
from tornado import web, websocket

from .handlers import RESOURCE
from .views import View
from .watch import Watch

#: The server closes the connection when this many messages wait for a client.
MAX_BEHIND = 256


class EventSocket(WebSocketMixin, websocket.WebSocketHandler, JupyterHandler):  # type: ignore[misc]
    """The connection of one client."""

    auth_resource = RESOURCE

    @property
    def watch(self) -> Watch:
        """The extension's view of the pool."""
        found: Watch = self.settings["gpupool_watch"]
        return found

    @ws_authenticated
    async def get(self, *args: Any, **kwargs: Any) -> None:
        """Open the websocket for users who may read; called by tornado."""
        user = self.current_user
        if not await ensure_async(self.authorizer.is_authorized(self, user, "read", RESOURCE)):
            raise web.HTTPError(403)
        await ensure_async(super().get(*args, **kwargs))

    def set_default_headers(self) -> None:
        """Do not set the headers that pages have; called by tornado."""

    def get_compression_options(self) -> dict[str, Any]:
        """Turn on compression: a snapshot consists mostly of field names. Called by tornado."""
        return {}

    def open(self, *args: Any, **kwargs: Any) -> None:
        """Begin to publish to this client; called by tornado."""
        super().open(*args, **kwargs)
        self._behind: asyncio.Queue[View] = asyncio.Queue(MAX_BEHIND)
        self._sender = asyncio.get_running_loop().create_task(self._send())
        self.watch.subscribe(self)

    def on_message(self, message: str | bytes) -> None:
        """Ignore the message; called by tornado."""

    def on_close(self) -> None:
        """Stop publishing; called by tornado, even if the websocket was never opened."""
        self.watch.unsubscribe(self)
        if hasattr(self, "_sender"):
            self._sender.cancel()
        super().on_close()

    def publish(self, message: View) -> None:
        """Queue a message for the client; disconnect a client that does not read its messages."""
        try:
            self._behind.put_nowait(message)
        except asyncio.QueueFull:
            self.watch.unsubscribe(self)
            self.close(1013, "too slow")

    async def _send(self) -> None:
        while True:
            message = await self._behind.get()
            try:
                await self.write_message(json.dumps(message))
            except websocket.WebSocketClosedError:
                return
