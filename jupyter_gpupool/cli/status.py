# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter gpupool status``, ``why`` and ``release``: show the pool, and release a slice."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence, TextIO

from .. import starting, startrecord
from ..client import Client
from ..config import load_settings
from ..config.differences import notice
from ..endpoint import find_socket, is_machine_path
from ..errors import BrokerUnavailable, Code, ConfigError, RefusedError
from .picture import Style, draw, printable

#: Control sequences of xterm. ``_ENTER`` switches the terminal to its second screen and hides the
#: cursor; ``_LEAVE`` undoes both. Pictures on the second screen leave no lines in the scrollback.
_ENTER = "\x1b[?1049h\x1b[?25l"
_LEAVE = "\x1b[?25h\x1b[?1049l"


def socket_path(given: str) -> Path:
    """Return the broker's socket: from ``--socket``, from the configuration, or by a search."""
    if given:
        return Path(given)
    try:
        configured = load_settings().socket
    except ConfigError as error:
        # Only warn: a broker may still run with an earlier configuration that had no mistakes.
        print(f"Warning: {error}", file=sys.stderr)
        configured = ""
    return find_socket(configured)


def style_for(stream: TextIO, environ: Mapping[str, str] = os.environ) -> Style:
    """Return the style for ``stream``: only a terminal has colours, and NO_COLOR turns them off."""
    terminal = stream.isatty()
    width = shutil.get_terminal_size((100, 24)).columns or 100
    colour = terminal and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
    encoding = (getattr(stream, "encoding", "") or "").lower().replace("-", "")
    return Style(width=max(40, width), colour=colour, unicode=encoding.startswith("utf"))


def show_status(socket: str, *, as_json: bool, watch: bool, interval: float) -> int:
    """Print the pool once, or with ``watch`` again and again until ``^C``; return the exit code."""
    path = socket_path(socket)
    if watch:
        return _watch(path, as_json=as_json, interval=interval)
    snapshot = _snapshot(path)
    if as_json:
        print(json.dumps(snapshot, indent=2))
    else:
        print("\n".join(draw(snapshot, style_for(sys.stdout))))
        text = notice(None, snapshot, who="This command")
        if text:
            print(f"\n{text}")
    return 0


def connect(path: Path) -> Client:
    """Return a connection to the broker.

    If the broker has died, this function first starts a new one.
    """
    try:
        return Client(path)
    except BrokerUnavailable as error:
        if is_machine_path(path) and error.code != Code.BAD_SOCKET:
            raise BrokerUnavailable(
                error.message,
                code=error.code,
                next_step="This is the machine's broker. The service manager restarts it, and "
                "cells that need a GPU wait until then. If it does not start: systemctl status "
                "gpupool.",
            ) from None
        if not startrecord.can_revive(path) and not startrecord.can_restore(path):
            raise
    print("The GPU pool's broker has died; starting it again.", file=sys.stderr)
    starting.revive(path)
    return Client(path)


def _snapshot(path: Path) -> dict[str, Any]:
    with connect(path) as client:
        return _clean(client.call("status"))


def _clean(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a broker's answer without the protocol's fields (version, type and id)."""
    return {key: value for key, value in message.items() if key not in ("v", "type", "id")}


def _watch(path: Path, *, as_json: bool, interval: float) -> int:
    """Draw the pool every ``interval`` seconds until ``^C``; return 0.

    If the connection is lost, this function connects again, but only if it draws on a terminal.

    Raises
    ------
    BrokerUnavailable
        If no broker answers the first call, or the connection is lost and the output is not a
        terminal or is JSON.
    """
    screen = sys.stdout.isatty() and not as_json
    client: Client | None = None
    try:
        client = connect(path)  # raises an error at once if the socket is wrong
        if screen:
            sys.stdout.write(_ENTER)
        while True:
            try:
                if client is None:
                    client = connect(path)
                snapshot = _clean(client.call("status"))
                lines = (
                    [json.dumps(snapshot, separators=(",", ":"))]
                    if as_json
                    else draw(snapshot, style_for(sys.stdout))
                )
            except BrokerUnavailable as error:
                _drop(client)
                client = None
                if not screen:
                    raise
                lines = [str(error), "", "Trying again ..."]
            _frame(lines, screen=screen)
            time.sleep(interval)
    except KeyboardInterrupt:
        return 0
    finally:
        if screen:
            sys.stdout.write(_LEAVE)
            sys.stdout.flush()
        _drop(client)


def _drop(client: Client | None) -> None:
    if client is not None:
        client.close()


def _frame(lines: Sequence[str], *, screen: bool) -> None:
    if not screen:
        print("\n".join(lines), flush=True)
        return
    # Python 3.10 returns 0 lines for a terminal that does not know its size.
    height = shutil.get_terminal_size().lines or 24
    shown = list(lines[: height - 1])
    if len(shown) < len(lines):
        shown[-1] = f"({len(lines) - len(shown) + 1} more lines; make the window higher)"
    # To avoid flicker, draw the whole picture with one write, and do not clear the screen first.
    # Clear only the rest of each line after its text, and the screen below the last line.
    sys.stdout.write("\x1b[H" + "".join(line + "\x1b[K\n" for line in shown) + "\x1b[J")
    sys.stdout.flush()


def release(socket: str, name: str, *, say: Callable[[str], None] = print) -> int:
    """Release the slice of the session that ``name`` means (see :func:`find_session`).

    Raises
    ------
    RefusedError
        If no session or several sessions match, or the broker refuses.
    """
    with connect(socket_path(socket)) as client:
        session = find_session(name, client.call("status")["sessions"])
        answer = client.call("release", session=session)
    say(answer.get("note") or f"Session {session} gives its slice back.")
    return 0


def why(socket: str, name: str, *, as_json: bool) -> int:
    """Print why a session waits, or who may take its slice; see :func:`find_session` for ``name``.

    Raises
    ------
    RefusedError
        If no session or several sessions match, or the session belongs to another user.
    """
    with connect(socket_path(socket)) as client:
        session = find_session(name, client.call("status")["sessions"])
        answer = _clean(client.call("why", session=session))
        if answer.get("clustered") and answer["state"] == "queued":
            answer |= _clean(client.call("elsewhere", session=session))
    if as_json:
        print(json.dumps(answer, indent=2))
        return 0
    print("\n".join(why_lines(answer, style_for(sys.stdout).width)))
    return 0


def why_lines(answer: Mapping[str, Any], width: int) -> list[str]:
    """Return the explanation of a session as lines of at most ``width`` columns."""
    owner, group = printable(str(answer["owner"])), printable(str(answer["group"]))
    whose = f"{owner}, group {group}" if group else owner
    lines = [f"Session {answer['session']} ({whose}):"]
    for part in (answer["lines"], answer["standing"], answer.get("machines", ())):
        lines += [""] if part else []
        for sentence in part:
            lines += textwrap.wrap(printable(sentence), width, subsequent_indent="  ")
    return lines


def _refuse_ended(name: str) -> None:
    """Raise an error if ``name`` is a detached program that has ended and so has no session."""
    from ..programs import runfiles

    found = runfiles.read(name) if runfiles.is_name(name) else None
    record = found.now() if found is not None else None
    if record is not None and not record.lives:
        raise RefusedError(
            f"The program {name!r} no longer has a session; it {record.describe(time.time())}.",
            code=Code.NOT_RUNNING,
            next_step=f"Its output: jupyter gpupool logs {name}",
        )


def find_session(name: str, sessions: Sequence[Mapping[str, Any]]) -> str:
    """Return the id of the one session that ``name`` means.

    ``name`` may be a session id, a kernel id, or the beginning of one of these ids. It may also be
    the label of the session: the name of a program or of a notebook.
    """
    matches = [
        s["id"]
        for s in sessions
        if name and (s["id"].startswith(name) or str(s.get("kernel_id") or "").startswith(name))
    ]
    exact = [s["id"] for s in sessions if name in (s["id"], s.get("kernel_id"))]
    if len(exact) == 1:
        return str(exact[0])
    matches = matches or [s["id"] for s in sessions if name and s.get("label") == name]
    if not matches:
        _refuse_ended(name)
        raise RefusedError(
            f"No session has the name {name!r}, and no session or kernel id begins with it.",
            code=Code.UNKNOWN_SESSION,
            next_step="`jupyter gpupool status` lists them.",
        )
    if len(matches) > 1:
        raise RefusedError(
            f"{len(matches)} sessions match {name!r}: {', '.join(sorted(matches)[:6])}.",
            code=Code.AMBIGUOUS_SESSION,
            next_step="Write the id of one of them.",
        )
    return str(matches[0])
