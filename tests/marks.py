# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Finds all processes of one test by a variable in their environment."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

#: Every process that a test starts has this variable in its environment. The test finds its
#: processes by the variable.
MARK = "GPUPOOL_E2E_MARK"

#: Seconds within which processes must end by themselves, such as a broker without sessions.
PATIENCE = 60.0


def marked(mark: str) -> list[psutil.Process]:
    """Return the living processes that a test with this mark has started, directly or not."""
    entry = f"{MARK}={mark}".encode()
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            environ = Path(f"/proc/{process.pid}/environ").read_bytes()
            if entry in environ.split(b"\0") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (OSError, psutil.Error):
            continue
    return found


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.Error:
        return "(ended)"


@contextmanager
def short_folder() -> Iterator[Path]:
    """Yield a folder for sockets and state; remove it when the test's processes have ended.

    This process and its children get the mark ``MARK=folder`` in their environment. At the end,
    this function waits until all marked processes have ended, because a broker writes into the
    folder until it ends. No other code waits for a broker that ends by itself. If a process does
    not end in time, this function fails.
    """
    folder = Path(tempfile.mkdtemp(prefix="gp"))  # a socket needs a short path
    before = os.environ.get(MARK)
    os.environ[MARK] = str(folder)
    try:
        yield folder
        deadline = time.monotonic() + PATIENCE
        while left := marked(str(folder)):
            shown = [f"{process.pid} {command_of(process)}" for process in left]
            assert time.monotonic() < deadline, f"not ended within {PATIENCE:g} s: {shown}"
            time.sleep(0.02)  # only the pause between two checks
    finally:
        os.environ.pop(MARK)
        if before is not None:
            os.environ[MARK] = before
        for process in marked(str(folder)):
            with suppress(psutil.Error):
                process.kill()
                process.wait(PATIENCE)
        shutil.rmtree(folder)
