# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Write ``residence.md`` from the latest figures of ``benchmarks/residence.py``.

Run ``python docs/make_residence.py``. With ``--check``, it writes nothing and only checks whether
the page is up to date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE / "residence.md"
RESULTS = HERE.parent / "benchmarks" / "results"

BEFORE = """\
<!-- Written by docs/make_residence.py from benchmarks/results; do not edit. -->

# How long an idle kernel keeps its GPU

Where two kernels want the same GPU in turn, each change moves the state of one to host memory and
that of the other back. While it copies, the GPU computes nothing. If a kernel that pauses for a
moment lost its slice at once, the two would move each other all day; if it kept the slice for
long, the other would wait for an idle GPU. When the kernel comes back, nobody knows in advance.
That is the *ski-rental problem*: to rent day by day, or to buy.

The rule applies to kernels that were moved to their slice, and only while another kernel waits:

- A kernel that computes nothing is protected until another kernel has waited for as long as its
  move takes (out and in again, as measured; the time in which its copies waited for those of
  other kernels counts, so where a GPU does little else than copy, moves become fewer). This alone
  never loses more than twice as much as the best decision in hindsight (Karlin, Manasse, Rudolph
  and Sleator, *Competitive snoopy caching*, Algorithmica 3, 1988).
- Its last eight pauses may shorten that: a kernel that always stays away for longer than a move
  takes is not protected at all (Karlin, Li, Manasse and Owicki, *Empirical studies of
  competitive spinning for a shared-memory multiprocessor*, SOSP 1991). A wrong guess costs one
  move at most until right guesses have made up for it. So over any sequence of pauses the rule
  loses at most twice as much as the best decisions in hindsight, plus one move.
- A kernel's computing time since it came back, and the time in which it kept the GPU idle while
  another kernel waited, pay for the move: after (time of the move) ÷ `max_swap_overhead`, ten
  minutes at most, the pool may take its slice in its next idle moment. So loops that contend
  without end spend at most that share of their time on moves, and a loop that computes little
  cannot keep others out.
- Under `lazy`, a kernel counts as idle `quiet_after` after its last CUDA call. While a kernel
  waits, the end of its cell counts at once, if no call is in flight and no thread continues.
  (Kernels in other languages than Python have no agent to report this; for them `quiet_after`
  holds.)

`pool/residence.py` has the rule and its worst cases, `tests/pool/test_residence.py` tests it
against an adversary.

## Figures
"""

INTRODUCTION = """
Simulated: two kernels on one GPU, each of which needs all of it. A cell computes for {cell:g} s
(from half to one and a half times that), then its user thinks (likewise). A copy runs at 4 GB/s
out and 7 GB/s in, plus 0.3 s each, as others have measured with NVIDIA's driver; nothing
here was measured on a GPU. `max_swap_overhead` is {share:g}. *Now* is the rule above. *Before* is
the earlier rule: a kernel stays for (time of the move) ÷ `max_swap_overhead` from its return,
whether it computes or not. *Moving* is the part of the time in which the GPU copies, *idle* the
part in which it does nothing while a kernel waits. A cell whose kernel still has its slice waits
0 s, so if cells follow each other quickly, the median is 0 and the longest wait shows more.
"""

AFTER = """
How to read it: if pauses are much shorter than the move (upper rows), both rules are the same: a
stay pays for the move, and moves take a tenth of the time. If pauses are much longer than the move
(lower rows), the GPU has time for both kernels, and a cell waits for little more than the move. In
between, if pauses are about as long as the move, moves take about half of the time; for most of
that time the GPU would otherwise be idle while a kernel waits. In the worst row the GPU computes
{worst:.0f} % less than under the earlier rule, in the best row {best:.0f} % more.
"""


KERNELS = """
Two real kernels on an *emulated* GPU with {gib:g} GiB each, whose cells of a millisecond take
turns (each begins when the other's ends; `python -m benchmarks.residence --kernels`): under the
earlier rule a cell took {before[cell_p50_s]:.1f} s (p50; longest {before[cell_max_s]:.1f} s) with
a move of {before[swap_s]:.1f} s, now {now[cell_p50_s]:.1f} s ({now[cell_max_s]:.1f} s) with
a move of {now[swap_s]:.1f} s.
"""

HEADER = (
    "| think time | wait p50, now | before | p90, now | before | longest, now | before "
    "| moving, now | before | idle, now | before |"
)


def latest(name: str = "residence") -> dict[str, Any]:
    """Return the result of the benchmark ``name`` with the latest date in its file name."""
    files = sorted(RESULTS.glob(f"{name}-*.json"), key=lambda path: path.stem[-10:])
    found: dict[str, Any] = json.loads(files[-1].read_text())
    return found


def page(result: dict[str, Any]) -> str:
    """Return the text of the page."""
    lines = [BEFORE, INTRODUCTION.format(cell=result["cell_s"], share=result["share"]).lstrip()]
    for gib in dict.fromkeys(row["gib"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["gib"] == gib]
        lines += [
            f"### State of {gib:g} GiB: a move takes {rows[0]['work']['swap_s']:.1f} s",
            "",
            HEADER,
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            pairs = [
                f"{row[rule][name]:.1f} s"
                for name in ("wait_p50_s", "wait_p90_s", "wait_max_s")
                for rule in ("work", "clock")
            ]
            pairs += [
                f"{100 * row[rule][name]:.0f} %"
                for name in ("moving_share", "idle_share")
                for rule in ("work", "clock")
            ]
            lines.append(f"| {row['think_s']:g} s | {' | '.join(pairs)} |")
        lines.append("")
    gains = [
        100 * (row["work"]["computing_share"] / row["clock"]["computing_share"] - 1)
        for row in result["rows"]
    ]
    after = AFTER.format(worst=-min(gains), best=max(gains))
    return "\n".join(lines) + after + KERNELS.format(**latest("residence_kernels"))


def main() -> int:
    """Write the page, or with ``--check`` compare it with the file; return the exit status."""
    text = page(latest())
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE.name} is out of date: run `python docs/make_residence.py`.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
