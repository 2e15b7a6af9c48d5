# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter gpupool top``: the table, the keys, and a real terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from snapshots import GiB, attached, device, pool, session

from jupyter_gpupool.cli import main
from jupyter_gpupool.cli.picture import Style
from jupyter_gpupool.cli.top_keys import Top, TopOrder, parse_minutes
from jupyter_gpupool.cli.top_table import in_order, lines, rows

ROOT = Path(__file__).parents[2]


def crowd(**changes):
    """A pool with four kernels: busy, idle, waiting, and another user's kernel without figures."""
    return pool(
        devices=[device(memory_granted=12 * GiB, utilisation=41)],
        sessions=[
            attached(
                "aaaa", "active", 4 * GiB, label="work.ipynb",
                used_bytes=3 * GiB, busy_seconds=90.0, counted_seconds=100.0,
            ),
            attached(
                "bbbb", "idle", 8 * GiB, label="hog.ipynb", owner="bob", idle_since=400.0,
                used_bytes=GiB, busy_seconds=0.5, counted_seconds=700.0, keep_until=4600.0,
            ),
            session("cccc", state="queued", queued_at=960.0, label="next.ipynb"),
            {"id": "dddd", "owner": "other", "state": "idle", "granted_bytes": GiB, "devices": []},
        ],
        queue_length=1, admin=True, limits={"priorities": ["batch", "notebook"]}, **changes,
    )  # fmt: skip


@pytest.fixture
def top():
    found = Top()
    found.update(crowd())
    return found


def press(top, *keys):
    """Press the keys. Return the last order that they send to the broker, or None."""
    found = None
    for key in keys:
        found = top.press(key) or found
    return found


def typed(text):
    return [*text, "enter"]


def test_waste_is_slice_size_times_seconds_without_cuda_calls():
    found = {row.id: row for row in rows(crowd())}
    assert (found["bbbb"].unused, found["bbbb"].waste) == (699.5, 699.5 * 8 * GiB)
    assert found["aaaa"].busy == 0.9
    assert (found["cccc"].waits, found["cccc"].waste) == (40.0, None)
    assert [row.id for row in in_order([*found.values()], "waste")] == [
        "bbbb", "aaaa", "cccc", "dddd",
    ]  # fmt: skip


def test_wait_is_rounded_as_in_all_other_views():
    now = crowd()["now"]
    waits = {**crowd()["sessions"][0], "state": "queued", "queued_at": now - 88.0}
    (line,) = lines(rows({**crowd(), "sessions": [waits]}), "waste", Style(width=200))[1:]
    assert line.endswith(" 60 s")


def test_unknown_values_stay_last_when_the_order_is_inverted():
    found = [row.id for row in in_order(rows(crowd()), "waste", inverted=True)]
    assert found == ["aaaa", "bbbb", "cccc", "dddd"]


@pytest.mark.parametrize("key", ["d", "n", "k"])
def test_keys_do_nothing_before_the_first_status(key):
    top = Top()
    assert press(top, key) is None
    assert top.question is None


def test_top_prints_the_table_without_a_terminal(broker, capsys):
    broker.answers["status"] = crowd()
    assert main(["top", "--sort", "slice"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "GPU pool  EMULATED  1 GPU, 3 of 4 kernels have a slice, 1 waiting"
    assert out[1].endswith("] 12 GiB of 16 GiB granted, 41 % busy")
    assert "SLICE▼" in out[3]
    assert out[4].split() == [
        *("bbbb", "bob", "hog.ipynb", "0", "idle", "8", "GiB", "1", "GiB", "0%"),
        *("12", "min", "10", "min", "60", "min"),
    ]


def test_selection_stays_on_its_session_while_the_order_changes(top):
    assert top.row.id == "bbbb"
    press(top, "down")
    assert top.row.id == "aaaa"
    press(top, "P")
    assert (top.sort, top.row.id) == ("busy", "aaaa")
    press(top, ">", "I")
    assert (top.sort, top.inverted, top.row.id) == ("unused", True, "aaaa")
    top.update(pool(admin=True))
    assert top.row is None


def test_release_asks_for_minutes_and_then_for_yes(top):
    order = press(top, "r", *typed("5"), "y")
    assert order == TopOrder("recall", {"session": "bbbb", "minutes": 5.0})
    assert press(top, "r", *typed("5"), "n") is None
    assert top.message == "Nothing was changed."
    assert press(top, "r", *typed("5"), "escape") is None


@pytest.mark.parametrize("text", ["", "0", "-5", "nan", "inf", "ten", "10081", " "])
def test_minutes_must_be_a_number_above_zero(top, text):
    with pytest.raises(ValueError, match="is not a number of minutes above 0 and up to 10080"):
        parse_minutes(text)
    assert press(top, "r", *typed(text), "y", "enter") is None
    assert "not a number of minutes" in top.message
    assert top.question is not None, "it asks again"


def test_end_prioritise_drain_and_recall_need_a_confirmation(top):
    assert press(top, "k", "y") == TopOrder("end", {"session": "bbbb"})
    assert press(top, "f9", "enter") is None
    assert press(top, "n", *typed("batch"), "y") == TopOrder(
        "prioritise", {"session": "bbbb", "priority": "batch"}
    )
    assert press(top, "n", *typed("best"), "escape") is None
    assert press(top, "d", *typed("0"), "y") == TopOrder(
        "maintain", {"action": "drain", "device": "0"}
    )
    assert press(top, "p", *typed("7"), "y") is None
    assert press(top, "escape", "R", "y") == TopOrder("recall", {"session": "bbbb", "cancel": True})


def test_only_admins_are_asked_to_confirm_an_order():
    top = Top()
    top.update({**crowd(), "admin": False})
    assert press(top, "k") is None
    assert top.question is None
    assert top.message == "Only root, the broker's user and c.GPUPool.admins may do that."


def test_picture_fits_the_screen_and_shows_the_selected_line(top):
    for height in (6, 10, 40):
        found, at = top.picture(Style(width=60, unicode=False), height)
        assert len(found) <= height
        assert all(len(line) <= 60 for line in found)
        assert "bbbb" in found[at]


#: The bytes that a terminal sends for arrows, function keys and similar keys.
UP, DOWN, PAGE_UP, PAGE_DOWN = "\x1bOA", "\x1bOB", "\x1b[5~", "\x1b[6~"
HOME, END, F1, F9, F10, ESCAPE = "\x1bOH", "\x1bOF", "\x1bOP", "\x1b[20~", "\x1b[21~", "\x1b"


def keeps(session):
    """Return the order that ``R`` sends if ``session`` is selected."""
    return "recall", {"session": session, "cancel": True}


def drains(device="0", action="drain"):
    return "maintain", {"action": action, "device": device}


#: Pairs: the keys, and the order that the keys send (None: no order). At first, the table is sorted
#: by waste: bbbb, aaaa, cccc, dddd.
TYPED = [
    (DOWN + "Ry", keeps("aaaa")),
    (UP + "Ry", keeps("bbbb")),
    (END + "Ry", keeps("dddd")),
    (PAGE_UP + "Ry", keeps("bbbb")),
    (PAGE_DOWN + "Ry", keeps("dddd")),
    (HOME + "Ry", keeps("bbbb")),
    ("P" + HOME + "Ry", keeps("aaaa")),  # sorted by busy share
    (">" + HOME + "Ry", keeps("bbbb")),  # sorted by unused time
    ("<" + HOME + "Ry", keeps("aaaa")),
    ("." + HOME + "Ry", keeps("bbbb")),
    ("," + HOME + "Ry", keeps("aaaa")),
    ("I" + HOME + "Ry", keeps("bbbb")),  # the inverted order: the smallest first
    ("IT" + HOME + "Ry", keeps("bbbb")),
    ("M" + END + "Ry", keeps("cccc")),  # sorted by slice; cccc has none
    ("W" + HOME + "Ry", keeps("bbbb")),
    ("h" + DOWN + "Ry", keeps("bbbb")),  # the key that ends the help does nothing else
    ("?q" + F1 + F10 + "Ry", keeps("bbbb")),
    ("Rn", None),
    ("R" + ESCAPE, None),
    ("nbatchy\x7f\ry", ("prioritise", {"session": "bbbb", "priority": "batch"})),
    ("nbatch" + ESCAPE, None),
    ("ky", ("end", {"session": "bbbb"})),
    (F9 + "y", ("end", {"session": "bbbb"})),
    (F9 + "\r", None),
    ("d0\ry", drains()),
    ("p7\r0\ry", drains(action="pause")),  # no GPU 7 exists, so top asks again
    ("u0\ry", drains(action="resume")),
    ("xz\t\x00", None),
]


def test_keys_in_a_terminal_send_orders_to_the_broker(broker):
    """Use a real terminal: the broker gets the orders, and the screen shows the broker's answer."""
    broker.answers["status"] = crowd()
    for kind in ("prioritise", "end", "maintain"):
        broker.answers[kind] = {}
    broker.answers["recall"] = {"note": "The pool takes the slice back in 5 min."}
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "jupyter_gpupool.cli", "top", "--interval", "60"],
        stdin=follower, stdout=follower, stderr=follower, cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "LINES": "24", "COLUMNS": "100"},
    )  # fmt: skip
    os.close(follower)
    seen = b""

    def until(text):
        nonlocal seen
        end = time.monotonic() + 60
        while text not in seen:
            left = end - time.monotonic()
            assert left > 0, seen
            assert select.select([leader], [], [], left)[0], seen
            seen += os.read(leader, 65536)

    try:
        until(b"q quit")
        os.write(leader, b"r")
        until(b"how many minutes?")
        os.write(leader, b"5\r")
        until(b"y/n")
        os.write(leader, b"y")
        until(b"slice back in 5 min.")
        os.write(leader, "".join(keys for keys, _ in TYPED).encode() + b"q")
        until(b"\x1b[?1049l")  # back to the normal screen
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(60)
        os.close(leader)
    given = [("recall", {"session": "bbbb", "minutes": 5.0}), *(o for _, o in TYPED if o)]
    sent = [request for request in broker.requests if request["type"] != "status"]
    assert [request["type"] for request in sent] == [kind for kind, _ in given]
    assert [{**request, **fields} for request, (_, fields) in zip(sent, given, strict=True)] == sent
