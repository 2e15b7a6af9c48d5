# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The recorder as a process of its own, for tests: its environment says which driver there is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Seconds for a record: thousands of processes that load the driver.
BOUND = 120


def run(
    *options: str, env: dict[str, str], timeout: float = BOUND
) -> subprocess.CompletedProcess[str]:
    """Return how ``python -m tests.driver_records OPTIONS`` ended."""
    return subprocess.run(
        [sys.executable, "-m", "tests.driver_records", *options],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
