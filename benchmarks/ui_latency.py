# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Time from the broker's decision to the change of the chip in the page, among 50 sessions.

A real notebook in a real JupyterLab in Chromium runs a cell repeatedly. After each run, the
benchmark gives the slice back. The decision is the moment at which the kernel enters the state
``active``, ``idle`` or ``detached``. For ``active`` and ``detached``, the time of the decision is
in a row of the broker's journal. The journal has no row for ``idle``, the state after the end of a
cell, so this time comes from the broker's status.

The chip has changed when the page's DOM has the text of the new state. The browser paints the text
with the next frame. The baseline is the time at which a Python client of the same websocket gets
the message about the new state.

The broker's times are from a monotonic clock. The page and this process use the clock of the time
of day. So the benchmark asks the broker for its time, and computes the offset between the two
clocks. The page's times are in whole milliseconds.
"""

from __future__ import annotations

import argparse
import json
import re
import threading
import time
from typing import Any

import requests
import websocket

from jupyter_gpupool.client import Client

from .chromium import Page
from .common import budget, summary
from .crowd import Member, settle
from .ui_rest import DEVICES, SESSIONS, stage

GiB = 1 << 30

#: The number of other sessions with a slice. The devices have room for more slices, so the notebook
#: gets its slice at once.
HOLDING = 20
POOL = {
    "emulate": f"{DEVICES}x8GiB,context=64MiB",
    "default_memory": 3 * GiB,
    "default_limit": 3 * GiB,
    "attach": "cell",
}

#: The code of the notebook's cell. It runs long enough for the page to show the kernel as active.
#: The length is random, so that the cell does not always end at the same moment between two polls
#: of the server.
CELL = "import random, time; time.sleep(random.uniform(0.2, 1.2))"

#: For each state, a pattern for the chip's text; ``labextension/src/words.ts`` makes these texts.
SAYS = {
    "active": re.compile(r"^[\d.]+ .*on GPU \d+$"),
    "idle": re.compile(r"^Idle"),
    "detached": re.compile(r"^(No GPU|In host memory)"),
}

#: The most milliseconds from a decision to the change of the chip.
BUDGET_MS = 250.0

WATCH_CHIP = """
  const bar = document.querySelector('.jp-NotebookPanel-toolbar');
  let last = '';
  const note = () => {
    const words = bar.querySelector('.jp-gpupool-chip')?.textContent ?? '';
    if (words !== last) {
      last = words;
      gpupoolSaid(JSON.stringify({ words, time: Date.now() / 1000 }));
    }
  };
  note();
  new MutationObserver(note).observe(bar, {
    subtree: true, childList: true, characterData: true
  });
"""

#: Starts the cell as Shift-Enter does. The script does not wait for the end of the cell.
RUN_CELL = "jupyterapp.commands.execute('notebook:run-cell').catch(() => undefined);"


class Listener(threading.Thread):
    """Records the states of one kernel, with times, from the server extension's websocket."""

    def __init__(self, url: str, kernel: str) -> None:
        super().__init__(daemon=True)
        self.heard: list[tuple[float, str]] = []
        self._kernel = kernel
        self._socket = websocket.create_connection(
            f"{url.replace('http', 'ws', 1)}/gpupool/api/events", timeout=60
        )
        self._socket.recv()  # skip the first message, which has the whole pool
        self.start()

    def run(self) -> None:
        while True:
            try:
                text = self._socket.recv()
            except (OSError, websocket.WebSocketException):
                return
            now, message = time.time(), json.loads(text or "{}")
            for session in message.get("delta", {}).get("sessions", ()):
                if session.get("kernel_id") == self._kernel:
                    self.heard.append((now, session["state"]))

    def close(self) -> None:
        self._socket.abort()  # wakes the thread
        self.join(20)


class Decisions:
    """Reads the times of the broker's decisions about one session, on the broker's clock."""

    def __init__(self, client: Client, session: str) -> None:
        self._client, self._session = client, session
        self._seq = client.call("journal", limit=1, session=session)["rows"][-1]["seq"]

    def offset(self) -> float:
        """Return the time of day minus the broker's time, from the fastest of five answers."""
        found: list[tuple[float, float]] = []
        for _ in range(5):
            begun = time.time()
            now = float(self._client.call("status")["now"])
            ended = time.time()
            found.append((ended - begun, (begun + ended) / 2 - now))
        return min(found)[1]

    def last(self, state: str) -> float:
        """Return when the kernel last entered ``state``. Read only the journal's new rows."""
        rows = self._client.call("journal", after=self._seq, session=self._session)["rows"]
        self._seq = rows[-1]["seq"]
        times = [r["time"] for r in rows if r["kind"] == "state" and r["detail"]["new"] == state]
        return float(times[-1])

    def idle_since(self) -> float:
        """Return the time at which the kernel became idle."""
        for session in self._client.call("status")["sessions"]:
            if session["id"] == self._session and session["idle_since"] is not None:
                return float(session["idle_since"])
        raise RuntimeError("the session is not idle")


def first(heard: list[tuple[float, str]], state: str, after: float) -> float | None:
    """Return the time of the first message with ``state`` after the time ``after``, or None."""
    # The page cuts its times to whole milliseconds. So a time may be up to 1 ms too early.
    return next((at for at, what in heard if what == state and at > after - 0.001), None)


def state_of(words: str) -> str:
    """Return the state that the chip's text shows; "" if this benchmark does not measure it."""
    return next((state for state, said in SAYS.items() if said.search(words)), "")


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure; return the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    rounds = 10 if parser.parse_args(argv).quick else 60
    members = [Member() for _ in range(SESSIONS - 1)]
    place, page = stage(), None
    try:
        url = place.open()["url"]
        place.do_fresh(**POOL)
        page = Page()
        browser = page.browser()
        page.open_lab(url)
        kernel = page.open_notebook(place.labs[0].folder / "files", CELL)
        with place.broker.client() as client:
            for number, member in enumerate(members):
                member.join(client, place.broker.socket, str(number))
            for member in members[:HOLDING]:
                member.take()
            status = settle(client, {member.session: {"active"} for member in members[:HOLDING]})
            mine = next(s["id"] for s in status["sessions"] if s["kernel_id"] == kernel)
            if len(status["sessions"]) != SESSIONS:
                raise RuntimeError(f"the pool has {len(status['sessions'])} sessions")
            listener = Listener(url, kernel)
            try:
                chip, python = measure(page, url, kernel, Decisions(client, mine), listener, rounds)
            finally:
                listener.close()
    finally:
        if page is not None:
            page.close()
        for member in members:
            member.close()
        place.end()
    pushed = [*chip["active"], *chip["idle"], *chip["detached"]]
    heard = [*python["active"], *python["idle"], *python["detached"]]
    all_chip, all_python = summary(pushed), summary(heard)
    return {
        "emulated": True,
        "sessions": SESSIONS,
        "devices": DEVICES,
        "browser": browser,
        "unit": "ms",
        "chip": all_chip,
        "baseline_python_client": all_python,
        "added_p50": round(all_chip["p50"] - all_python["p50"], 1),
        "by_state": {
            state: {"chip": summary(chip[state]), "python_client": summary(python[state])}
            for state in SAYS
        },
        "budgets": [
            budget(
                f"from the broker's decision to the chip's change, {SESSIONS} sessions, p99",
                all_chip["p99"], BUDGET_MS, "ms",
            )
        ],
    }  # fmt: skip


def measure(
    page: Page, url: str, kernel: str, decisions: Decisions, listener: Listener, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return, for chip and client, the milliseconds from a decision to the change, by state."""
    said: list[tuple[float, str]] = []

    def take(told: dict[str, Any]) -> None:
        note = json.loads(told["payload"])
        said.append((note["time"], state_of(note["words"])))

    page.on["Runtime.bindingCalled"] = take
    page.call("Runtime.enable")
    page.call("Runtime.addBinding", name="gpupoolSaid")
    page.run(WATCH_CHIP)
    chip: dict[str, list[float]] = {state: [] for state in SAYS}
    python: dict[str, list[float]] = {state: [] for state in SAYS}

    def wait(heard: list[tuple[float, str]], state: str, after: float) -> float:
        return float(page.wait(lambda: first(heard, state, after), f"{state} is heard"))

    def note(state: str, decided: float) -> None:
        """Record how long after the decision the chip and the Python client show the state."""
        decided += decisions.offset()
        for heard, found in ((said, chip), (listener.heard, python)):
            found[state].append(1e3 * (wait(heard, state, decided) - decided))

    with requests.Session() as http:
        for _ in range(rounds):
            begun = time.time()
            page.run(RUN_CELL)
            wait(said, "idle", wait(said, "active", begun))
            note("active", decisions.last("active"))
            note("idle", decisions.idle_since())
            begun = time.time()
            http.post(f"{url}/gpupool/api/sessions/{kernel}/release", timeout=30).raise_for_status()
            wait(said, "detached", begun)
            note("detached", decisions.last("detached"))
    return chip, python
