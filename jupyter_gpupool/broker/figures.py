# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The figures of the whole pool that the broker serves at ``/metrics`` for Prometheus.

A gauge shows the pool's state at the time of the request. Counters and histograms count the rows
that the broker writes to the journal; they begin when metrics are switched on. If the broker could
not read a figure, or has not read it for a while, the answer does not contain the figure. The
answer never contains 0 instead.

Every user of the machine may read the figures. So the figures name devices and priority classes,
but no person, kernel or session. The server extension (``server/server_metrics.py``) counts the
kernels of one server. Its metrics have other names, so that nobody adds them to the broker's
metrics by mistake.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any, Awaitable, Callable, Iterator, cast

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from tornado.http1connection import HTTP1ServerConnection
from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPHeaders, HTTPServerRequest, ResponseStartLine
from tornado.iostream import IOStream
from tornado.netutil import bind_sockets

from .. import __version__, cgroups
from ..devices import DeviceSample
from ..durations import Durations
from ..pool.model import DeviceView
from ..pool.session_view import PoolView
from ..states import LIVING
from .core import Core
from .gpu.samples import Samples
from .store.journal import Row

PREFIX = "jupyter_gpupool_"

LAGS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)

#: Why a session left its slice. ``waiting``: the pool took the slice of an idle kernel for a
#: waiting kernel, or for another reason, for example an admin's order. ``preempted``: the pool took
#: the slice of a kernel in use.
CAUSES = ("idle", "release", "waiting", "preempted")

#: The broker serves the same page for this many seconds, because any local user may ask as often as
#: they like.
FRESH = 0.5

OPENMETRICS = "application/openmetrics-text"

#: Seconds between two measurements of the event loop's delay.
BEAT = 1.0

#: By default, the library adds a second series to each series: the time at which the series began.
#: Nobody needs these times, so the broker leaves out the second series.
_leave_out_created: Callable[[], None] = disable_created_metrics


class Figures:
    """The metrics, in a registry of their own.

    ``node`` is the name of this machine in its cluster, or "".
    """

    def __init__(
        self, core: Core, samples: Samples, log: logging.Logger, *, node: str = ""
    ) -> None:
        _leave_out_created()
        self.registry = CollectorRegistry()
        self._core = core
        self._log = log
        self._pages: dict[bool, tuple[bytes, str]] = {}
        self._turn = asyncio.Lock()
        self._paged_at = float("-inf")
        self._beat: asyncio.TimerHandle | None = None
        #: For each session that is leaving its devices: why it leaves them.
        self._causes: dict[str, str] = {}
        self.durations = Durations(f"{PREFIX}device_", self.registry)
        self.suspends = self._counter(
            "device_suspends", "Kernels moved from a device to host memory", "device", "cause"
        )
        self.resumes = self._counter("device_resumes", "Kernels brought back to a device", "device")
        self.migrations = self._counter(
            "device_migrations", "Kernels brought back to this device from another one", "device"
        )
        self.preemptions = self._counter("pool_preemptions", "Slices that the pool decided to take")
        self.refusals = self._counter(
            "pool_refusals", "Refused requests, attaches and suspends", "what", "code"
        )
        self.lag = Histogram(
            f"{PREFIX}broker_loop_lag_seconds",
            "Delay of the broker's event loop, measured every second",
            buckets=LAGS,
            registry=self.registry,
        )
        self.attached = Attached(core)
        self.gauges = Gauges(core, samples, node)
        self._accounts = _Accounts()
        self.registry.register(self._accounts)
        ProcessCollector(namespace=f"{PREFIX}broker", registry=self.registry)
        # Make each series begin with 0. In a series without this first value, Prometheus does not
        # count the first event in a rate.
        for view in core.pool.device_views():
            uuid = view.device.uuid
            for family in (*self.durations.all, self.resumes, self.migrations):
                family.labels(uuid)
            for cause in CAUSES:
                self.suspends.labels(uuid, cause)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}{name}", what, labels, registry=self.registry)

    # ------------------------------------------------------------------ what happens

    def observe(self, row: Row) -> None:
        """Count a row of the journal."""
        self.attached.observe(row)
        device = row.device or ""
        self.durations.observe(row.kind, device, row.seconds, row.detail)
        match row.kind:
            case "resume":
                self.resumes.labels(device).inc()
            case "migrate":
                self.migrations.labels(device).inc()
            case "preempt":
                self._causes[row.session] = "preempted"
            case "suspend":
                self.suspends.labels(device, self._causes.get(row.session, "unknown")).inc()
            case "state" if row.detail.get("new") == "detaching":
                cause = row.reason if row.reason in CAUSES else "waiting"
                self._causes[row.session] = cause
                if cause == "waiting":
                    self.preemptions.inc()
            case "refuse":
                code = row.detail.get("code") or row.detail.get("kind") or ""
                self.refusals.labels(row.detail.get("what", ""), code).inc()
            case "close":
                self._causes.pop(row.session, None)

    def _observe_safely(self, row: Row) -> None:
        try:
            self.observe(row)
        except Exception:  # no kernel may lose its slice because a figure is wrong
            self._log.exception("A row of the journal was not counted in the metrics")

    def start(self) -> None:
        """Begin to count rows and to measure the event loop's delay."""
        self._core.read_rows(self._observe_safely)
        loop = asyncio.get_running_loop()
        due = loop.time() + BEAT

        def beat() -> None:
            nonlocal due
            self.lag.observe(max(0.0, loop.time() - due))
            due = loop.time() + BEAT
            self._beat = loop.call_at(due, beat)

        self._beat = loop.call_at(due, beat)

    def stop(self) -> None:
        """Stop counting rows and measuring the delay."""
        self._core.stop_reading(self._observe_safely)
        if self._beat is not None:
            self._beat.cancel()

    # ------------------------------------------------------------------ what is shown

    def read(self) -> None:
        """Copy the pool's present accounts into the registry."""
        self._accounts.show([*self.gauges.families(), self.attached.family()])

    async def page(self, new_format: bool) -> tuple[bytes, str]:
        """Return the text with the figures, and its content type.

        The figures are at most ``FRESH`` seconds old. If ``new_format`` is true, the format is
        OpenMetrics. Otherwise it is the text format of Prometheus. The event loop reads the
        figures. A thread makes the text, because this work takes ten times as long.
        """
        async with self._turn:
            now = asyncio.get_running_loop().time()
            if now - self._paged_at > FRESH:
                self._pages.clear()
                self._paged_at = now
            if new_format not in self._pages:
                self.read()
                # The cache has only two keys, one for each format. A client's Accept header must
                # not be a key, because clients could then fill the cache.
                encode, kind = choose_encoder(OPENMETRICS if new_format else "")
                self._pages[new_format] = await asyncio.to_thread(encode, self.registry), kind
            return self._pages[new_format]


class _Accounts(Collector):
    """The pool's accounts at the time of the last reading."""

    def __init__(self) -> None:
        self._families: list[Metric] = []

    def show(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


class Attached:
    """Counts, for each device, the seconds for which kernels had slices.

    A row of the journal names only one device. So when the broker writes a row about a transition,
    this class reads the session's devices from the pool's record.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._done: dict[str, float] = {}
        #: For each session with slices: the time at which it got them, and their devices.
        self._open: dict[str, tuple[float, tuple[str, ...]]] = {}
        now = core.now()
        for view in core.pool.device_views():
            self._done[view.device.uuid] = 0.0
        for session in core.busy:
            self._look(session, now)

    def observe(self, row: Row) -> None:
        """Note a transition of a session."""
        if row.kind in ("state", "close"):
            self._look(row.session, row.time)

    def _look(self, session: str, now: float) -> None:
        record = self._core.record(session)
        devices = tuple(piece.device for piece in record.slices) if record else ()
        since, before = self._open.get(session, (now, ()))
        if devices == before:
            return
        for device in before:
            self._done[device] = self._done.get(device, 0.0) + now - since
        if devices:
            self._open[session] = now, devices
        else:
            self._open.pop(session, None)

    def family(self) -> Metric:
        """Return, for each device, the seconds counted until now."""
        family = CounterMetricFamily(
            f"{PREFIX}device_attached_seconds",
            "Seconds for which kernels had a slice of the device, summed over kernels",
            labels=["device"],
        )
        seconds, now = dict(self._done), self._core.now()
        for since, devices in self._open.values():
            for device in devices:
                seconds[device] = seconds.get(device, 0.0) + now - since
        for device, value in seconds.items():
            family.add_metric([device], value)
        return family


class Gauges:
    """The gauges of the pool as it is now."""

    def __init__(self, core: Core, samples: Samples, node: str) -> None:
        self._core = core
        self._samples = samples
        self._labels = {"version": __version__, **({"node": node} if node else {})}

    def families(self) -> Iterator[Metric]:
        """Yield every gauge that has a value."""
        view = self._core.pool.view(self._core.now())
        yield _info("broker", "The broker", self._labels)
        yield from self._devices(view)
        yield from _sessions(view)
        yield _gauge("pool_suspended_bytes", "Device state in host memory", view.host_used)
        yield _gauge(
            "pool_host_budget_bytes", "Host memory that device state may take", view.host_budget
        )
        try:
            available = cgroups.available()
        except OSError:
            return
        yield _gauge("pool_host_available_bytes", "Host memory free for suspends", available)

    def _devices(self, view: PoolView) -> Iterator[Metric]:
        families = {name: _gauge(f"device_{name}", what, None, "device") for name, what in _DEVICE}
        infos = InfoMetricFamily(f"{PREFIX}device", "A GPU of the pool", labels=["device"])
        for one in view.devices:
            device = one.device
            infos.add_metric(
                [device.uuid],
                {
                    "index": str(device.index),
                    "name": device.name,
                    "tier": device.tier,
                    "emulated": str(device.emulated).lower(),
                },
            )
            for name, value in _figures(one, self._samples.recent(device.uuid)).items():
                if value is not None:
                    families[name].add_metric([device.uuid], value)
        yield infos
        yield from (family for family in families.values() if family.samples)


_DEVICE = (
    ("up", "1 if the pool can give slices of the device, 0 if it is out of service"),
    ("memory_bytes", "Memory of the device"),
    ("capacity_bytes", "Memory that the pool can grant at most"),
    ("granted_bytes", "Memory granted to kernels"),
    ("free_bytes", "Memory that can be granted without taking a kernel's slice"),
    ("used_bytes", "Memory in use by all processes, as the driver reports"),
    ("foreign_bytes", "Memory in use that no slice covers"),
    ("utilisation_ratio", "Share of the last sample period in which the device computed, 0 to 1"),
)


def _figures(view: DeviceView, sample: DeviceSample | None) -> dict[str, float | None]:
    """Return the figures of a device. A figure without a recent reading is None."""
    percent = sample.utilisation if sample else None
    return {
        "up": 0 if view.drained_reason else 1,
        "memory_bytes": view.device.memory_total,
        "capacity_bytes": view.capacity,
        "granted_bytes": view.granted,
        "free_bytes": 0 if view.drained_reason else view.free,
        "used_bytes": sample.used if sample else None,
        "foreign_bytes": view.foreign if sample else None,
        "utilisation_ratio": None if percent is None else percent / 100,
    }


def _sessions(view: PoolView) -> Iterator[Metric]:
    counts = {(s, p): 0 for s in LIVING for p in view.settings.priority_classes}
    oldest, waiting = 0.0, 0
    for session in view.sessions:
        record = session.record
        key = record.state, record.request.priority
        counts[key] = counts.get(key, 0) + 1
        if record.state == "queued":
            waiting += 1
            oldest = max(oldest, view.now - record.queued_at)
    family = _gauge("pool_sessions", "Kernels of the pool", None, "state", "priority")
    for labels, count in counts.items():
        family.add_metric(labels, count)
    yield family
    yield _gauge("pool_queue_length", "Kernels that wait for a slice", waiting)
    yield _gauge("pool_oldest_wait_seconds", "Age of the oldest wait", oldest)


def _gauge(name: str, what: str, value: float | None, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}{name}", what, value=value, labels=labels or None)


def _info(name: str, what: str, values: dict[str, str]) -> InfoMetricFamily:
    return InfoMetricFamily(f"{PREFIX}{name}", what, value=values)


#: The most connections at the same time. For one more connection, the server closes the oldest one,
#: because the new one may come from Prometheus.
MOST = 32

#: Seconds within which a connection must have its answer.
DEADLINE = 5.0

#: The most bytes in the head of a request.
MAX_HEAD = 16 << 10

TEXT = "text/plain; charset=utf-8"

#: Makes the page with the metrics: in OpenMetrics for True, in Prometheus' text format for False.
#: Returns the page and its content type.
MetricsPage = Callable[[bool], Awaitable[tuple[bytes, str]]]


class Endpoint:
    """Serves only ``page``, at ``port`` of 127.0.0.1, from the broker's event loop.

    Any local user may connect, so the server limits what a client can do. A connection may send
    only one request, without a body. At most ``MOST`` connections are open at the same time. The
    server closes each connection after ``DEADLINE`` seconds; a healthy scrape is faster. The event
    loop never waits for a client.

    Raises
    ------
    OSError
        If the port cannot be opened.
    """

    def __init__(self, port: int, page: MetricsPage, log: logging.Logger) -> None:
        self._page = page
        self._log = log
        self._asked: set[asyncio.Task[None]] = set()
        # Any local process can send malformed requests. These must not fill the broker's log.
        logging.getLogger("tornado").setLevel(logging.ERROR)
        sockets = bind_sockets(port, "127.0.0.1", family=socket.AF_INET)
        self._server = _MetricsServer(
            self._answer,
            no_keep_alive=True,
            max_header_size=MAX_HEAD,
            max_body_size=0,
            idle_connection_timeout=DEADLINE,
        )
        self._server.add_sockets(sockets)

    def close(self) -> None:
        """Stop listening, and close every connection."""
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
            _send(request, 404, "Not Found", b"Only GET /metrics is served here.\n")

    async def _answer_page(self, request: HTTPServerRequest) -> None:
        try:
            body, kind = await self._page(_wants_openmetrics(request.headers.get("Accept", "")))
        except Exception:
            self._log.exception("The metrics could not be served")
            body = b"The metrics could not be read; the broker's log has the reason.\n"
            _send(request, 500, "Internal Server Error", body)
        else:
            _send(request, 200, "OK", body, kind)


class _MetricsServer(HTTPServer):
    """An HTTP server that closes slow connections, and the oldest one if there are too many."""

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """Set up; see :class:`tornado.util.Configurable`."""
        #: For each open connection, the oldest first: the timer that closes the connection.
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
        """Close all open connections."""
        for stream in [*self._deadlines]:
            self._drop(stream)


def _wants_openmetrics(accept: str) -> bool:
    """Return whether the client reads OpenMetrics; ``accept`` is its Accept header."""
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
