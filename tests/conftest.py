# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What holds for all tests."""

from __future__ import annotations

import signal

import pytest


def pytest_configure() -> None:
    """Let children be interrupted.

    A shell starts what runs in the background with SIGINT ignored, children inherit that, and
    Python then leaves it ignored. A handler of our own is reset to the default by exec.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """End to end first: those files take longest, and must not be what all workers end up with."""
    items.sort(key=lambda item: "/e2e/" not in str(item.path))
