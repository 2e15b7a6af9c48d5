# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
from __future__ import annotations

from xml.etree import ElementTree

import pytest

from jupyter_gpupool import timeline


def state(time, session, new, device=None, **detail):
    return {
        "kind": "state",
        "time": time,
        "session": session,
        "device": device,
        "detail": {"new": new, **detail},
    }


ROWS = [
    {"kind": "broker-start", "time": 0.0, "session": None},
    {"kind": "open", "time": 0.0, "session": "a", "detail": {"label": "mine <&>"}},
    state(1.0, "a", "attaching", "GPU-1"),
    state(1.5, "a", "active", "GPU-1"),
    {"kind": "open", "time": 2.0, "session": "b", "detail": {}},
    state(2.0, "b", "queued"),
    {**state(4.0, "a", "detaching", "GPU-1"), "reason": "a kernel waits"},
    {
        "kind": "suspend",
        "time": 5.0,
        "session": "a",
        "device": "GPU-1",
        "bytes": 1 << 30,
        "seconds": 1.0,
        "reason": "suspended",
    },
    state(5.0, "a", "detached", suspended_bytes=1 << 30),
    state(5.0, "b", "active", "GPU-1"),
    state(8.0, "b", "ended"),
]


def test_rows_follow_the_journal_and_end_with_the_session():
    mine, other = timeline.lanes(ROWS, end=10.0)
    assert (mine.label, other.label) == ("mine <&>", "b")
    assert [(s.start, s.end, s.state) for s in mine.spans] == [
        (0.0, 1.0, "detached"),
        (1.0, 1.5, "attaching"),
        (1.5, 4.0, "active"),
        (4.0, 5.0, "detaching"),
        (5.0, 10.0, "suspended"),
    ]
    assert other.spans[-1] == timeline.Span(5.0, 8.0, "active", "GPU-1")


def test_the_text_shows_waits_devices_and_host_memory():
    lines = timeline.draw_text(timeline.lanes(ROWS, 10.0), ["GPU-0", "GPU-1"], width=20).split("\n")
    assert lines[0] == "mine <&>  ··^11111vv----------"
    assert lines[1] == "       b      ??????111111    "


def test_event_shorter_than_a_character_is_still_shown():
    rows = [*ROWS[:2], state(9.0, "a", "active", "GPU-0"), state(9.001, "a", "detached")]
    (lane,) = timeline.lanes(rows, 1000.0)
    assert "0" in timeline.draw_text([lane], ["GPU-0"], width=20).split("\n")[0]


def test_the_picture_is_well_formed_and_escapes_labels():
    svg = timeline.draw_svg(timeline.lanes(ROWS, 10.0), ["GPU-1"], ["GPU 0: EMULATED"])
    texts = [e.text for e in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert "mine <&>" in texts
    assert "GPU 0: EMULATED" in texts


def test_sentences_have_bytes_seconds_and_the_reason():
    row = {"session": "a", "device": "GPU-1", "bytes": 2 << 30, "seconds": 0.5}
    attach = {**row, "kind": "attach", "time": 1.5}
    resume = {**row, "kind": "resume", "time": 8.5, "detail": {"driver_seconds": 0.25}}
    migrate = {
        **row,
        "kind": "migrate",
        "time": 8.5,
        "device": "GPU-0",
        "detail": {"from": "GPU-1"},
    }
    lines = timeline.describe(
        [*ROWS[:4], attach, *ROWS[4:], resume, migrate], {"a": "mine"}, ["GPU-0", "GPU-1"]
    )
    assert [line.strip() for line in lines] == [
        "1.50 s  mine attached to GPU 1 with a slice of 2 GiB, after waiting 0.50 s",
        "5.00 s  mine suspended from GPU 1, 1 GiB to host memory in 1.00 s: a kernel waits",
        "8.50 s  mine restored on GPU 1 in 0.25 s, after waiting 0.50 s",
        "8.50 s  mine moved from GPU 1 to GPU 0",
    ]


@pytest.mark.parametrize("rows", [[], [{"kind": "broker-start", "time": 1.0, "session": None}]])
def test_timeline_without_sessions_says_that_there_are_none(rows):
    assert "no sessions" in timeline.draw_text(timeline.lanes(rows, 2.0), [])
