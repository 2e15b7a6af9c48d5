# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter gpupool demo``, as ``make run`` starts it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid

import psutil
import pytest

from tests.marks import MARK, marked

from .kit import LOOK, wait_for

#: All processes of the demo together may have at most this many resident bytes.
BUDGET = 4 << 30


def resident(mark: str) -> int:
    """Return the resident bytes of all marked processes. A page that they share counts once."""
    total = 0
    for process in marked(mark):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total


@pytest.mark.timeout(300)
def test_demo_attaches_suspends_and_restores_elsewhere(installed, tmp_path):
    mark = uuid.uuid4().hex
    env = {k: v for k, v in os.environ.items() if not k.startswith("GPUPOOL_")}
    picture = tmp_path / "timeline.svg"
    with open(tmp_path / "out", "w+") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyter_gpupool.cli", "demo", "--svg", str(picture)],
            env={**env, MARK: mark},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        peak, deadline = 0, time.monotonic() + 240
        while process.poll() is None and time.monotonic() < deadline:
            peak = max(peak, resident(mark))
            time.sleep(LOOK * 15)  # a search through all processes takes at least 20 ms
        if process.poll() is None:
            process.kill()
        process.wait()
        out.seek(0)
        text = out.read()
    assert process.returncode == 0, text
    assert peak <= BUDGET, f"{peak / 2**30:.2f} GiB"
    print(f"peak of all processes together: {peak / 2**30:.2f} GiB")
    for word in ("attached to gpu", "suspended from gpu", "restored on gpu", "moved from gpu"):
        assert word in text.lower(), f"the timeline has no {word!r}:\n{text}"
    assert "nothing lost" in text
    assert "EMULATED" in text
    assert "<svg" in picture.read_text()
    wait_for(lambda: not marked(mark), "no process of the demo left", show=lambda: marked(mark))
