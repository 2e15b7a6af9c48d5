# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Compares the whole picture of the pool with the expected text, column by column."""

from __future__ import annotations

import re

import pytest
from snapshots import UUIDS, GiB, MiB, attached, device, pool, session

from jupyter_gpupool.cli import top_table
from jupyter_gpupool.cli.picture import Style, columns, draw

BUSY = pool(
    devices=[
        device(
            0,
            tier="guarded",
            memory_granted=10 * GiB,
            memory_foreign=2 * GiB,
            memory_free=4 * GiB,
            utilisation=41,
        ),
        device(1, drained_reason="Xid 79, the GPU has fallen off the bus", memory_free=None),
    ],
    sessions=[
        session("77aa33", owner="bob", state="queued", queue_position=1,
                expected={"since": 1024.0, "until": 1058.0},
                wait_reason="no GPU has 8 GiB free", wait_seconds_total=7,
                request={"memory": 8 * GiB, "devices": 2}),
        attached("9c0d22", "idle", 4 * GiB, idle_since=960.0, footprint_bytes=512 * MiB,
                 label="viz.ipynb", pinned_reason="it uses managed memory"),
        attached("3f2a1b9c0d11", "active", 6 * GiB, footprint_bytes=GiB, used_bytes=3 * GiB,
                 wait_seconds_total=12),
        session("b00c44", suspended_bytes=5 * GiB, label="old.ipynb"),
        # The broker shows these and a few more fields of another user's session.
        {"id": "dd00", "owner": "other", "state": "detached", "granted_bytes": 0, "device": None,
         "queue_position": None},
    ],
    host={"budget_bytes": 12 * GiB, "used_bytes": 5 * GiB, "available_bytes": 20 * GiB},
)  # fmt: skip

WIDE = """\
GPU pool  EMULATED  /run/gpupool/broker.sock

GPU 0  EMULATED NVIDIA GPU 16 GiB  GPU-5d1c0000-…  guarded
[A██████████████████B▒▒▒▒▒▒▒▒▒▒▒╳╳╳╳╳╳╳············] 10 GiB of 16 GiB granted, 4 GiB free, 41 % busy

GPU 1  EMULATED NVIDIA GPU 16 GiB  GPU-7e2f0000-…  unguarded
[                                                  ] 0 B of 16 GiB granted, not used, 0 % busy
Not used: Xid 79, the GPU has fallen off the bus

█ running  ▒ idle  ▞ moving  ╳ outside the pool  · free

   SESSION       OWNER  STATE           SLICE  USES     ON HOST  WAITED  KERNEL
A  3f2a1b9c0d11  ada    in use          6 GiB  3 GiB             10 s    train.ipynb
B  9c0d22        ada    idle 40 s       4 GiB  512 MiB                   viz.ipynb
   77aa33        bob    waits           -                        7 s     train.ipynb
   b00c44        ada    in host memory  -               5 GiB            old.ipynb
   dd00          other  no GPU          -
9c0d22 cannot be suspended: it uses managed memory

WAITING
1. 77aa33 asks for 8 GiB on each of 2 GPUs, 20 to 60 s left: no GPU has 8 GiB free

[▒▒▒▒▒▒▒▒▒▒··············] 5 GiB of 12 GiB host memory used by suspended state"""

NARROW = """\
GPU pool  EMULATED  /run/gpupool/broker.sock

GPU 0  EMULATED NVIDIA GPU 16 GiB  ...  guarded
[A################B==========xxxxxx...........]
10 GiB of 16 GiB granted, 4 GiB free, 41 % busy"""


def test_picture_shows_devices_kernels_and_host_memory():
    assert "\n".join(draw(BUSY, Style(width=100))) == WIDE


def test_table_shows_group_preemption_and_guaranteed_size():
    sessions = [
        attached("3f2a1b", "active", 9 * GiB, label="", group="bio",
                 slices=[{"device": "GPU-5d1c", "granted_bytes": 9 * GiB}]),
        session("77aa33", state="queued", label="", preempted="its turn is over"),
    ]  # fmt: skip
    lines = draw(pool(sessions=sessions), Style(width=100))
    assert "   SESSION  OWNER  GROUP  STATE      SLICE" in lines
    assert "A  3f2a1b   ada    bio    in use     9 GiB, 4 guaranteed" in lines
    assert "   77aa33   ada           preempted  -" in lines


def test_picture_and_top_show_no_idle_time_if_it_is_unknown():
    """The status has no idle time of other users' kernels. A zero would mean "idle since now"."""
    theirs = {"id": "dd00", "owner": "other", "state": "idle", "granted_bytes": GiB, "devices": []}
    found = pool(sessions=[attached("3f2a1b", "idle", 4 * GiB, idle_since=100.0), theirs])
    lines = [line.split() for line in draw(found, Style(width=100))]
    assert ["A", "3f2a1b", "ada", "idle", "15", "min", "4", "GiB"] in [line[:8] for line in lines]
    assert ["B", "dd00", "other", "idle", "1", "GiB"] in lines
    assert [row.idle for row in top_table.rows(found)] == [900.0, None]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"leaves_at": 1260.0}, "idle 40 s, leaves in 4:20"),
        ({"leaves_at": None, "wanted": True}, "idle 40 s, may move"),
        ({"leaves_at": None, "wanted": True, "keep_until": 1600.0}, "idle 40 s, kept"),
        ({"leaves_at": None, "pinned_reason": "it uses managed memory"}, "idle 40 s"),
    ],
)
def test_status_counts_down_only_if_idle_time_ends_the_slice(changes, said):
    one = attached("3f2a1b", "idle", 4 * GiB, idle_since=960.0, label="", **changes)
    [line] = [x for x in draw(pool(sessions=[one]), Style(width=100)) if x.startswith("A  3f2a1b")]
    assert re.split(r"  +", line)[3] == said


def test_wait_without_an_estimate_shows_its_age():
    waiting = session(
        "77aa33", state="queued", queue_position=1, queued_at=100.0, request={"memory": GiB},
        wait_reason="no GPU has 1 GiB free",
    )  # fmt: skip
    lines = draw(pool(sessions=[waiting], now=143.0), Style(width=100))
    line = "1. 77aa33 asks for 1 GiB, waiting for 40 s, no estimate yet: no GPU has 1 GiB free"
    assert line in lines
    first = "1. 77aa33 asks for 1 GiB, waiting for 5 s, no estimate yet: no GPU has 1 GiB free"
    assert first in draw(pool(sessions=[waiting], now=105.0), Style(width=100))


def test_wait_of_another_users_kernel_shows_its_age():
    waiting = {
        "id": "77aa33", "owner": "other", "state": "queued", "granted_bytes": 0, "device": None,
        "devices": [], "slices": [], "priority": "batch", "queue_position": 1,
        "asks": {"memory": GiB, "devices": 2}, "waits_for": "GPU memory that is in use",
    }  # fmt: skip
    asks = "1. 77aa33 asks for 1 GiB on each of 2 GPUs"
    lines = draw(pool(sessions=[waiting]), Style(width=100))
    assert f"{asks} and waits for GPU memory that is in use" in lines
    lines = draw(pool(sessions=[{**waiting, "queued_at": 100.0}], now=143.0), Style(width=100))
    assert f"{asks} and has waited 40 s for GPU memory that is in use" in lines


def test_picture_fits_a_narrow_terminal_without_unicode():
    lines = draw(BUSY, Style(width=47, unicode=False))
    assert "\n".join(lines[:5]) == NARROW
    assert all(line.isascii() for line in lines)


@pytest.mark.parametrize("width", [40, 47, 60, 71, 72, 80, 100, 200])
@pytest.mark.parametrize("unicode", [True, False])
def test_no_line_is_wider_than_the_terminal(width, unicode):
    assert max(map(columns, draw(BUSY, Style(width=width, unicode=unicode)))) <= width


def test_colour_changes_no_character():
    plain = draw(BUSY, Style(width=90))
    painted = draw(BUSY, Style(width=90, colour=True))
    assert plain != painted
    assert [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in painted] == plain


def test_picture_of_an_empty_pool_says_that_it_is_empty():
    assert draw(pool(devices=[], emulated=False, host={}), Style(width=80)) == [
        "GPU pool  /run/gpupool/broker.sock",
        "",
        "No GPU. `jupyter gpupool doctor` says why.",
        "",
        "No kernel is in the pool.",
    ]


def test_real_devices_are_not_called_emulated():
    real = device(emulated=False, name="NVIDIA H200")
    lines = draw(pool(devices=[real], emulated=False), Style(width=80))
    assert not [line for line in lines if "EMULATED" in line]


def test_emulated_device_with_a_real_name_is_labelled_emulated():
    lines = draw(pool(devices=[device(name="NVIDIA H200")]), Style(width=80))
    assert lines[2] == "GPU 0  NVIDIA H200  GPU-5d1c0000-…  EMULATED  unguarded"


def test_picture_shows_that_the_journal_cannot_be_written():
    snapshot = pool(broker={"journal_problem": "No space left on device."})
    assert draw(snapshot, Style(width=80))[1] == "Journal: No space left on device."


def test_labels_have_no_control_codes_and_keep_their_width():
    sessions = [session("a1", label="\x1b]0;owned\x07データ.ipynb"), session("b2", label="x" * 300)]
    lines = draw(pool(sessions=sessions), Style(width=60))
    assert not [line for line in lines if not line.isprintable()]
    assert "?]0;owned?データ.ipynb" in "\n".join(lines)
    assert max(map(columns, lines)) <= 60


def test_smallest_slice_has_a_visible_block():
    tiny = attached("a1", "active", 1 * MiB)
    bar = draw(pool(sessions=[tiny]), Style(width=80))[3]
    assert bar.startswith("[A·")


def test_session_on_two_devices_is_drawn_on_both():
    both = session(
        "a1", state="active", granted_bytes=16 * GiB, device=UUIDS[0], devices=list(UUIDS)
    )
    lines = draw(pool(devices=[device(0), device(1)], sessions=[both]), Style(width=80))
    assert lines[3][: lines[3].index("]")] == lines[6][: lines[6].index("]")]
    assert lines[3].startswith("[A██")


def test_a_device_that_cannot_suspend_says_why():
    lines = draw(pool(devices=[device(can_suspend=False, tier_reason="MIG")]), Style(width=80))
    assert "Cannot suspend: MIG" in lines


def test_overuse_of_a_session_is_shown_with_its_bytes():
    greedy = session("3f2a", state="active", granted_bytes=GiB, overuse_bytes=700 * MiB)
    text = "\n".join(draw(pool(devices=[device()], sessions=[greedy]), Style(width=90)))
    assert "3f2a has 700 MiB more than its slice, allocated without the guard" in text


def test_table_has_a_budget_column_and_a_line_has_your_budget():
    use = {"counts": 1.0, "today": 88.6, "daily": 100.0, "spent": False}
    group = {"counts": 1.0, "today": 20.0, "daily": 3600.0, "spent": False}
    spent = {**use, "spent": True}
    lines = ["Your group is bio.", "You have 11 of 100 GPU-seconds left today."]
    sessions = [
        attached("3f2a1b", "active", GiB, label="a", usage=use, group_usage=group, standing=lines),
        session("77aa33", label="b", usage=spent, group_usage=None, standing=lines),
        session("88bb44", owner="bob", label="c", usage={**use, "daily": None}, group_usage=None),
    ]  # fmt: skip
    drawn = draw(pool(sessions=sessions, standing=lines), Style(width=100))
    assert "A  3f2a1b   ada    in use  1 GiB  11          a" in drawn
    assert "   77aa33   ada    no GPU  -      none        b" in drawn
    assert "   88bb44   bob    no GPU  -                  c" in drawn
    assert [line for line in drawn if line in lines] == lines


def test_user_without_a_kernel_sees_their_own_budget():
    lines = ["You have 0 of 100 GPU-seconds left today; there are more in 57 min."]
    assert lines[0] in draw(pool(standing=lines), Style(width=100))
