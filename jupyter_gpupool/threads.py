# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Starts this package's threads in processes of the user: a thread must not take an interrupt.

Linux may deliver a process's SIGINT to any thread that does not block it. In most cases this is the
main thread. But if the main thread gets no CPU time at once, another thread takes the signal when
it starts a thread, because the C library blocks all signals for this time and then unblocks them.
Python then handles the signal in the main thread only after the main thread's present call, so a
call that waits for a lock (``Event.wait``, ``Queue.get``) does not end. For the user, the interrupt
is lost. The agent's thread starts another thread each time it connects to a broker.
"""

from __future__ import annotations

import signal
import threading


def start_thread(thread: threading.Thread) -> None:
    """Start ``thread``; it blocks SIGINT from its first instruction on.

    A new thread inherits the set of blocked signals of the thread that starts it. So a program that
    ``thread`` starts must clear the set if interrupts are meant to end it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
