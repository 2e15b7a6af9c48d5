# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Runs the recorder as a separate process; the environment selects the driver."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: The time-out of one record, in seconds. A record starts thousands of processes that load the
#: driver, and takes 6 s of processor time. With eight test workers on two slow processors, a
#: record took more than 110 s of real time. If a question hangs, the recorder already fails after
#: ``child.BOUND`` seconds.
BOUND = 270


def run(
    *options: str, env: dict[str, str], timeout: float = BOUND
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m tests.driver_records OPTIONS``; return the completed process."""
    return subprocess.run(
        [sys.executable, "-m", "tests.driver_records", *options],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
