# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Threads that take no interrupt of the user."""

from __future__ import annotations

import signal
import threading

from jupyter_gpupool.threads import start_thread


def _blocked() -> set[int]:
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def test_only_the_started_thread_blocks_interrupts():
    found: list[set[int]] = []
    before = _blocked()
    thread = threading.Thread(target=lambda: found.append(_blocked()))
    start_thread(thread)
    thread.join(60)
    assert found == [before | {signal.SIGINT}]
    assert _blocked() == before
