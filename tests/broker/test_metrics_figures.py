# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Names, units and values of the broker's metrics, their dashboard, and a stalled reader."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, enable_created_metrics

from jupyter_gpupool import __version__
from jupyter_gpupool.broker import figures as f
from jupyter_gpupool.broker.gpu.samples import Samples
from jupyter_gpupool.broker.store.journal import Row
from jupyter_gpupool.devices.model import DeviceSample
from jupyter_gpupool.pool import events as e
from jupyter_gpupool.pool.machine import Pool
from jupyter_gpupool.pool.model import Device, Owner, PoolSettings, Request
from jupyter_gpupool.server import server_metrics
from tests import promql

GiB = 1 << 30
DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = DOCS / "grafana" / "jupyter-gpupool-pool.json"
WAITS = "jupyter_gpupool_device_wait_seconds_bucket"


class Machine:
    """A pool of two devices, and stubs for the other parts of a broker that the metrics read."""

    def __init__(self, **figures):
        self.time = 1000.0
        self.pool = Pool(PoolSettings(default_memory=GiB, default_limit=GiB))
        self.runner = SimpleNamespace(
            pool=self.pool, now=lambda: self.time, record=self.record, busy={}
        )
        settings = SimpleNamespace(sample_interval=2.0)  # a sample is valid for 30 s
        self.samples = Samples(None, SimpleNamespace(settings=settings))
        for index, uuid in enumerate("AB"):
            device = Device(uuid, index, f"GPU {index}", "model", 4 * GiB)
            self.pool.handle(e.DeviceAppeared(now=self.time, device=device))
        self.figures = f.Figures(self.runner, self.samples, logging.getLogger(), **figures)

    def record(self, session):
        return self.pool.record(session) if session in self.pool else None

    def attach(self, name, **request):
        """Open a session, attach its slice, and record that it is active."""
        request = Request(GiB, GiB, **request)
        self.pool.handle(
            e.SessionOpened(now=self.time, session=name, owner=Owner("ann"), request=request,
                            attach="cell", label="", rid=name)
        )  # fmt: skip
        actions = self.pool.handle(
            e.HoldTaken(now=self.time, session=name, hold="c", kind="cell", bound=())
        )
        for action in actions:
            if isinstance(action, e.Attach):
                self.pool.handle(e.AttachDone(now=self.time, session=name, epoch=action.epoch))
        self.row("state", name, new="active")

    def row(self, what, session="", device=None, seconds=None, reason="", /, **detail):
        self.figures.observe(
            Row(time=self.time, kind=what, session=session, device=device, seconds=seconds,
                reason=reason, detail=detail)
        )  # fmt: skip

    def sample(self, **fields):
        """Take a sample of each device now; ``fields`` replace the figures of device A."""
        plain = {"total": 4 * GiB, "used": GiB, "reserved": 0, "free": 3 * GiB, "utilisation": 40}
        self.samples.last = {
            "A": DeviceSample("A", **{**plain, **fields}),
            "B": DeviceSample("B", **plain),
        }
        self.samples._taken_at = asyncio.get_running_loop().time()

    def value(self, name, **labels):
        self.figures.read()
        return self.figures.registry.get_sample_value(f"jupyter_gpupool_{name}", labels)


@pytest.fixture(autouse=True)
def as_before():
    """Undo what the metrics set for the whole process."""
    tornado = logging.getLogger("tornado")
    level = tornado.level
    yield
    tornado.setLevel(level)
    enable_created_metrics()


@pytest.fixture
def on_machine():
    """Return a function that calls a test's coroutine function with a new ``Machine``."""

    def run(test):
        async def main():
            await test(Machine())

        asyncio.run(asyncio.wait_for(main(), 60))

    return run


def families(registry):
    """Return each metric as Prometheus reads it: name -> (type, names of its samples)."""
    suffixes = {
        "histogram": ("_bucket", "_sum", "_count"),
        "counter": ("_total",),
        "info": ("_info",),
    }
    return {
        family.name: (family.type, {family.name + s for s in suffixes.get(family.type, ("",))})
        for family in registry.collect()
        if family.name.startswith(f.PREFIX)
    }


def all_families():
    """Return the families of metrics of a machine on which every value is readable."""
    found = {}

    async def look():
        machine = Machine()
        machine.sample()
        machine.figures.read()
        found.update(families(machine.figures.registry))

    asyncio.run(look())
    return found


def test_unread_values_are_absent_and_not_zero(on_machine):
    read = ("device_used_bytes", "device_utilisation_ratio", "device_foreign_bytes")

    async def test(machine):
        assert [machine.value(name, device="A") for name in read] == [None] * 3
        machine.sample(used=0, utilisation=0)
        assert [machine.value(name, device="A") for name in read] == [0, 0, 0]
        assert machine.value("device_utilisation_ratio", device="B") == 0.4
        machine.sample(utilisation=None)
        assert machine.value("device_utilisation_ratio", device="A") is None
        assert machine.value("device_used_bytes", device="A") == GiB
        machine.sample(lost="fell off the bus")
        assert [machine.value(name, device="A") for name in read] == [None] * 3
        assert machine.value("device_used_bytes", device="B") == GiB
        machine.samples._taken_at -= 31  # the sample is no longer valid
        assert machine.value("device_used_bytes", device="B") is None
        # The pool's own accounts need no sample.
        assert machine.value("device_memory_bytes", device="B") == 4 * GiB

    on_machine(test)


def test_lost_device_is_down_and_has_no_free_memory(on_machine):
    async def test(machine):
        assert machine.value("device_up", device="A") == 1
        machine.pool.handle(e.DeviceDrained(now=machine.time, device="A", reason="lost"))
        assert machine.value("device_up", device="A") == 0
        assert machine.value("device_free_bytes", device="A") == 0
        assert machine.value("device_free_bytes", device="B") == 4 * GiB

    on_machine(test)


def test_counters_begin_at_zero(on_machine):
    async def test(machine):
        for name in ("wait_seconds_count", "suspend_seconds_count", "resume_seconds_count",
                     "resumes_total", "migrations_total", "attached_seconds_total"):  # fmt: skip
            assert machine.value(f"device_{name}", device="B") == 0, name
        for cause in f.CAUSES:
            assert machine.value("device_suspends_total", device="A", cause=cause) == 0
        assert machine.value("pool_preemptions_total") == 0
        assert machine.value("pool_sessions", state="queued", priority="batch") == 0
        assert machine.value("pool_oldest_wait_seconds") == 0

    on_machine(test)


def test_journal_rows_feed_counters_and_histograms(on_machine):
    async def test(machine):
        machine.row("attach", "s", "A", 3.0, driver_seconds=0.0)
        machine.row("state", "s", "A", None, "another kernel waits for memory", new="detaching")
        machine.row("suspend", "s", "A", 0.25, "suspended")
        machine.row("resume", "s", "B", 4.0, driver_seconds=0.5)
        machine.row("migrate", "s", "B", **{"from": "A"})
        for reason in ("idle", "release"):
            machine.row("state", "s", "B", None, reason, new="detaching")
            machine.row("suspend", "s", "B", 1.0)
        machine.row("state", "s", "B", None, "a higher class needs the GPU", new="detaching")
        machine.row("preempt", "s", None, None, "a higher class needs the GPU")
        machine.row("suspend", "s", "B", 1.0)
        machine.row("refuse", "s", what="request", code="over-quota")
        machine.row("refuse", "s", what="suspend", kind="pinned")
        machine.row("close", "s")
        value = machine.value
        assert value("device_wait_seconds_sum", device="A") == 3.0
        assert value("device_wait_seconds_sum", device="B") == 4.0
        assert value("device_resume_seconds_sum", device="B") == 0.5
        assert value("device_suspend_seconds_sum", device="A") == 0.25
        assert value("device_suspends_total", device="A", cause="waiting") == 1
        assert value("device_suspends_total", device="B", cause="idle") == 1
        assert value("device_suspends_total", device="B", cause="release") == 1
        assert value("device_resumes_total", device="B") == 1
        assert value("device_migrations_total", device="B") == 1
        assert value("device_suspends_total", device="B", cause="preempted") == 1
        assert value("pool_preemptions_total") == 2
        assert value("pool_refusals_total", what="request", code="over-quota") == 1
        assert value("pool_refusals_total", what="suspend", code="pinned") == 1
        # This suspend was under way when the metrics were switched on, so its cause is unknown.
        machine.row("suspend", "t", "B", 1.0)
        assert value("device_suspends_total", device="B", cause="unknown") == 1

    on_machine(test)


def test_attached_seconds_grow_on_every_device_of_a_slice(on_machine):
    async def test(machine):
        def seconds():
            return [machine.value("device_attached_seconds_total", device=d) for d in "AB"]

        machine.attach("both", devices=2)
        machine.time += 10
        assert seconds() == [10, 10]
        machine.attach("one")
        (piece,) = machine.pool.record("one").slices
        machine.time += 5
        machine.row("state", "both", new="idle")  # an idle session keeps its slices
        assert sorted(seconds()) == [15, 20]
        machine.pool.handle(e.SessionEnded(now=machine.time, session="both", reason="closed"))
        machine.row("close", "both")
        machine.time += 100
        assert sorted(seconds()) == [15, 120]
        assert machine.value("device_attached_seconds_total", device=piece.device) == 120
        # If the metrics are switched on during a lease, they count only the seconds after that.
        machine.runner.busy = {"one": "active"}
        later = f.Attached(machine.runner)
        machine.time += 3
        assert {s.labels["device"]: s.value for s in later.family().samples}[piece.device] == 3

    on_machine(test)


def test_concurrent_scrapes_share_a_page(on_machine, monkeypatch):
    async def test(machine):
        page = machine.figures.page
        first, other = await asyncio.gather(page(False), page(False))
        assert first is other
        machine.row("migrate", "s", "A")
        assert await page(False) is first
        monkeypatch.setattr(f, "FRESH", -1.0)
        assert b'migrations_total{device="A"} 1.0' in (await page(False))[0]

    on_machine(test)


def test_names_and_units_follow_prometheus_conventions():
    for name, (kind, _) in all_families().items():
        assert re.fullmatch(r"jupyter_gpupool_(device|pool|broker)(_[a-z]+)*", name)
        if kind in ("histogram", "gauge") and "_process_" not in name:
            assert name.endswith(
                ("_bytes", "_seconds", "_ratio", "_up", "_sessions", "_queue_length")
            )


def test_metric_names_of_broker_and_server_are_disjoint():
    ours = set().union(*(samples for _, samples in all_families().values()))
    assert server_metrics.__name__  # the import registers the metrics
    theirs = set().union(*(samples for _, samples in families(REGISTRY).values()))
    assert theirs, "the server extension has metrics"
    assert not ours & theirs


def test_the_broker_names_its_machine_only_in_a_cluster(on_machine):
    async def look(alone):
        labels = {"version": __version__}
        assert alone.value("broker_info", **labels) == 1
        assert Machine(node="gpu1").value("broker_info", **labels, node="gpu1") == 1

    on_machine(look)


def test_documented_metrics_are_those_that_exist():
    text = (DOCS / "admins.md").read_text().split("## Metrics")[1].split("\n## ")[0]
    named = {re.sub(r"_total$|_info$", "", n) for n in re.findall(r"`(jupyter_gpupool_\w+)`", text)}
    known = {name for name in all_families() if "_process_" not in name}
    assert named - {f"{f.PREFIX}broker_process_"} == known


def test_dashboard_uses_existing_metrics_and_labels():
    board = json.loads(DASHBOARD.read_text())
    named = promql.check(board, exported(node=""))
    known = {name: samples for name, (_, samples) in all_families().items()}
    for name, samples in known.items():
        if "_process_" not in name:
            assert named & samples, f"no panel shows {name}"
    for panel in board["panels"]:
        unit = panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            expr = target["expr"]
            if "_bytes" in expr:
                assert unit == "bytes", panel["title"]
            elif "_ratio" in expr:
                assert unit == "percentunit"
            elif "_seconds" in expr and "_attached_" not in expr:
                assert unit == "s", panel["title"]
    assert len({p["id"] for p in board["panels"]}) == len(board["panels"])
    other = json.loads((DOCS / "grafana" / "jupyter-gpupool.json").read_text())
    assert board["uid"] != other["uid"]
    assert board["title"] != other["title"]


def exported(node):
    """Return the labels of each sample of the broker's metrics. A dashboard may use only these."""
    found = {}

    async def look():
        machine = Machine(node=node)
        machine.sample()
        machine.figures.read()
        found.update(promql.exported(machine.figures.registry))

    asyncio.run(look())
    return found


def test_dashboard_of_a_cluster_has_all_figures_by_machine():
    board = json.loads((DOCS / "grafana" / "jupyter-gpupool-cluster.json").read_text())
    known = exported(node="gpu1")
    promql.check(board, known)
    for panel in board["panels"]:
        for target in panel["targets"]:
            machines = promql.labels_of(target["expr"], known) == {"node"}
            assert machines or target["legendFormat"] == "machines", panel["title"]
    with pytest.raises(AssertionError, match="has no label node"):
        promql.check(board, exported(node=""))


@pytest.mark.parametrize(
    ("query", "wrong"),
    [
        ("sum(jupyter_gpupool_pool_kernels)", "nothing exports jupyter_gpupool_pool_kernels"),
        ("sum by (node) (jupyter_gpupool_device_up)", "by {'node'}"),
        ('jupyter_gpupool_device_up{node="gpu1"}', "jupyter_gpupool_device_up has no label node"),
        ("jupyter_gpupool_device_up * jupyter_gpupool_pool_queue_length", "never matches"),
        (
            "jupyter_gpupool_device_up * on (device) group_left (node) jupyter_gpupool_device_info",
            "group_left {'node'}",
        ),
        ("jupyter_gpupool_pool_preemptions_total", "without a rate"),
        (f"histogram_quantile(0.5, sum(rate({WAITS}[$__rate_interval])))", "needs the label le"),
    ],
)
def test_check_of_dashboards_finds_each_wrong_query(query, wrong):
    with pytest.raises(AssertionError, match=re.escape(wrong)):
        promql.labels_of(query, exported(node="gpu1"))


@asynccontextmanager
async def client(page):
    """Serve ``page``, and send a request. Yield the server, and the client's reader and writer."""
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    endpoint = f.Endpoint(port, page, logging.getLogger("test"))
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        try:
            yield endpoint, reader, writer
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
    finally:
        endpoint.close()


def test_client_that_does_not_read_is_closed(monkeypatch, caplog):
    """The broker keeps the bytes that do not fit in the socket, but only for a bounded time."""
    monkeypatch.setattr(f, "DEADLINE", 2.0)
    size = 32 << 20

    async def page(_):
        return b"x" * size, "text/plain"

    async def main():
        async with client(page) as (endpoint, reader, _):
            assert await reader.readexactly(15) == b"HTTP/1.1 200 OK"
            open_ones = endpoint._server._deadlines
            while open_ones:
                await asyncio.sleep(0.01)
            read = 0
            with suppress(ConnectionResetError):
                while part := await reader.read(1 << 20):
                    read += len(part)
            assert read < size

    with caplog.at_level(logging.DEBUG):
        asyncio.run(asyncio.wait_for(main(), 60))
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_page_that_cannot_be_made_is_an_error_for_the_client(caplog):
    async def page(_):
        raise RuntimeError("no figures")

    async def main():
        async with client(page) as (_, reader, _):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 500 ")
        assert b"no figures" not in answer

    asyncio.run(asyncio.wait_for(main(), 60))
    assert "The metrics could not be served" in caplog.text


def test_client_that_closes_before_the_answer_is_no_error(caplog):
    async def main():
        asked, gone = asyncio.Event(), asyncio.Event()

        async def page(_):
            asked.set()
            await gone.wait()
            return b"x" * 1000, "text/plain"

        async with client(page) as (endpoint, _, writer):
            await asked.wait()
            (task,) = endpoint._asked
            writer.transport.abort()
            while endpoint._server._deadlines:
                await asyncio.sleep(0.01)
            gone.set()
            await task

    with caplog.at_level(logging.DEBUG):
        asyncio.run(asyncio.wait_for(main(), 60))
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
