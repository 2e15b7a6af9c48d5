# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``make gpu``: run the tests and benchmarks that need a real GPU, in one or more runs.

The command writes each item's outcome when the item ends. The next run skips the items that have an
outcome. Exit code: 0 if all items have ended well, 1 if an item has failed, 2 if there was no time
for some items.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS
from jupyter_gpupool.devices import vendor

from . import plan, record, runner

#: The folder of a rehearsal on emulated devices. Its outcomes say nothing about a real GPU.
REHEARSAL = record.ROOT / "run-output"

#: The device name of a rehearsal.
EMULATED = {"name": "EMULATED", "driver": "none", "memory_bytes": 0, "devices": 0}


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="ITEM", help="these only, also once more")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="begin nothing that may end later"
    )
    parser.add_argument("--again", action="store_true", help="begin a new record")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, smaller sizes")
    parser.add_argument("--out", type=Path, help="folder of the record")
    parser.add_argument("--rehearse", action="store_true", help="on emulated devices")
    parser.add_argument("--list", action="store_true", help="say what would be run, and end")
    options = parser.parse_args()
    try:
        items = plan.named(options.names)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        print("\n".join(f"{item.bound:4d} s at most  {item.name}" for item in items))
        return 0
    if options.rehearse == vendor.driver_present():
        print(
            "A rehearsal is for a machine without an NVIDIA driver, and this one has one."
            if options.rehearse
            else "There is no NVIDIA driver on this machine. To see that the tests themselves "
            "hold: python -m benchmarks.gpu --rehearse (its figures say nothing about a GPU).",
            file=sys.stderr,
        )
        return 1
    if not options.rehearse:
        runner.keep_driver_up()
    device = EMULATED if options.rehearse else record.gpu()
    folder = options.out or (REHEARSAL if options.rehearse else RESULTS)
    book = record.Record.at(folder, device, again=options.again)
    with book.claimed() as alone:
        if alone:
            return go_through(items, book, options)
    print(f"Another run is at it: {book.path} is in use. Wait for its end.", file=sys.stderr)
    return 1


def go_through(items: tuple[plan.Item, ...], book: record.Record, options: Any) -> int:
    """Run each item without an outcome, if the time left is enough for it; return the exit code."""
    runner.adopt_orphans()
    end = time.monotonic() + options.minutes * 60
    ended = book.ended()
    source = record.source()
    for item in items:
        if item.name in ended and item.name not in options.names:
            continue
        left = end - time.monotonic()
        if item.bound > left:
            print(f"-- {item.name}: later, it may take {item.bound} s and {left:.0f} s are left")
            continue
        print(f"-- {item.name}: at most {item.bound} s", flush=True)
        line = runner.run(item, quick=options.quick, real=not options.rehearse)
        line |= {"source": source, "quick": options.quick}
        try:
            book.add(line)
        except OSError as error:  # the disk may be full, so print the outcome
            print(f"   {book.path} cannot be written ({error}): {json.dumps(line)}", flush=True)
        ended[item.name] = line
        print(f"   {told(line)}", flush=True)
        if line["outcome"] in ("failed", "hung"):
            print("   | " + line["output"][-1500:].replace("\n", "\n   | "), flush=True)
    later = [item.name for item in items if item.name not in ended]
    done = [item.name for item in items if item.name in ended]
    bad = [name for name in done if ended[name]["outcome"] not in ("passed", "left out")]
    print(f"\n{len(done)} of {len(items)} have ended, {len(bad)} not well: {book.path}")
    for name in bad:
        print(f"   {ended[name]['outcome']}: {name}")
    if later:
        print("Run it again for " + ", ".join(later))
    return 1 if bad else 2 if later else 0


def told(line: dict[str, Any]) -> str:
    """Return an outcome as a line of text."""
    text = f"{line['outcome']} in {line['seconds']:g} s"
    if "tests" in line:
        counts: dict[str, int] = {}
        for test in line["tests"]:
            counts[test["outcome"]] = counts.get(test["outcome"], 0) + 1
        text += ": " + ", ".join(f"{number} {what}" for what, number in sorted(counts.items()))
    return text + (f"; left behind: {line['left']}" if "left" in line else "")


if __name__ == "__main__":
    raise SystemExit(main())
