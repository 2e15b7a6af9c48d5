# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What a change of the pool costs the page with the side panel: 50 sessions on 16 devices.

A real JupyterLab in Chromium has one real notebook. 49 small processes take slices, wait for them
and give them back. All sessions belong to the user of the page, because the panel shows the most
fields for the user's own sessions. An event is one ``delta`` on the websocket. The cost of an event
is the time that all scripts of the page run until the next event, from Chromium's trace. So the
cost also contains the scripts of the page's clock, the request for the history every 5 s, and the
trace itself. Garbage collections between scripts have a figure of their own. The baseline, in the
same run, is the cost with the panel closed. The benchmark opens and closes the panel in turn.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any

from jupyter_gpupool.client import Client

from .chromium import Page, Trace, costs
from .common import budget, summary
from .crowd import Member, settle
from .ui_rest import DEVICES, SESSIONS, stage

GiB = 1 << 30

#: Milliseconds of scripting for one event.
BUDGET_MS = 16.0

#: Two slices fit on a device. If ``WANTING`` sessions want a slice, some of them wait.
POOL = {
    "emulate": f"{DEVICES}x8GiB,context=64MiB",
    "default_memory": 3 * GiB,
    "default_limit": 3 * GiB,
}
WANTING = 40

#: After a change, the benchmark waits up to COMES seconds for its delta, and then RESTS seconds in
#: which the page handles the delta.
COMES, RESTS = 1.0, 0.1

#: Chromium's counters of a page, in seconds. JupyterLab updates its widgets in callbacks of
#: promises. ScriptDuration does not contain these callbacks. So the times of scripts come from the
#: trace, and not from this counter.
METRICS = ("TaskDuration", "ScriptDuration", "LayoutDuration", "RecalcStyleDuration")


class Deltas:
    """Time and size of each ``delta`` on the page's websocket to the server extension."""

    def __init__(self, page: Page) -> None:
        self.times: list[float] = []
        self.bytes: list[int] = []
        self._sockets: set[str] = set()
        page.on["Network.webSocketCreated"] = self._created
        page.on["Network.webSocketFrameReceived"] = self._received
        page.call("Network.enable")

    def _created(self, told: dict[str, Any]) -> None:
        if "/gpupool/api/events" in told["url"]:
            self._sockets.add(told["requestId"])

    def _received(self, told: dict[str, Any]) -> None:
        text = told["response"]["payloadData"]
        if told["requestId"] in self._sockets and json.loads(text)["type"] == "delta":
            self.times.append(told["timestamp"])
            self.bytes.append(len(text))


class Crowd:
    """The processes that take slices and give them back, in the same random order in each part."""

    def __init__(self, members: list[Member], client: Client) -> None:
        self.members, self._client = members, client

    def begin(self) -> None:
        """Begin a part of the run: WANTING members ask for a slice, so that some of them wait."""
        for member in self.members:
            member.leave()
        self._settle({"detached"})
        for member in self.members[:WANTING]:
            member.take()
        self._settle({"active", "queued"})
        self._chance = random.Random(4)

    def change(self) -> None:
        """Let one random member ask for a slice, give up its slice, or stop waiting."""
        wanting = sum(member.wants for member in self.members)
        leaves = wanting >= WANTING
        one = self._chance.choice([m for m in self.members if m.wants is leaves])
        if leaves:
            one.leave()
        else:
            one.take()

    def _settle(self, states: set[str]) -> None:
        settle(self._client, {m.session: states for m in self.members if m.wants} or
               {m.session: states for m in self.members})  # fmt: skip


def part(page: Page, deltas: Deltas, crowd: Crowd, count: int) -> dict[str, Any]:
    """Change the pool until the page has received ``count`` deltas; return their costs."""
    crowd.begin()
    page.listen(2)
    before = metrics(page)
    trace = Trace(page)
    deltas.times.clear()
    deltas.bytes.clear()
    while len(deltas.times) < count:
        had, deadline = len(deltas.times), time.monotonic() + COMES
        crowd.change()
        while len(deltas.times) == had and time.monotonic() < deadline:
            page.listen(0.01)
        page.listen(RESTS)
    times = [*deltas.times, time.monotonic()]  # Chromium uses the same clock
    after = metrics(page)
    return {
        "costs": costs(trace.end(), times),
        "bytes": list(deltas.bytes),
        "seconds": {name: after[name] - before[name] for name in METRICS},
        "wall": times[-1] - times[0],
    }


def metrics(page: Page) -> dict[str, float]:
    """Return Chromium's counters of the page, in seconds."""
    found = page.call("Performance.getMetrics")["metrics"]
    return {one["name"]: one["value"] for one in found}


def put_together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one set of figures for several parts, all with the panel shown or all without it."""

    def figures(key: str) -> dict[str, float]:
        values = [cost[key] for one in parts for cost in one["costs"]]
        return {**summary(values), "mean": sum(values) / len(values)}

    scripts = [cost["script"] for one in parts for cost in one["costs"]]
    sizes = [size for one in parts for size in one["bytes"]]
    per_event = {
        f"{name}_mean_ms": 1e3 * sum(one["seconds"][name] for one in parts) / len(scripts)
        for name in METRICS
    }
    return {
        "script_ms": figures("script"),
        # The processor time of the scripts. It does not contain the time in which another process
        # uses the core.
        "script_cpu_ms": figures("cpu"),
        # The page reacts to nothing while a script runs.
        "longest_script_ms": figures("longest"),
        # After every few hundred events, the browser collects the garbage of the whole JupyterLab,
        # in small steps between scripts.
        "collections_ms": figures("collections"),
        "script_and_collections_ms": figures("both"),
        "events_over_budget": sum(ms > BUDGET_MS for ms in scripts),
        "events_per_second": len(scripts) / sum(one["wall"] for one in parts),
        "delta_bytes_p50": summary(sizes)["p50"],
        **per_event,
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure; return the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    count, turns = (30, 1) if parser.parse_args(argv).quick else (120, 2)
    members = [Member() for _ in range(SESSIONS - 1)]
    place, page = stage(), None
    try:
        ready = place.open()
        place.do_fresh(**POOL, max_memory_per_kernel=7 * GiB)
        page = Page()
        browser = page.browser()
        deltas = Deltas(page)
        page.call("Performance.enable")
        page.open_lab(ready["url"])
        kernel = page.open_notebook(place.labs[0].folder / "files", "")
        with place.broker.client() as client:
            for number, member in enumerate(members):
                member.join(client, place.broker.socket, str(number))
            crowd = Crowd(members, client)
            found: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
            for shown in (False, True) * turns:
                show(page, shown)
                found[shown].append(part(page, deltas, crowd, count))
                check(page, shown, client, kernel)
    finally:
        if page is not None:
            page.close()
        for member in members:
            member.close()
        place.end()
    panel, closed = put_together(found[True]), put_together(found[False])
    return {
        "emulated": True,
        "sessions": SESSIONS,
        "devices": DEVICES,
        "browser": browser,
        "unit": "ms",
        "panel": panel,
        "baseline_panel_closed": closed,
        "added_mean_ms": panel["script_ms"]["mean"] - closed["script_ms"]["mean"],
        "budgets": [
            budget(f"{what}, {SESSIONS} sessions, {DEVICES} devices, {name}",
                   panel[figure][key], BUDGET_MS, "ms")
            for what, figure, name, key in (
                ("scripting per event, panel shown", "script_ms", "mean", "mean"),
                ("scripting per event, panel shown", "script_ms", "p99", "p99"),
                ("scripting per event, panel shown", "script_ms", "worst", "max"),
                ("the processor's time in it", "script_cpu_ms", "worst", "max"),
                ("with garbage collections", "script_and_collections_ms", "p99", "p99"),
                ("with garbage collections", "script_and_collections_ms", "worst", "max"),
            )
        ],
    }  # fmt: skip


def show(page: Page, shown: bool) -> None:
    """Show the panel, or close it."""
    command = "commands.execute('gpupool:show-panel')" if shown else "shell.collapseRight()"
    page.run(f"await jupyterapp.{command}")
    page.listen(1)


def check(page: Page, shown: bool, client: Client, kernel: str) -> None:
    """Raise an error if the page does not show what it must show in this part."""
    sessions = client.call("status")["sessions"]
    if len(sessions) != SESSIONS or kernel not in {s["kernel_id"] for s in sessions}:
        raise RuntimeError(f"the pool has {len(sessions)} sessions")
    seen = page.run("""
        const panel = document.querySelector('.jp-gpupool-panel');
        const chip = document.querySelector('.jp-NotebookPanel-toolbar .jp-gpupool-chip');
        return {
          panel: panel !== null && panel.checkVisibility(),
          lines: panel === null ? 0 : panel.querySelectorAll('li').length,
          chip: chip === null ? '' : chip.textContent,
          visible: document.visibilityState
        };
    """)
    if (
        seen["panel"] is not shown
        or not seen["chip"]
        or seen["visible"] != "visible"
        or (shown and seen["lines"] < SESSIONS)
    ):
        raise RuntimeError(f"the page is not as it should be: {seen}")
