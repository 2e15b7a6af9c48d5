# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A broker with a time of day that a test sets.

The broker adds the seconds in the file ``clock`` to the real time.
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

# The server that forks brokers has already imported ``timekeeper``, with the real clock as the
# default. This module replaces the default.
timekeeper.Timekeeper.__init__.__kwdefaults__["clock"] = time.time
timekeeper.LOOK = float(os.environ.get("TEST_LOOK", "0.2"))
# ``files`` uses the real time. With the test's time, this broker would remove the files of other
# tests' brokers as too old.
vars(files)["time"] = SimpleNamespace(**{**vars(time), "time": real})

if __name__ == "__main__":
    sys.exit(main())
