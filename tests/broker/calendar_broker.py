# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A broker whose time of day a test sets.

The time of day is the real time plus the seconds that the test writes into the file ``clock``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

real, offset = time.time, Path(os.environ["TEST_FOLDER"], "clock")
time.time = lambda: real() + float(offset.read_text())

from jupyter_gpupool.broker import timekeeper  # noqa: E402 (after the clock is set)
from jupyter_gpupool.broker.app import main  # noqa: E402 (after the clock is set)
from jupyter_gpupool.broker.store import files  # noqa: E402 (after the clock is set)

# The server that forks brokers imported ``timekeeper`` before this module changed ``time.time``. So
# the default clock there is still the real clock. Replace it.
timekeeper.Timekeeper.__init__.__kwdefaults__["clock"] = time.time
timekeeper.LOOK = float(os.environ.get("TEST_LOOK", "0.2"))
# Give ``files`` the real time. By the test's clock, the files of other tests' brokers may look too
# old, and this broker would remove them.
vars(files)["time"] = SimpleNamespace(**{**vars(time), "time": real})

if __name__ == "__main__":
    sys.exit(main())
