# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The process that forks the tests' brokers serves all tests of a run: nothing may end it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from . import forks


def run(folder, code):
    """Fork a process, as the tests fork brokers; it runs ``code`` and ends."""
    with (folder / "log").open("wb") as log:
        return forks.start(
            "timeit", ["-n", "1", "-r", "1", code],
            env=dict(os.environ), stdout=log.fileno(), descriptor=log.fileno(),
        )  # fmt: skip


def test_server_survives_the_deletion_of_a_process_object(tmp_path):
    os.mkfifo(tmp_path / "end")
    process = run(tmp_path, f"open({str(tmp_path / 'end')!r}).read()")
    ended = os.pidfd_open(process.pid)
    del process
    (tmp_path / "end").write_text("")  # the write waits until the process reads
    assert select.select([ended], [], [], 60)[0]
    os.close(ended)
    assert run(tmp_path, "pass").wait(60) == 0
    assert run(tmp_path, "pass").wait(60) == 0


def test_several_threads_can_start_processes_at_the_same_time(tmp_path):
    folders = [tmp_path / str(number) for number in range(16)]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor(len(folders)) as threads:
        processes = [*threads.map(lambda folder: run(folder, "pass"), folders)]
    assert [process.wait(60) for process in processes] == [0] * len(folders)
    assert len({process.pid for process in processes}) == len(folders)


def test_process_is_in_a_group_of_its_own_from_the_start(tmp_path):
    """Jupyter's clients send signals to a kernel's group. The tests must not be in this group."""
    for _ in range(20):
        process = run(tmp_path, "input")
        with suppress(ProcessLookupError):  # the process has ended
            assert os.getpgid(process.pid) == process.pid
        assert process.wait(60) == 0


#: A program that prints one word at each step of its end. Python must flush the printed words.
ENDING = """
import atexit, ctypes, sys, threading
text = sys.text = ctypes.create_string_buffer(b"library")
ctypes.CDLL(None).__cxa_atexit(ctypes.CDLL(None).puts, text, None)
atexit.register(print, "registered", end=" ")
main = threading.main_thread()
threading.Thread(target=lambda: (main.join(), print("thread", end=" "))).start()
sys.exit({code})
"""


@pytest.mark.parametrize(("code", "said"), [(None, 0), (3, 3), (259, 3), ("'a reason'", 1)])
def test_forked_process_ends_as_python_does(tmp_path, code, said):
    """The process waits for its threads, calls exit handlers, flushes, and ends its libraries."""
    (tmp_path / "ending.py").write_text(ENDING.format(code=code))
    command = [sys.executable, str(tmp_path / "ending.py")]
    with (tmp_path / "log").open("w+b") as log:
        output = log.fileno()
        process = forks.run(command, env=dict(os.environ), standard=[output, output, output])
    assert process.wait(60) == said
    words = (tmp_path / "log").read_text()
    assert words.removeprefix("a reason\n") == "thread registered library\n"
    assert words.startswith("a reason") == (said == 1)


@pytest.fixture
def alone():
    """Give the test servers that no other test uses."""
    with forks.own():
        yield


def test_only_one_start_fails_after_the_death_of_the_server(tmp_path, alone):
    run(tmp_path, "pass").wait(60)
    os.kill(forks.parent(), signal.SIGKILL)
    with pytest.raises(EOFError, match="has ended"):
        run(tmp_path, "pass")
    assert run(tmp_path, "pass").wait(60) == 0


def test_processes_share_a_server_until_the_last_has_ended(tmp_path, alone):
    run(tmp_path, "pass").wait(60)
    ended = os.pidfd_open(forks.parent())
    shown = subprocess.run(
        [sys.executable, "-c", "from tests.broker import forks; print(forks.parent())"],
        capture_output=True, check=True, text=True, timeout=60, cwd=forks.ROOT,
    ).stdout  # fmt: skip
    assert int(shown) == forks.parent()
    assert run(tmp_path, "pass").wait(60) == 0
    forks._servers.pop("brokers").close()
    assert select.select([ended], [], [], 60)[0]
    os.close(ended)
    assert run(tmp_path, "pass").wait(60) == 0
