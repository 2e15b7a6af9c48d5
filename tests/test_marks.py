# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``marks`` removes the folder of a test only after the processes that write in it have ended."""

from __future__ import annotations

import subprocess

import psutil
import pytest

from . import marks

#: A shell script that writes files for a while and then ends, like a broker that ends by itself.
WRITER = """
mkdir "$0/state"
for number in $(seq 200); do : > "$0/state/$number" || exit 1; sleep 0.002; done
"""


def test_folder_waits_for_processes_that_write_in_it():
    with marks.short_folder() as folder:
        writer = subprocess.Popen(["sh", "-c", WRITER, folder])
        before = marks.marked(str(folder))
    # The list may also have the shell's children, such as its current sleep.
    assert writer.pid in [process.pid for process in before]
    assert writer.wait(60) == 0, "it could write to its end"
    assert not folder.exists()


def test_process_that_does_not_end_is_named_and_killed(monkeypatch):
    monkeypatch.setattr(marks, "PATIENCE", 0.1)
    with (
        pytest.raises(AssertionError, match="sleep 1000"),
        marks.short_folder() as folder,
    ):
        process = subprocess.Popen(["sleep", "1000"])
    monkeypatch.undo()
    process.wait(60)  # ``marks`` has already reaped the process; this only updates the object
    assert not psutil.pid_exists(process.pid)
    assert not folder.exists()
