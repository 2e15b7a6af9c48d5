# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The extension: routes, event schemas, and the watch over this server's kernels."""

from __future__ import annotations

import asyncio
import os
import pwd
from functools import partial
from pathlib import Path
from typing import Any

from jupyter_server.extension.application import ExtensionApp
from traitlets import Float

from .. import starting, startrecord
from ..config.differences import not_logged, notice
from ..endpoint import find_socket
from . import admin_routes, handlers, openapi, page_config, stream
from .broker_link import BrokerLink
from .remote_kernels import RemoteKernel
from .views import View
from .watch import Watch

SCHEMAS = Path(__file__).with_name("event_schemas")

#: The identifier of an event schema. It looks like an address, but names no page.
SCHEMA_ID = "https://schema.jupyter.org/jupyter_gpupool/{}/v1"

_KERNEL_ACTIONS = "https://events.jupyter.org/jupyter_server/kernel_actions/v1"

_KERNEL = r"/sessions/(?P<kernel_id>[^/]+)"
_ANY_SESSION = r"/admin/sessions/(?P<session>[^/]+)"

#: Each path below ``/gpupool/api`` with its handler. The last handler serves all other paths.
ROUTES: tuple[tuple[str, Any], ...] = (
    ("/pool", handlers.PoolRoute),
    ("/history", handlers.HistoryRoute),
    ("/hour", handlers.HourRoute),
    ("/machines", handlers.MachinesRoute),
    ("/sessions", handlers.SessionsRoute),
    (_KERNEL, handlers.SessionRoute),
    (_KERNEL + "/release", handlers.ReleaseRoute),
    (_KERNEL + "/keep", handlers.KeepRoute),
    (_KERNEL + "/why", handlers.WhyRoute),
    ("/admin", admin_routes.AdminRoute),
    (_ANY_SESSION + "/recall", admin_routes.RecallRoute),
    (_ANY_SESSION + "/priority", admin_routes.PriorityRoute),
    (_ANY_SESSION + "/end", admin_routes.EndRoute),
    (r"/admin/devices/(?P<device>[^/]+)", admin_routes.DeviceRoute),
    ("/openapi.json", handlers.DocumentRoute),
    ("/events", stream.EventSocket),
    ("(?:/.*)?", handlers.NothingRoute),
)


class GPUPoolExtension(ExtensionApp):  # type: ignore[misc]
    """Shows a Jupyter server's users the GPU pool. The installed package enables it."""

    name = "jupyter_gpupool"

    refresh_interval = Float(
        5.0,
        min=0.1,
        help="""Seconds between two looks at the pool while a Pooled GPU kernel is open and nothing
        happens; what happens is seen at once. Example: c.GPUPoolExtension.refresh_interval = 10""",
    ).tag(config=True)
    idle_warning = Float(
        20.0,
        min=0.0,
        help="""The server warns users this many seconds before an idle slice goes back to
        the pool. Example: c.GPUPoolExtension.idle_warning = 60""",
    ).tag(config=True)
    slow_resume = Float(
        2.0,
        min=0.0,
        help="""A resume of at least this many seconds counts as slow. Before an idle slice goes
        back to the pool, the server warns users only if the later resume will be slow, or if no
        speed was measured yet. Example: c.GPUPoolExtension.slow_resume = 0""",
    ).tag(config=True)

    _watch: Watch | None = None
    #: The socket of the broker that the last started kernel uses.
    _socket: Path | None = None
    #: The broker's last known configuration, and the notice about it ("" if none is needed).
    _in_force: Any = None
    _told = ""
    #: The path of the broker's journal, as last known. The second copy of the broker's start record
    #: is in the same folder.
    _journal = ""

    def initialize_settings(self) -> None:
        """Register the event schemas and make the watch; called by the server."""
        openapi.load()
        for path in sorted(SCHEMAS.glob("*/v1.yaml")):
            self.serverapp.event_logger.register_event_schema(path)
        try:
            user = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            user = f"uid-{os.getuid()}"  # this is the broker's name for a user without an account
        config = self.serverapp.config.get("GPUPool", {})
        self._show(page_config.first(config, os.environ, self._find()))
        link = BrokerLink(self._find, self._row, self._stirred, self._lost, self.log)
        self._watch = Watch(
            link,
            self.serverapp.kernel_manager.list_kernel_ids,
            user,
            self._emit,
            lambda view: self._show(page_config.told(view)),
            interval=self.refresh_interval,
            idle_warning=self.idle_warning,
            slow_resume=self.slow_resume,
            log=self.log,
            revive=self._revive,
            notice=self._notice,
            remote=self._remote_kernels,
        )
        self.settings["gpupool_watch"] = self._watch
        watch = self._watch

        async def acted(logger: Any, schema_id: str, data: dict[str, Any]) -> None:  # noqa: ARG001
            await self._kernel_action(watch, data)

        self.serverapp.event_logger.add_listener(schema_id=_KERNEL_ACTIONS, listener=acted)

    def initialize_handlers(self) -> None:
        """Add the routes; called by the server."""
        self.handlers.extend((rf"/gpupool/api{path}", handler) for path, handler in ROUTES)

    async def stop_extension(self) -> None:
        """End the watch; the server calls this when it stops."""
        if self._watch is not None:
            await self._watch.close()

    # ------------------------------------------------------------------ internals

    def _find(self) -> Path:
        """Return the socket of the broker that the last started kernel uses.

        If no kernel was started, return the socket that a first kernel would use.
        """
        if self._socket is not None:
            return self._socket
        config = self.serverapp.config
        named = config.get("GPUPoolProvisioner", {}).get("broker_socket", "")
        return Path(named) if named else find_socket(config.get("GPUPool", {}).get("socket", ""))

    def _notice(self, status: dict[str, Any]) -> str:
        """Return the notice about different configurations; "" if no notice is needed.

        The function also logs each notice once.
        """
        self._journal = str((status.get("broker") or {}).get("journal") or "")
        in_force = status.get("config")
        if in_force != self._in_force:
            self._in_force = in_force
            self._told = notice(self.serverapp.config.get("GPUPool"), status)
            if not_logged(self._told):
                self.log.warning("GPU pool: %s", self._told)
        return self._told

    async def _revive(self) -> None:
        """Restart a broker that has died; called by the watch."""
        path = self._find()
        copy = str(startrecord.copy_path(Path(self._journal))) if self._journal else ""
        if startrecord.can_revive(path) or startrecord.can_restore(path, copy):
            loop = asyncio.get_running_loop()
            if await loop.run_in_executor(None, partial(starting.revive, path, copy=copy)):
                self.log.warning("GPU pool: the broker had died and was started again")

    def _row(self, row: dict[str, Any]) -> None:
        if self._watch is not None:
            self._watch.row(row)

    def _stirred(self) -> None:
        if self._watch is not None:
            self._watch.stirred()

    def _lost(self, error: Any) -> None:
        if self._watch is not None:
            self._watch.lost(error)

    def _show(self, found: View) -> None:
        page_config.show(self.serverapp.web_app.settings, found)

    def _emit(self, kind: str, data: View) -> None:
        self.serverapp.event_logger.emit(schema_id=SCHEMA_ID.format(kind), data=data)

    async def _kernel_action(self, watch: Watch, data: dict[str, Any]) -> None:
        """Tell the watch that a kernel of the pool has started, or that a kernel may have ended."""
        kernel_id = data.get("kernel_id", "")
        if data.get("action") not in ("start", "restart") or data.get("status") != "success":
            watch.kernels_changed()
            return
        manager = self.serverapp.kernel_manager
        if kernel_id not in manager:
            return
        provisioner = manager.get_kernel(kernel_id).provisioner
        if provisioner is None:
            return
        info = await provisioner.get_provisioner_info()
        if info.get("gpupool_session") or info.get("gpupool_node"):
            if info["gpupool_socket"]:
                self._socket = Path(info["gpupool_socket"])
            watch.kernel_started(kernel_id)

    def _remote_kernels(self) -> dict[str, RemoteKernel]:
        """Return this server's kernels for which a provisioner has chosen another machine."""
        manager = self.serverapp.kernel_manager
        found = {}
        for kernel_id in manager.list_kernel_ids():
            provisioner = manager.get_kernel(kernel_id).provisioner
            if getattr(provisioner, "node", ""):
                found[kernel_id] = provisioner
        return found
