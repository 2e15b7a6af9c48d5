# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter gpupool run``, ``ps``, ``logs``, ``stop`` and ``wait``: the commands for programs."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from ..errors import GPUPoolError
from ..units import format_bytes, parse_seconds
from .registry import JSON, SOCKET, Options, argument, command

if TYPE_CHECKING:
    from ..programs.runfiles import RunRecord

_GROUP = "Programs in the pool"

_RUN_CODES = (
    "Exit codes: the code of COMMAND, or 128+n if signal n ended COMMAND; 125: the pool\n"
    "refused, or --max-wait was over (standard error says why); 126: COMMAND is not a\n"
    "program; 127: COMMAND does not exist; 2: wrong usage."
)

_WAIT_CODES = (
    "Exit codes: the code of the program; 125: no process recorded the program's end; 1: there\n"
    "is no such program."
)


def _seconds(text: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _per_cent(text: str) -> int:
    number = text.removesuffix("%").rstrip()
    if not number.isdecimal() or not 1 <= int(number) <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage from 1 to 100")
    return int(number)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GPUs: write 1 or more")
    return int(text)


def _signal_number(text: str) -> int:
    name = text.upper().removeprefix("SIG")
    known = {one.name.removeprefix("SIG"): one.value for one in signal.Signals}
    number = int(name) if name.isdigit() else known.get(name, 0)
    if number not in known.values():
        raise argparse.ArgumentTypeError(f"{text!r} is not a signal")
    return number


NAME = argument("name", metavar="NAME", help="as `jupyter gpupool ps` shows it")


@command(
    _GROUP, "run any program with a GPU slice: it waits for its turn, and yields as a kernel does",
    SOCKET,
    argument("--memory", default="", metavar="SIZE", help="device memory, such as 8GiB"),
    argument(
        "--limit", default="", metavar="SIZE",
        help="device memory to which it may grow while there is room",
    ),
    argument("--devices", type=_count, default=0, metavar="N", help="GPUs, each with that memory"),
    argument(
        "--compute", type=_per_cent, default=0, metavar="PERCENT",
        help="share of a GPU's compute time while others compute on it, too",
    ),
    argument("--class", dest="priority", default="", metavar="CLASS", help="priority class"),
    argument(
        "--group", default="", metavar="GROUP",
        help="the program uses the share of this group of yours (default: your first group)",
    ),
    argument("--name", default="", metavar="NAME", help="name of the program in the pool"),
    argument(
        "--max-wait", type=_seconds, metavar="TIME",
        help="give up if the first slice does not come within this time, such as 10m",
    ),
    argument(
        "--attach", choices=("lazy", "hold"), default="lazy",
        help="lazy: the program gets its slice at its first CUDA call (default); hold: it has its "
        "slice from start to end; a pool without a guard always uses hold",
    ),
    argument(
        "--detach", "-d", action="store_true",
        help="run in the background, without a terminal, and print its name",
    ),
    argument(
        "words", nargs=argparse.REMAINDER, metavar="COMMAND",
        help="the program and its arguments, after --",
    ),
    exit_codes=_RUN_CODES,
)  # fmt: skip
def _run(options: Options) -> int:
    from ..programs.terminal import NOT_RUN, cannot_run

    words: list[str] = options.words[1:] if options.words[:1] == ["--"] else options.words
    if not words:
        print(
            "jupyter gpupool run: a command is missing. See `jupyter gpupool run --help`.",
            file=sys.stderr,
        )
        return 2
    code, problem = cannot_run(words[0], os.environ)
    if problem:
        print(f"jupyter gpupool run: {problem}", file=sys.stderr)
        return code
    try:
        return _run_words(options, words)
    except GPUPoolError as error:
        print(f"jupyter gpupool run: {error}", file=sys.stderr)
        return NOT_RUN


def _run_words(options: Options, words: Sequence[str]) -> int:
    from ..programs.execution import Run, RunOptions
    from ..programs.opening import Asked, read_size
    from ..programs.progress import Progress
    from ..programs.terminal import CommandProcess, fill_standard_streams

    run_options = RunOptions(
        asked=Asked(
            memory=read_size(options.memory, "memory"),
            limit=read_size(options.limit, "limit"),
            devices=options.devices,
            compute=options.compute,
            priority=options.priority,
            group=options.group,
        ),
        name=options.name or os.path.basename(words[0]),
        holds=options.attach == "hold",
        max_wait=options.max_wait,
        socket=options.socket,
        named=bool(options.name),
    )
    fill_standard_streams()
    if options.detach:
        from ..programs.detached import start

        print(start(words, run_options, options.name))
        return 0
    child = CommandProcess(words)
    # Replace this process's standard input and output with /dev/null, so that only the user's
    # program has them open. When the program closes its output, a reader sees the end at once.
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)

    def write(text: str) -> None:
        try:
            os.write(2, text.encode())
        except OSError:
            pass  # the terminal has closed, but the command continues

    screen = 2 if os.isatty(2) else None
    return Run(child, run_options, Progress(write, screen, "jupyter gpupool run: ")).run()


@command(_GROUP, "list the programs that were started with run --detach", JSON)
def _ps(options: Options) -> int:
    from ..programs import runfiles

    records = runfiles.every()
    sessions = _sessions(records)
    if options.json:
        rows = [{**asdict(r), "gpu": _gpu(r, sessions)} for r in records]
        print(json.dumps(rows, indent=2))
        return 0
    print("\n".join(table(records, sessions, time.time())))
    return 0


def table(
    records: Sequence[RunRecord], sessions: Mapping[str, Mapping[str, Any]], now: float
) -> list[str]:
    """Return the lines of ``ps``; ``sessions`` are the broker's sessions by id."""
    if not records:
        return ["No program runs detached. Start one with: jupyter gpupool run --detach -- COMMAND"]
    rows = [("NAME", "STATE", "GPU", "COMMAND")]
    for record in records:
        words = shlex.join(record.command)
        text = words if len(words) <= 60 else f"{words[:57]}..."
        rows.append((record.name, record.describe(now), _gpu(record, sessions) or "-", text))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    refused = [record.name for record in records if record.reason and record.code is not None]
    if refused:
        lines += ["", f"Its output says what to do next: jupyter gpupool logs {refused[-1]}"]
    return lines


def _gpu(record: RunRecord, sessions: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a text about a program's slice or state in the pool; "" if it has no session."""
    session = sessions.get(record.session)
    if session is None or not record.lives:
        return ""
    if session.get("granted_bytes"):
        return str(format_bytes(session["granted_bytes"]))
    if session.get("queue_position"):
        state = "preempted" if session.get("preempted") else "waits"
        return f"{state}, {session['queue_position']} of {session.get('queue_length')}"
    if session.get("suspended_bytes"):
        return f"{format_bytes(session['suspended_bytes'])} in host memory"
    return ""


def _sessions(records: Sequence[RunRecord]) -> dict[str, Mapping[str, Any]]:
    """Return the sessions of these programs by id, from each broker that answers."""
    from ..client import Client

    found: dict[str, Mapping[str, Any]] = {}
    for socket in {record.socket for record in records if record.lives and record.socket}:
        try:
            with Client(Path(socket)) as client:
                found.update((s["id"], s) for s in client.call("status")["sessions"])
        except GPUPoolError:
            continue
    return found


@command(
    _GROUP, "print what a detached program has printed",
    NAME,
    argument("--follow", "-f", action="store_true", help="go on until the program ends"),
)  # fmt: skip
def _logs(options: Options) -> int:
    from ..programs.detached import copy_log

    return copy_log(options.name, follow=options.follow)


@command(
    _GROUP, "end a detached program",
    NAME,
    argument(
        "--signal", type=_signal_number, default=signal.SIGTERM.value, metavar="SIGNAL",
        help="the signal to send first (default: TERM)",
    ),
    argument(
        "--after", type=_seconds, default=10.0, metavar="TIME",
        help="send KILL if it still runs after this time (default: 10s)",
    ),
)  # fmt: skip
def _stop(options: Options) -> int:
    from ..programs.detached import stop

    record = stop(options.name, options.signal, options.after)
    print(f"{record.name} {record.describe(time.time())}.")
    return 0


@command(
    _GROUP, "wait until a detached program has ended, and exit with its code", NAME,
    exit_codes=_WAIT_CODES,
)  # fmt: skip
def _wait(options: Options) -> int:
    from ..programs.detached import exit_code, wait

    record = wait(options.name, None)
    assert record is not None
    if record.code is None or record.reason:
        print(
            f"jupyter gpupool wait: {record.name} {record.describe(time.time())}.", file=sys.stderr
        )
    return exit_code(record)
