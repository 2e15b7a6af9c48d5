# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""One page of JupyterLab in its own Chromium, controlled by the DevTools protocol.

This module is not a benchmark itself. All times are in seconds. Chromium's trace and
``time.monotonic`` use the same clock.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import requests
import websocket

#: The same options as in the browser tests.
OPTIONS = (
    "--headless=new",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,800",
)

#: The names of the trace events in which the page runs JavaScript, or the browser does work for a
#: script. A script may force the browser to compute style and layout at once. The time of the
#: script's event includes this computation, so the benchmark counts this computation, too.
SCRIPT = frozenset(
    {
        *("EvaluateScript", "EventDispatch", "FireAnimationFrame", "FireIdleCallback"),
        *("FunctionCall", "RunMicrotasks", "TimerFire", "XHRLoad", "XHRReadyStateChange"),
        *("v8.callFunction", "v8.compile", "v8.newInstance", "v8.run"),
    }
)

#: The names of the trace events of a garbage collection. The benchmark ignores a collection that
#: runs during an event of SCRIPT, because the time of that event includes the collection.
COLLECTION = frozenset(
    {"MajorGC", "MinorGC", "V8.GCScavenger", "V8.GCFinalizeMC", "V8.GCIncrementalMarking"}
)


class Span(NamedTuple):
    """When a script or a garbage collection began and ended, and its processor seconds."""

    begin: float
    end: float
    cpu: float
    collects: bool


class Page:
    """The browser and its page. :meth:`close` ends it with all its processes."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gpb-", dir="/tmp"))
        #: For each name of an event, the function that gets the event's parameters.
        self.on: dict[str, Callable[[dict[str, Any]], object]] = {}
        self._ids = itertools.count(1)
        self._process = subprocess.Popen(
            [
                os.environ.get("CHROMIUM", "/usr/bin/chromium"), *OPTIONS,
                *([] if os.geteuid() else ["--no-sandbox"]),
                "--remote-debugging-port=0", f"--user-data-dir={self.folder}", "about:blank",
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            self._socket = websocket.create_connection(
                self._address(), timeout=60, suppress_origin=True
            )
        except BaseException:
            self._end()
            raise

    def _address(self) -> str:
        """Wait for the first page; return its DevTools address."""
        told = self.folder / "DevToolsActivePort"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"Chromium ended with {self._process.returncode}")
            with suppress(FileNotFoundError, IndexError, requests.ConnectionError):
                port = told.read_text().split()[0]
                listed = requests.get(f"http://127.0.0.1:{port}/json/list", timeout=30).json()
                for target in listed:
                    if target["type"] == "page":
                        return str(target["webSocketDebuggerUrl"])
            time.sleep(0.05)
        raise TimeoutError("Chromium shows no page")

    def close(self) -> None:
        """End the browser."""
        with suppress(OSError, websocket.WebSocketException):
            self._socket.close()
        self._end()

    def _end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(20)
        shutil.rmtree(self.folder, ignore_errors=True)

    # ------------------------------------------------------------------ the protocol

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its answer; pass events before the answer to ``on``."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            message = self._receive(deadline)
            if message is not None and message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result
        raise TimeoutError(f"{method} was not answered")

    def wait(self, condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
        """Return the first true result of ``condition``.

        The check runs after each message, and after 0.02 s without a message.
        """
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {seconds:g} s: {what}")
            # The condition may become true without an event.
            self._receive(min(deadline, time.monotonic() + 0.02))
        return found

    def listen(self, seconds: float) -> None:
        """Dispatch events for ``seconds``."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._receive(deadline)

    def _receive(self, deadline: float) -> dict[str, Any] | None:
        """Return the next message, or None at ``deadline``; pass an event to its function."""
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            message: dict[str, Any] = json.loads(self._socket.recv())
        except websocket.WebSocketTimeoutException:
            return None
        handler = self.on.get(message.get("method", ""))
        if handler is not None:
            handler(message["params"])
        return message

    def run(self, script: str) -> Any:
        """Run the body of an asynchronous function in the page; return its result."""
        answer = self.call(
            "Runtime.evaluate", expression=f"(async () => {{ {script} }})()",
            awaitPromise=True, returnByValue=True,
        )  # fmt: skip
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def browser(self) -> str:
        """Return the browser's name and version."""
        return str(self.call("Browser.getVersion")["product"])

    # ------------------------------------------------------------------ JupyterLab

    def open_lab(self, url: str) -> None:
        """Show JupyterLab and wait until it is ready."""
        self.call("Page.enable")
        self.call("Page.navigate", url=f"{url}/lab?reset")
        deadline = time.monotonic() + 90
        while not self.run("return globalThis.jupyterapp !== undefined"):
            if time.monotonic() > deadline:
                raise TimeoutError("JupyterLab does not show")
            self.listen(0.2)
        self.run("await jupyterapp.restored")

    def open_notebook(self, folder: Path, source: str, name: str = "measured") -> str:
        """Open a notebook with one cell and a Pooled GPU kernel; return the ready kernel's id."""
        cell = {
            "cell_type": "code",
            "id": "one",
            "source": source,
            "metadata": {},
            "outputs": [],
            "execution_count": None,
        }
        spec = {"name": "gpupool-python3", "display_name": "Pooled GPU"}
        whole = {
            "cells": [cell],
            "metadata": {"kernelspec": spec},
            "nbformat": 4,
            "nbformat_minor": 5,
        }
        (folder / f"{name}.ipynb").write_text(json.dumps(whole))
        return str(
            self.run(
                f"const path = '{name}.ipynb';"
                """
                const panel = await jupyterapp.commands.execute('docmanager:open', {
                  path, factory: 'Notebook'
                });
                await panel.sessionContext.ready;
                const kernel = panel.sessionContext.session.kernel;
                await kernel.info;
                return kernel.id;
            """
            )
        )


class Trace:
    """Records the work of a page's main thread, from its construction until :meth:`end`."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._spans: dict[tuple[int, int], list[Span]] = {}
        self._main: set[tuple[int, int]] = set()
        page.on["Tracing.dataCollected"] = lambda told: self._take(told["value"])
        page.call(
            "Tracing.start", transferMode="ReportEvents",
            traceConfig={"includedCategories": ["devtools.timeline", "v8"]},
        )  # fmt: skip

    def _take(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            thread = event["pid"], event["tid"]
            if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain":
                self._main.add(thread)
            elif event["name"] in SCRIPT | COLLECTION and event.get("dur"):
                begin, wall = event["ts"] / 1e6, event["dur"] / 1e6
                # ``tdur`` is the processor time. Without ``tdur``, use the upper bound ``dur``.
                cpu = event.get("tdur", event["dur"]) / 1e6
                span = Span(begin, begin + wall, cpu, event["name"] in COLLECTION)
                self._spans.setdefault(thread, []).append(span)

    def end(self) -> list[Span]:
        """Stop the trace; return the main thread's spans in order, without nested ones."""
        ended: list[bool] = []
        self._page.on["Tracing.tracingComplete"] = lambda _: ended.append(True)
        self._page.call("Tracing.end")
        self._page.wait(lambda: ended, "the trace")
        # The browser also has an idle spare renderer. So take the main thread with most spans.
        busiest = max(self._main, key=lambda thread: len(self._spans.get(thread, ())))
        return merged(self._spans.get(busiest, []))


def merged(spans: list[Span]) -> list[Span]:
    """Return the spans in order, without the spans that lie within another span."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda one: (one.begin, -one.end)):
        if not found or span.begin >= found[-1].end:
            found.append(span)
    return found


def costs(spans: list[Span], times: list[float]) -> list[dict[str, float]]:
    """Return one dict of milliseconds for each interval between two successive ``times``.

    A span belongs to the interval in which it began. ``script`` is the time of all scripts, ``cpu``
    their processor time, and ``longest`` the time of the longest script. ``collections`` is the
    time of all garbage collections, and ``both`` the sum of ``script`` and ``collections``. The
    argument ``spans`` is a result of :func:`merged`.
    """
    begins = [span.begin for span in spans]
    found = []
    for begin, end in itertools.pairwise(times):
        there = spans[bisect.bisect_left(begins, begin) : bisect.bisect_left(begins, end)]
        scripts = [1e3 * (span.end - span.begin) for span in there if not span.collects]
        cost = {
            "script": sum(scripts),
            "cpu": 1e3 * sum(span.cpu for span in there if not span.collects),
            "longest": max(scripts, default=0.0),
            "collections": 1e3 * sum(span.end - span.begin for span in there if span.collects),
        }
        found.append({**cost, "both": cost["script"] + cost["collections"]})
    return found
