# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Checks what a crowded pool tells its users: do all texts agree, and do they come true?

There are three scenes with real notebooks in a real JupyterLab, a real broker, and other real
kernels on its devices. The pool tells a user the time of a wait or of an idle slice in several
places: the chip, the cell, the panel, ``jupyter gpupool status``, and ``%gpu`` if the kernel is
free to run it. A look reads this time in all places. Each of them must show the broker's own figure
at that moment. Each look is a row of a table, and the end of the row says what happened after the
look. ``python -m benchmarks.ui_contended`` prints the table.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chromium import Page
from benchmarks.common import budget
from benchmarks.ui_rest import ROOT, stage
from jupyter_gpupool.units import format_clock, range_ends, wait_of

#: Finds the time in a text about a wait or about an idle slice. It fits the texts of all places.
FIGURE = re.compile(
    r"(?P<range>(?:up to |[\d.]+(?: \w+)? to )[\d.]+ \w+) left"
    r"|for (?P<waited>[\d.]+ (?:s|min|h)), no estimate yet"
    r"|(?:back to the pool|leaves) in (?P<clock>[\d:]+)"
    r"|(?P<may>may move)"
)

#: Seconds between two looks.
LOOK = 4.0
#: The first scene runs twice. In its second run, this many waits happen before the first look. So
#: the broker has seen these waits when it tells a range.
EARLIER = 10

#: Uses the GPU until the file ``flag`` exists.
WORK = """
import time
from pathlib import Path
from cuda.core import Device
device = Device(); device.set_current(); stream = device.create_stream()
small = device.allocate(1 << 20, stream=stream)
while not Path({flag!r}).exists():
    small.fill(7, stream=stream); stream.sync(); time.sleep(0.05)
"""

#: JavaScript that reads the texts of the chip, of the cell and of two lines of the panel at once.
READ = """
const text = (node, selector) => node?.querySelector(selector)?.textContent ?? '';
const panel = [...jupyterapp.shell.widgets('main')].find(w => w.context?.path === path).node;
const line = selector =>
  [...document.querySelectorAll('.jp-gpupool-panel ' + selector)]
    .find(node => node.textContent.includes(path));
return {
  chip: text(panel, '.jp-NotebookPanel-toolbar .jp-gpupool-Chip-long'),
  cell: text(panel, '.jp-OutputArea .jp-gpupool-Wait p'),
  queue: text(line('.jp-gpupool-queue > li'), '.jp-gpupool-figure'),
  kernel: text(line('.jp-gpupool-kernel'), '.jp-gpupool-state')
};
"""

#: JavaScript that runs ``%gpu`` in the notebook's kernel, and returns its output.
MAGIC = """
const panel = [...jupyterapp.shell.widgets('main')].find(w => w.context?.path === path);
const run = panel.sessionContext.session.kernel.requestExecute({ code: '%gpu' });
let said = '';
run.onIOPub = ({ content }) => { said += content.text ?? content.data?.['text/plain'] ?? ''; };
await run.done;
return said;
"""


@dataclass
class Seen:
    """One look at one kernel."""

    scene: str
    at: float
    #: The broker's own figure before the look, and its own figure after the look.
    true: tuple[str, str]
    #: All figures that a place may show: the broker's figures during the look and in the second
    #: before it. A page updates its clocks once a second, so its figure may be a second old.
    allowed: tuple[str, ...]
    figures: dict[str, str]
    since: float | None = None
    until: float | None = None
    happened: str = ""
    right: bool = True

    @property
    def same(self) -> bool:
        """Whether the figure in each place is one of the ``allowed`` figures."""
        return all(shown in self.allowed for shown in self.figures.values())


def figure(text: str) -> str:
    """Return the figure in a text; "" if it has none."""
    found = FIGURE.search(" ".join(text.split()))
    return next((group for group in found.groups() if group), "") if found else ""


def told(session: dict[str, Any], now: float) -> str:
    """Return the broker's own figure of a session at ``now``."""
    if session["state"] == "queued":
        return figure(wait_of(session, now))
    if session["state"] == "idle" and session.get("wanted"):
        return "may move"
    if session["state"] == "idle" and session.get("leaves_at"):
        return format_clock(session["leaves_at"] - now)
    return ""


def figures_between(
    before: tuple[dict[str, Any], float], after: tuple[dict[str, Any], float]
) -> tuple[str, ...]:
    """Return the broker's figures from a second before ``before`` until ``after``, each 0.1 s."""
    begin, end = before[1] - 1.0, after[1]
    times = [begin + 0.1 * step for step in range(int((end - begin) / 0.1) + 1)]
    return tuple(
        dict.fromkeys(told(session, at) for session, _ in (before, after) for at in (*times, end))
    )


@dataclass
class Replay:
    """The page, the broker, and all looks."""

    place: Any
    page: Page
    url: str
    looks: list[Seen] = field(default_factory=list)

    def status(self, name: str) -> tuple[dict[str, Any], float]:
        """Return a session by its label, and the broker's clock."""
        status = self.place.broker.status()
        found = next(s for s in status["sessions"] if s.get("label") == name)
        return found, float(status["now"])

    def cli(self, name: str) -> str:
        """Return the lines about a session in the output of ``jupyter gpupool status``."""
        session, _ = self.status(name)
        done = subprocess.run(
            [sys.executable, "-m", "jupyter_gpupool.cli", "status"],
            env={**os.environ, "GPUPOOL_SOCKET": str(self.place.broker.socket), "COLUMNS": "400"},
            capture_output=True, text=True, cwd=ROOT, timeout=60, check=True,
        )  # fmt: skip
        short = str(session["id"])[:12]
        return "\n".join(line for line in done.stdout.splitlines() if short in line)

    def look(self, scene: str, name: str, *, magic: bool = False) -> None:
        """Read the figure in all places."""
        script = f"const path = {json.dumps(name)};"
        before, at = self.status(name), time.time()
        read = self.page.run(script + READ)
        session, now = self.status(name)
        if session["state"] == "queued":
            places = {"chip": read["chip"], "cell": read["cell"], "panel": read["queue"]}
        else:
            places = {"chip": read["chip"], "panel": read["kernel"]}
            if magic:
                places["%gpu"] = self.page.run(script + MAGIC)
        places["CLI"] = self.cli(name)
        after = self.status(name)
        figures = {where: figure(text) for where, text in places.items()}
        true = told(*before), told(*after)
        seen = Seen(scene, at, true, figures_between(before, after), figures)
        expected = session.get("expected")
        if session["state"] == "queued" and expected and expected["until"] > now:
            low, high = range_ends(max(0.0, expected["since"] - now), expected["until"] - now)
            seen.since, seen.until = at + low, at + high
        self.looks.append(seen)

    def wait(self, what: str, condition: Callable[[], object], seconds: float = 60) -> None:
        self.page.wait(condition, what, seconds)

    def state(self, name: str) -> str:
        return str(self.status(name)[0]["state"])

    def happens(self, what: str, *, right: bool = True) -> None:
        """Record ``what`` as the outcome of all looks without an outcome; check these looks."""
        now = time.time()
        for seen in self.looks:
            if not seen.happened:
                seen.happened = f"{what} after {now - seen.at:.0f} s"
                seen.right = right
                if seen.since is not None and seen.until is not None:
                    seen.right = seen.since - 1.5 <= now <= seen.until + 1.5


def crowd(replay: Replay, earlier: int) -> None:
    """Two kernels run with 6 GiB each; a notebook waits until one of them gives up its slice."""
    scene = "two kernels run, a third waits" + (f"; {earlier} waits before" if earlier else "")
    place, page = replay.place, replay.page
    place.do_fresh(preempt=[])
    replay.url = ""
    flag = place.labs[0].folder / "files" / "crowd.flag"
    flag.unlink(missing_ok=True)
    for name in ("a", "b", "c"):
        place.do_neighbour(name, gib=6, hold=name != "c")
    for number in range(earlier):
        runs, waits = [("a", "c"), ("c", "a")][number % 2]
        place.do_asks(waits)
        page.listen(5.0 + number % 4)
        place.do_rests(runs)
        replay.wait("the next has it", lambda: replay.state(waits) == "active")  # noqa: B023
    runs = "c" if earlier % 2 else "a"
    name = f"gamma{earlier}"
    page.open_notebook(place.labs[0].folder / "files", WORK.format(flag=str(flag)), name)
    page.run("jupyterapp.commands.execute('notebook:run-cell').catch(() => undefined);")
    label = f"{name}.ipynb"
    replay.wait("it waits", lambda: replay.state(label) == "queued")
    # The agent shows the text about a wait in the cell only after some seconds. So wait for it.
    script = f"const path = {json.dumps(label)};" + READ
    replay.wait("the cell's line", lambda: page.run(script)["cell"])
    begun = time.time()
    while time.time() - begun < 5 * LOOK - 1:
        replay.look(scene, label)
        page.listen(LOOK)
        if earlier and time.time() - begun > 2 * LOOK:
            break
    place.do_rests(runs)
    replay.wait("it has its slice", lambda: replay.state(label) == "active")
    replay.happens("it has its slice")
    flag.write_text("")
    replay.wait("it ends", lambda: replay.state(label) == "idle")


def mine(replay: Replay, name: str) -> str:
    """Open a notebook and run one short cell with 2 GiB; return its label."""
    source = "%gpu 2GiB" + WORK.format(flag="/")
    replay.page.open_notebook(replay.place.labs[0].folder / "files", source, name)
    replay.page.run("jupyterapp.commands.execute('notebook:run-cell').catch(() => undefined);")
    replay.wait("it is idle", lambda: replay.state(f"{name}.ipynb") == "idle")
    replay.page.listen(1.0)
    return f"{name}.ipynb"


def countdown(replay: Replay) -> None:
    """The chip of an idle kernel counts down. Then another kernel asks for the kernel's slice."""
    scene, place = "idle, nobody waits; then somebody does", replay.place
    place.do_fresh(idle_timeout=3600, preempt=[])
    label = mine(replay, "quiet")
    for _ in range(3):
        replay.look(scene, label, magic=True)
        replay.page.listen(LOOK)
    replay.happens("it still has its slice")
    place.do_neighbour("bob", gib=6, hold=True)
    place.do_neighbour("cat", gib=7, hold=False)
    place.do_asks("cat")
    replay.page.listen(0.4)
    if replay.state(label) == "idle":
        replay.look(scene, label)
    replay.wait("it is in host memory", lambda: replay.state(label) == "detached")
    replay.happens("it is in host memory")


def neighbours(replay: Replay) -> None:
    """An idle notebook keeps its 2 GiB, because each of the two waiting kernels needs 6 GiB."""
    scene, place = "idle with 2 GiB, two wait for 6 GiB each", replay.place
    place.do_fresh(preempt=[])
    place.do_neighbour("cat", gib=5, hold=True)
    place.do_neighbour("bob", gib=6, hold=True)
    label = mine(replay, "between")
    for name in ("dan", "eve"):
        place.do_neighbour(name, gib=6, hold=False)
        place.do_asks(name)
    for _ in range(4):
        replay.page.listen(LOOK)
        replay.look(scene, label, magic=True)
    session, _ = replay.status(label)
    kept = session["state"] == "idle" and session["suspends"] == 0
    replay.happens("it still has its slice" if kept else "it was moved", right=kept)


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Replay the scenes; return each look with its outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="without the wait that has evidence")
    options = parser.parse_args(argv)
    place, page = stage(), None
    try:
        url = place.open()["url"]
        page = Page()
        page.open_lab(url)
        page.run("await jupyterapp.commands.execute('gpupool:show-panel')")
        replay = Replay(place, page, url)
        crowd(replay, 0)
        if not options.quick:
            crowd(replay, EARLIER)
        countdown(replay)
        neighbours(replay)
    finally:
        if page is not None:
            page.close()
        place.end()
    looks = replay.looks
    return {
        "emulated": True,
        "what": "figures in all places of the user interface, and whether they were true",
        "looks": [{**vars(seen), "same": seen.same} for seen in looks],
        "budgets": [
            budget("looks at which places disagreed", sum(not x.same for x in looks), 0, "looks"),
            budget("looks that said something untrue", sum(not x.right for x in looks), 0, "looks"),
        ],
    }


def table(result: dict[str, Any]) -> str:
    """Return the looks as a table in Markdown."""
    places = ("chip", "cell", "panel", "%gpu", "CLI")
    lines = [["Scene", "Broker", *places, "Same", "What happened", "True"]]
    lines.append(["---"] * len(lines[0]))
    for x in result["looks"]:
        shown = [x["figures"].get(place, "-") or "no time" for place in places]
        ok = ["yes" if x[name] else "NO" for name in ("same", "right")]
        true = " / ".join(dict.fromkeys(x["true"])) or "no time"
        lines.append([x["scene"], true, *shown, ok[0], x["happened"], ok[1]])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    print(table(main(sys.argv[1:])))
