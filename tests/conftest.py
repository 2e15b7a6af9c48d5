# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What holds for all tests."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Let children be interrupted.

    A shell starts what runs in the background with SIGINT ignored, children inherit that, and
    Python then leaves it ignored. A handler of our own is reset to the default by exec.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
