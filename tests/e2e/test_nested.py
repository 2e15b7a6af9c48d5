# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""An outer notebook runs an inner notebook with nbclient. No broker runs, so it starts one."""

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
        # End the broker with SIGTERM. Unlike a killed broker, it is started again only when the
        # next kernel starts.
        old = psutil.Process(pool.status()["pid"])
        old.send_signal(signal.SIGTERM)
        await until(lambda: not pool.socket.exists(), "the broker's end")
        # The inner notebook gets the slice of the outer notebook. The cell of the outer notebook
        # still runs, but makes no CUDA call.
        done = (await outer.run(RUN)).check()
        assert done.text.endswith("ran\n"), done
        pid = pool.status()["pid"]
        broker = psutil.Process(pid)
        environ = broker.environ()
        assert "GPUPOOL_SESSION" not in environ
        assert pid not in [p.pid for p in psutil.Process(outer.pid).children(recursive=True)]
        # The new broker can suspend and resume the outer notebook, although a process of the
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
