# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The texts of ``%gpu`` and of a waiting cell, without a kernel."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_gpupool.kernel.holds import QueuePlace
from jupyter_gpupool.kernel.link import SessionLink
from jupyter_gpupool.kernel.magic import complete_gpu
from jupyter_gpupool.kernel.magic_display import PoolDisplay, session_rows
from jupyter_gpupool.kernel.waits import describe
from jupyter_gpupool.text import sentence


def rows(session: dict[str, Any], snapshot: dict[str, Any] | None = None) -> dict[str, str]:
    return dict(session_rows(session, snapshot or {}))


@pytest.mark.parametrize(
    ("attach", "words"),
    [
        ("cell", "no slice now; the next cell that needs one gets it"),
        ("manual", "no slice now; type %gpu attach to get one"),
    ],
)
def test_advice_on_getting_a_slice_depends_on_the_policy(attach: str, words: str) -> None:
    assert rows({"state": "detached", "attach": attach})["GPU slice"] == words


def test_kernel_without_a_slice_shows_why_no_gpu_is_in_service() -> None:
    paused = {"devices": [{"uuid": f"G{i}", "drained_reason": "paused: noon"} for i in range(2)]}
    detached = {"state": "detached", "attach": "lazy"}
    assert rows(detached, paused)["no GPU now"] == "paused: noon"
    assert "no GPU now" not in rows({"state": "idle", "granted_bytes": 1}, paused)
    paused["devices"][0]["drained_reason"] = ""
    assert "no GPU now" not in rows(detached, paused)


def test_status_has_a_line_about_a_shortage_of_host_memory() -> None:
    said = rows({"state": "detached", "host_note": "Host memory is short: ..."})
    assert said["host memory"] == "Host memory is short: ..."
    assert "host memory" not in rows({"state": "detached", "host_note": ""})
    stays = rows({"state": "idle", "stays_reason": "Its state has no room.", "granted_bytes": 1})
    assert stays["stays"] == "Its state has no room."


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("your quota is used by other 2 kernels", "Your quota is used by other 2 kernels."),
        ("Alice has it.", "Alice has it."),
        ("c.GPUPool.quotas says so", "c.GPUPool.quotas says so."),
        ("", ""),
    ],
)
def test_a_reason_is_shown_as_a_sentence(reason: str, said: str) -> None:
    assert sentence(reason) == said
    link = SessionLink("/nowhere/broker.sock", "s1", "token")
    link._down_since = None
    link.queue = QueuePlace(1, 1, reason, time.monotonic())
    expected = f"Waiting for a GPU slice: position 1 of 1, no estimate yet. {said}".rstrip()
    assert describe(link) == expected


def test_a_wait_without_an_estimate_shows_its_duration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    link = SessionLink("/nowhere/broker.sock", "s1", "token")
    link._down_since = None
    place = {"type": "queue", "position": 2, "length": 3, "waited": 0.0, "reason": "Why."}
    link._push({**place, "left": None})
    begin = "Waiting for a GPU slice: position 2 of 3"
    assert describe(link) == f"{begin}, no estimate yet. Why."
    now += 4
    assert describe(link) == f"{begin}, waiting for 4 s, no estimate yet. Why."
    now += 43
    assert describe(link) == f"{begin}, waiting for 40 s, no estimate yet. Why."
    link._push({**place, "waited": 47.0, "left": [25.0, 100.0]})
    assert describe(link) == f"{begin}, 20 s to 2 min left. Why."
    now += 45
    assert describe(link) == f"{begin}, up to 60 s left. Why.", "it counts down without a message"
    now += 60
    assert describe(link) == f"{begin}, waiting for 2 min, no estimate yet. Why."
    queued = {"state": "queued", "queue_position": 1, "queued_at": 100.0}
    assert rows(queued, {"now": 400.0})["queue"] == "position 1, waiting for 5 min, no estimate yet"
    assert rows(queued, {"now": 104.0})["queue"] == "position 1, waiting for 4 s, no estimate yet"


def test_a_compute_share_is_shown() -> None:
    request = {"memory": 4 << 30, "limit": 4 << 30, "compute": 50}
    assert rows({"request": request})["asks for"] == "4 GiB, 50 % of the compute time"
    assert rows({"request": {**request, "compute": 100}})["asks for"] == "4 GiB"


IDLE = {
    "state": "idle",
    "granted_bytes": 1 << 30,
    "devices": ["GPU-a"],
    "idle_since": 997.0,
    "leaves_at": 1297.0,
}


def pool(can_suspend: bool) -> dict[str, Any]:
    device = {"uuid": "GPU-a", "index": 0, "name": "A GPU", "can_suspend": can_suspend}
    return {"devices": [device], "now": 1000.0}


def test_display_says_how_long_an_idle_slice_stays() -> None:
    assert rows(IDLE, pool(True))["idle"] == "for 3 s; back to the pool in 4:57"
    wanted = {**IDLE, "leaves_at": None, "wanted": True}
    told = "for 3 s; may move to host memory at any moment: another kernel waits"
    assert rows(wanted, pool(True))["idle"] == told
    kept = rows({**IDLE, "kept_until": time.time() + 600}, pool(True))
    assert kept["idle"] == "for 3 s"
    assert kept["kept"].endswith(", 10 min from now")
    over = rows({**IDLE, "kept_until": time.time() - 1}, pool(True))
    assert over == rows(IDLE, pool(True))


def test_slice_stays_on_a_gpu_that_cannot_suspend() -> None:
    shown = rows(IDLE, pool(False))
    assert shown["idle"] == "for 3 s"
    assert "until the kernel ends" in shown["stays"]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("%gpu priority ", ["batch", "notebook"]),
        ("%gpu memory ", ["4GiB", "8GiB"]),
        ("%%gpu ", ["4GiB", "8GiB"]),
        ("%gpu devices ", ["1"]),
        ("%gpu compute ", ["25", "50", "100"]),
    ],
)
def test_completion_offers_sizes_up_to_the_limit(line: str, offered: list[str]) -> None:
    limits = {"memory": 12 << 30, "devices": 1, "priorities": ["batch", "notebook"]}
    found = complete_gpu(None, SimpleNamespace(line=line), limits)
    assert [word for word in found if not word.startswith("--")] == offered


def test_pool_shows_why_a_gpu_is_out_of_service() -> None:
    why = "paused by the administrator: new driver"
    device = {"index": 0, "name": "A", "memory_granted": 0, "memory_capacity": 8 << 30}
    for free in (None, 8 << 30):  # an older broker sends a number here
        shown = PoolDisplay(
            {"devices": [{**device, "memory_free": free, "drained_reason": why}]}, ""
        )
        row = shown.text().splitlines()[-1]
        assert re.split(r"  +", row.strip()) == ["GPU 0", "A", "none", "0 B", "8 GiB", why]
