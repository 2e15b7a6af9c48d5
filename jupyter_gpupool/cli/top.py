# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter gpupool top``: a full-screen table of the pool's sessions, with keys for orders.

If the input or the output is not a terminal, the command prints the table once.
"""

from __future__ import annotations

import curses
import sys
import time
from contextlib import suppress
from typing import Any

from ..client import Client
from ..errors import BrokerUnavailable, GPUPoolError
from .maintenance import TEST_TIMEOUT
from .status import connect, socket_path, style_for
from .top_keys import Top, TopOrder
from .top_table import head, in_order, lines, rows

_NAMES = {
    curses.KEY_UP: "up", curses.KEY_DOWN: "down", curses.KEY_PPAGE: "pageup",
    curses.KEY_NPAGE: "pagedown", curses.KEY_HOME: "home", curses.KEY_END: "end",
    curses.KEY_F1: "f1", curses.KEY_F9: "f9", curses.KEY_F10: "q", curses.KEY_ENTER: "enter",
    curses.KEY_BACKSPACE: "backspace", 10: "enter", 13: "enter", 27: "escape", 127: "backspace",
    8: "backspace",
}  # fmt: skip


def show_top(socket: str, *, sort: str, interval: float) -> int:
    """Show the sessions until the user types ``q``; return 0.

    If the input or the output is not a terminal, print the sessions once.
    """
    path = socket_path(socket)
    with connect(path) as client:
        snapshot = client.call("status")
        if not (sys.stdout.isatty() and sys.stdin.isatty()):
            style = style_for(sys.stdout)
            print("\n".join(head(snapshot, style)), end="\n\n")
            print("\n".join(lines(in_order(rows(snapshot), sort), sort, style)))
            return 0
        top = Top(sort=sort)
        top.update(snapshot)
        with suppress(KeyboardInterrupt):
            curses.wrapper(lambda screen: _run(screen, client, top, interval))
    return 0


def _run(screen: Any, client: Client, top: Top, interval: float) -> None:
    curses.set_escdelay(25)
    with suppress(curses.error):
        curses.curs_set(0)
    looked = time.monotonic()
    while True:
        _draw(screen, top)
        left = looked + interval - time.monotonic()
        screen.timeout(max(0, round(1000 * left)))
        code = screen.getch()
        if code not in (-1, curses.KEY_RESIZE):
            key = _NAMES.get(code, chr(code) if 0 <= code < 256 else "")
            if key == "q" and top.question is None and not top.help:
                return
            order = top.press(key)
            if order is None:
                continue
            _obey(client, top, order)
        elif left > 0 and code == curses.KEY_RESIZE:
            continue
        looked = time.monotonic()
        top.update(client.call("status"))


def _obey(client: Client, top: Top, order: TopOrder) -> None:
    """Send an order, and show the broker's answer or its refusal."""
    try:
        answer = client.call(order.kind, **order.fields, timeout=TEST_TIMEOUT)
    except BrokerUnavailable:
        raise
    except GPUPoolError as error:
        top.message = str(error)
    else:
        top.message = str(answer.get("note") or "Done.")


def _draw(screen: Any, top: Top) -> None:
    height, width = screen.getmaxyx()
    style = style_for(sys.stdout)
    style = type(style)(width=max(20, width - 1), colour=False, unicode=style.unicode)
    found, selected = top.picture(style, height)
    screen.erase()
    for number, line in enumerate(found[:height]):
        look = curses.A_REVERSE if number == selected else curses.A_NORMAL
        with suppress(curses.error):  # an error after the last column of the last line is normal
            screen.addnstr(number, 0, line, width - 1, look)
    screen.refresh()
