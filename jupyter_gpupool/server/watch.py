# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Keeps the newest view of the pool while somebody needs it, and publishes its changes.

The view is needed while this server has a Pooled GPU kernel or a client of the websocket. During
that time, each push from the broker leads to one ``status`` request. A slow poll adds requests for
changes that the broker does not push (the waits of other kernels, sizes in use). Differences
between two answers become events. While nobody needs the view, the server sends the broker nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any, Awaitable, Callable, Collection, Mapping, Protocol

from ..deadlines import within
from ..errors import GPUPoolError
from ..protocol import Message
from ..states import MOVING, WAITING
from . import machines, server_metrics, views
from .broker_link import BrokerLink
from .kernel_history import KernelHistory, KernelUsage
from .remote_kernels import RemoteKernel, RemoteKernels
from .views import View

#: Two snapshots are at least this many seconds apart, because snapshots are large: 40 KiB for 50
#: sessions.
LEAST_INTERVAL = 0.05

#: Two snapshots are at most this many seconds apart in four cases. First, a kernel of this server
#: waits or moves: its place changes when other kernels leave the queue. Second, a client listens,
#: and a kernel of this server has a slice: the use of the slice changes. Third, a client listens,
#: and a kernel of this server is on another machine. Fourth, a kernel of this server has just
#: changed: then one more snapshot follows.
LIVELY_INTERVAL = 1.0

#: If the broker does not answer, the server tries again after FIRST_RETRY seconds. Each later pause
#: is twice as long, up to MOST_RETRY seconds.
FIRST_RETRY, MOST_RETRY = 0.25, 5.0

#: At most this many rows of the journal wait for the next snapshot. Only this snapshot shows which
#: of the rows are about kernels of this server.
MAX_ROWS = 10_000


class Subscriber(Protocol):
    """A client of the websocket."""

    def publish(self, message: View) -> None:
        """Send a message to the client. This must not block."""


class Watch:
    """Keeps the view and publishes it, as the module describes.

    Parameters
    ----------
    link:
        The connection to the broker; its callbacks must be :meth:`row`, :meth:`stirred` and
        :meth:`lost`.
    kernels:
        Returns the ids of this server's kernels.
    user:
        The operating system user of this server.
    emit:
        Called with (kind, data) for each event. ``event_schemas`` has the kinds.
    on_view:
        Called with each new view.
    interval:
        Seconds between two snapshots while nothing happens.
    idle_warning:
        Users are warned this many seconds before the pool takes an idle slice.
    slow_resume:
        Users are warned only if the resume will take at least this many seconds, or if its duration
        is unknown.
    revive:
        Restarts a broker that has died, or raises an error that says why it cannot. Does nothing if
        the broker lives.
    notice:
        Returns the notice that the broker has another configuration than this server; "" if no
        notice is needed.
    remote:
        Returns this server's kernels on other machines, by id.
    """

    def __init__(
        self,
        link: BrokerLink,
        kernels: Callable[[], Collection[str]],
        user: str,
        emit: Callable[[str, View], None],
        on_view: Callable[[View], None],
        *,
        interval: float,
        idle_warning: float,
        slow_resume: float,
        log: logging.Logger,
        revive: Callable[[], Awaitable[None]] | None = None,
        notice: Callable[[View], str] = lambda _: "",
        remote: Callable[[], Mapping[str, RemoteKernel]] = dict,
    ) -> None:
        self._link = link
        self._kernels = kernels
        self._user = user
        self._emit = emit
        self._on_view = on_view
        self._interval = interval
        self._idle_warning = idle_warning
        self._slow_resume = slow_resume
        self._log = log
        self._revive = revive
        self._notice = notice
        self._remote = RemoteKernels(remote, self.stirred, log)
        #: Kernels of this server that belong to the pool.
        self._pooled: set[str] = set()
        self._subscribers: set[Subscriber] = set()
        self._unserved: set[Subscriber] = set()
        self._last: View | None = None
        self._away: GPUPoolError | None = None
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._rows: list[Message] = []
        #: The bytes per second of the last suspend and of the last resume. The key is the kind of
        #: the journal's row.
        self._speeds: dict[str, float] = {}
        #: The sessions whose idle slice the pool will soon take. The value is True if the server
        #: has warned the session's user.
        self._warned: dict[str, bool] = {}
        #: The machine's free memory, as it was last published.
        self._available: int | None = None
        self._history = KernelHistory()
        self._usage = KernelUsage(time.time())
        #: When a kernel of this server last changed, on the broker's clock.
        self._stirred = -LIVELY_INTERVAL
        #: The broker's clock minus this server's monotonic clock; None before the first snapshot.
        self._offset: float | None = None

    # ------------------------------------------------------------------ kernels and clients

    @property
    def needed(self) -> bool:
        """Whether somebody needs the view, so that it must be kept up to date."""
        self._pooled &= set(self._kernels())
        return bool(self._subscribers or self._pooled)

    def kernel_started(self, kernel_id: str) -> None:
        """Begin to watch, because this server has a Pooled GPU kernel. Called in the event loop."""
        self._pooled.add(kernel_id)
        self._wake()

    def kernels_changed(self) -> None:
        """Check again whether the view is needed: a kernel of this server may have ended."""
        if self._task is not None:
            self._news.set()

    def subscribe(self, subscriber: Subscriber) -> None:
        """Publish to a client: a snapshot, or why the broker is away, and then each change."""
        self._subscribers.add(subscriber)
        self._unserved.add(subscriber)
        if self._away is not None:
            subscriber.publish(_broker(self._away))
        self._wake()

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Stop publishing to a client. A second call has no effect."""
        self._subscribers.discard(subscriber)
        self._unserved.discard(subscriber)
        self._news.set()

    async def close(self) -> None:
        """End the watch, because the server stops."""
        self._subscribers.clear()
        self._pooled.clear()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._remote.close()
        await self._link.close()

    # ------------------------------------------------------------------ requests to the broker

    async def look(self) -> View:
        """Return the pool as it is now.

        Raises
        ------
        GPUPoolError
            If the broker does not answer.
        """
        try:
            status = await self._link.call("status")
        except GPUPoolError as error:
            self._set_away(error)
            raise
        local = self._kernels()
        view = views.visible(status, views.is_mine(local, self._user), local)
        view["configuration_notice"] = self._notice(status)
        self._remote.ask()
        view["remote_kernels"] = self._remote.where()
        view["sessions"] += self._remote.sessions(view["now"])
        self._take(view)
        here = {str(s["kernel_id"]) for s in view["sessions"] if s["here"]}
        if not here <= self._pooled:
            self._pooled |= here
            self._wake()
        return view

    def past(self, *, devices: bool = False) -> View:
        """Return the last minutes of the kernels from this server's memory; ask no broker.

        With ``devices``, the result also has the figures of the devices. A machine may have many
        devices.
        """
        now = time.time() if self._offset is None else time.monotonic() + self._offset
        shown = self._history.shown(round(now, 3), self._kernels(), devices=devices)
        return {**shown, "usage": self._usage.shown()}

    async def status(self) -> Message:
        """Return the broker's whole status, for an admin."""
        return await self._link.call("status")

    async def hour(self) -> View:
        """Return the last hour of the devices and the queue, with one value for each minute."""
        return _plain(await self._link.call("hour"))

    async def machines(self) -> View:
        """Return the machines of the broker's cluster; an empty list if it is in no cluster."""
        watches = self._task is not None and not self._task.done()
        view = self._last if watches and self._last is not None else await self.look()
        if not view.get("clustered"):
            return machines.alone()
        return machines.shown(await self._link.call("cluster"), self._user)

    async def maintain(self, action: str, device: str, reason: str) -> Message:
        """Take a device out of service or put it back.

        The broker checks whether this user may give the order.
        """
        answer = await self._link.call("maintain", action=action, device=device, reason=reason)
        self._news.set()
        return answer

    async def why(self, session: str) -> View:
        """Return why a session waits, or why it may lose its slice.

        The caller must know the session from :meth:`look`.
        """
        answer = _plain(await self._ask("why", session))
        if answer.get("clustered") and answer["state"] == "queued":
            answer |= _plain(await self._ask("elsewhere", session))
        return answer

    async def act(self, kind: str, session: str, **fields: Any) -> Message:
        """Send the broker a request about a session that :meth:`look` has shown."""
        answer = await self._ask(kind, session, **fields)
        if self._task is not None:
            self._news.set()
        return answer

    async def _ask(self, kind: str, session: str, **fields: Any) -> Message:
        if self._remote.has(session):
            return await self._remote.tell(kind, session, fields)
        return await self._link.call(kind, session=session, **fields)

    # ------------------------------------------------------------------ the link's callbacks

    def row(self, row: Message) -> None:
        """Store a new row of the journal: something has happened in the pool."""
        self._rows.append(row)
        del self._rows[:-MAX_ROWS]
        self._news.set()

    def stirred(self) -> None:
        """Note a change of a session that has no row in the journal, such as the end of a cell."""
        self._news.set()

    def lost(self, error: GPUPoolError) -> None:
        """Note that the connection to the broker is lost."""
        if self._task is not None:
            self._set_away(error)
            self._news.set()

    # ------------------------------------------------------------------ internals

    def _wake(self) -> None:
        self._news.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while self.needed:
            await self._follow()
            self._forget()
            await self._link.close()
            self._log.debug("GPU pool: nobody needs the pool now")

    async def _follow(self) -> None:
        """Keep the view up to date as long as it is needed."""
        retry = FIRST_RETRY
        while self.needed:
            self._news.clear()
            try:
                await self._link.watch()
                view = await self.look()
            except GPUPoolError as error:
                self._set_away(error)
                await self._have_revived()
                self._news.clear()
                pause, retry = retry, min(2 * retry, MOST_RETRY)
            except Exception:
                # A bug in this server must not end the watch.
                self._log.exception("GPU pool: a snapshot could not be taken")
                pause, retry = retry, min(2 * retry, MOST_RETRY)
            else:
                retry = FIRST_RETRY
                pause = self._pause(view)
            await asyncio.sleep(LEAST_INTERVAL)
            with suppress(asyncio.TimeoutError):
                await within(self._news.wait(), max(0.0, pause - LEAST_INTERVAL))

    async def _have_revived(self) -> None:
        """Restart the broker if it has died; publish the error if the restart fails."""
        if self._revive is None:
            return
        try:
            await self._revive()
        except GPUPoolError as error:
            self._set_away(error)

    def _pause(self, last: View) -> float:
        """Return the seconds from the snapshot ``last`` to the next one if nothing happens."""
        pause = self._interval
        if self._subscribers and last["remote_kernels"]:
            # The brokers of other machines push nothing to this server, so poll them.
            pause = min(pause, LIVELY_INTERVAL)
        settles = self._stirred + LIVELY_INTERVAL - last["now"]
        if settles > 0:
            # A kernel has just changed, so this snapshot may already be out of date. The history
            # shows the snapshot's state until the next one, so the next snapshot must follow soon.
            pause = min(pause, settles + LEAST_INTERVAL)
        for session in last["sessions"]:
            if not session["here"]:
                continue
            lively = session["state"] in WAITING | MOVING
            if lively or (self._subscribers and session.get("devices")):
                pause = min(pause, LIVELY_INTERVAL)
            left = views.seconds_left(session, last["now"])
            if left is not None and session["id"] not in self._warned:
                pause = min(pause, max(LEAST_INTERVAL, left - self._idle_warning))
        return pause

    def _forget(self) -> None:
        """Drop the view: nobody needs it now, and no snapshot replaces it."""
        self._last = self._away = None
        for row in self._rows:
            self._usage.row(row)
        self._rows.clear()
        self._history.pause()
        self._warned.clear()
        server_metrics.show([])

    def _take(self, view: View) -> None:
        last = self._last
        if last is not None and view["now"] < last["now"] and self._away is None:
            return  # two requests were under way, and this snapshot is the older of the two
        self._last, came_back = view, self._away is not None
        self._away = None
        server_metrics.UP.set(1)
        server_metrics.show(s for s in view["sessions"] if s["here"])
        self._offset = view["now"] - time.monotonic()
        self._observe(last, view)
        self._history.take(view)
        if self._task is None or self._task.done():
            self._history.pause()  # no watch runs, so there is a gap until the next snapshot
        self._on_view(view)
        if came_back:
            self._unserved |= self._subscribers
            self._publish({"type": "broker", "available": True})
        newcomers = self._subscribers & self._unserved
        for subscriber in newcomers:
            subscriber.publish({"type": "snapshot", "snapshot": view})
        changed = views.delta(last, view, self._available) if last is not None else None
        if last is None or (changed is not None and "host" in changed):
            self._available = (view["host"] or {}).get("available_bytes")
        if changed is not None:
            for subscriber in self._subscribers - self._unserved:
                subscriber.publish({"type": "delta", "delta": changed})
        self._unserved.clear()
        events = list(views.changes(last, view))
        if events:
            self._stirred = view["now"]
        for kind, data in events:
            self._tell(kind, data)
        self._warn(view, newcomers)

    def _observe(self, last: View | None, view: View) -> None:
        """Process the new rows: count usage, update the metrics, and publish admins' orders."""
        here = {s["id"]: s for v in (last, view) if v for s in v["sessions"] if s["here"]}
        rows, self._rows = self._rows, []
        self._usage.take(view, rows)
        for row in rows:
            if row.get("session") in here:
                server_metrics.observe(row)
                if row.get("kind") == "admin":
                    kernel = here[row["session"]]["kernel_id"]
                    data = {"kernel_id": kernel, "message": str(row.get("reason") or "")}
                    self._publish({"type": "notice", "data": data})
            seconds = row.get("seconds")
            if row.get("kind") == "resume":
                seconds = row.get("detail", {}).get("driver_seconds")
            if row.get("kind") in ("suspend", "resume") and seconds and row.get("bytes"):
                self._speeds[str(row["kind"])] = row["bytes"] / seconds

    def _warn(self, view: View, newcomers: Collection[Subscriber]) -> None:
        """Warn users before the pool takes an idle slice, if a resume is slow or its speed unknown.

        The server warns once for each slice. It repeats the warning for the clients in
        ``newcomers``, because they may have missed it.
        """
        soon: dict[str, bool] = {}
        for session in view["sessions"]:
            left = views.seconds_left(session, view["now"]) if session["here"] else None
            if left is None or left > self._idle_warning:
                continue
            size = session.get("footprint_bytes")
            speed = self._speeds.get("resume") or self._speeds.get("suspend")
            takes = size / speed if size is not None and speed else None
            slow = size != 0 and (takes is None or takes >= self._slow_resume)
            told = soon[session["id"]] = self._warned.get(session["id"], slow)
            data = {
                "kernel_id": session.get("kernel_id", ""),
                "seconds_left": round(left, 3),
                "bytes": size,
                "resume_seconds": None if takes is None else round(takes, 3),
            }
            if told and session["id"] not in self._warned:
                self._tell("idle", data)
            elif told:
                for subscriber in newcomers:
                    subscriber.publish({"type": "idle", "data": data})
        self._warned = soon

    def _tell(self, kind: str, data: Mapping[str, Any]) -> None:
        self._publish({"type": kind, "data": dict(data)})
        self._emit(kind, dict(data))

    def _set_away(self, error: GPUPoolError) -> None:
        server_metrics.UP.set(0)
        self._history.pause()
        before, self._away = self._away, error
        if before is None or before.code != error.code:
            self._log.info("GPU pool: the broker is away: %s", error)
            self._publish(_broker(error))

    def _publish(self, message: View) -> None:
        for subscriber in list(self._subscribers):
            subscriber.publish(message)


def _plain(answer: Message) -> View:
    """Return an answer of the broker without the fields that belong only to the protocol."""
    return {name: value for name, value in answer.items() if name not in ("v", "type", "id")}


def _broker(error: GPUPoolError) -> View:
    """Return the message to clients that says why the broker is not available."""
    return {
        "type": "broker",
        "available": False,
        "code": error.code,
        "message": error.message,
        "next_step": error.next_step,
    }
