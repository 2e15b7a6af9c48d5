# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A notebook runs another notebook (nbclient, papermill), and must start the broker to do so."""

from __future__ import annotations

import os
import signal

import psutil

from . import cells
from .kit import KERNEL_NAME, MiB, command_of, until
from .scenes import DATA, play, release, state

ONE = "1x640MiB,context=32MiB"
SLICE = 512 * MiB

RUN = f"""
import nbformat
from nbclient import NotebookClient

inner = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell({cells.setup(2, DATA)!r})])
NotebookClient(inner, kernel_name={KERNEL_NAME!r}, timeout=100).execute()
print("ran")
"""


def test_broker_outlives_the_notebook_that_started_it(pool):
    pool = pool(ONE, default_memory=SLICE)

    async def scenario():
        outer = await pool.kernel("outer")
        (await outer.run(cells.setup(1, DATA))).check()
        await state(outer, "idle")
        # The old broker ends in an orderly way (SIGTERM). So the kernel starts a new broker only
        # when it needs one.
        old = psutil.Process(pool.status()["pid"])
        old.send_signal(signal.SIGTERM)
        await until(lambda: not pool.socket.exists(), "the broker's end")
        # The inner notebook takes the slice of the outer notebook, whose cell makes no CUDA call.
        done = (await outer.run(RUN)).check()
        assert done.text.endswith("ran\n"), done
        pid = pool.status()["pid"]
        broker = psutil.Process(pid)
        environ = broker.environ()
        assert "GPUPOOL_SESSION" not in environ
        assert pid not in [p.pid for p in psutil.Process(outer.pid).children(recursive=True)]
        # Both notebooks continue. The broker suspends and restores the outer notebook, although the
        # outer notebook started the broker.
        (await outer.run("block.verify()")).check()
        await release(pool, outer)
        (await outer.run("block.verify()")).check()
        assert pool.status()["pid"] == pid
        workers = [p for p in broker.children() if "child_programs worker" in command_of(p)]
        assert workers
        await outer.stop()
        assert pool.status()["pid"] == pid
        assert os.getsid(pid) == pid

    play(scenario())
