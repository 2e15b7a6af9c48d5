# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Runs the recorder as a separate process; the environment selects the driver."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Time-out of one record in seconds. Thousands of processes load the driver. This costs 6 s of
#: processor time. On two slow processors with eight test workers, it took more than 110 s. If a
#: single question hangs, the record ends sooner, after ``child.BOUND``.
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
