# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter_gpupool.slice`` in a notebook, together with the kernel's agent."""

from __future__ import annotations

import asyncio

from tests.e2e import cells
from tests.e2e.conftest import installed, kernelspec, pool, rested  # noqa: F401
from tests.e2e.kit import MiB, until

ONE = "1x1000MiB,context=16MiB"

HOLD = """
import jupyter_gpupool
with jupyter_gpupool.slice("{mib}MiB") as gpu:
    print(gpu.memory >> 20, gpu.guarded)
"""


def test_block_in_a_cell_keeps_a_slice_and_can_be_interrupted(pool):  # noqa: F811
    async def scene():
        first = await found.kernel("first", memory=600 * MiB)
        cell = await first.run(cells.setup(1, 64) + HOLD.format(mib=700))
        assert cell.check().text == "700 True\n"
        session = first.session()
        assert session["agent"] is True
        assert session["request"]["memory"] == 600 * MiB, "as before the block"
        (await first.run("block.verify()")).check()
        flag = found.folder / "enough"
        busy = asyncio.ensure_future(first.run(cells.COMPUTING.format(flag=str(flag))))
        second = await found.kernel("second", memory=600 * MiB)
        waiting = asyncio.ensure_future(second.run(HOLD.format(mib=600)))
        await until(lambda: second.session()["state"] == "queued", "the wait")
        await second.interrupt()
        assert (await waiting).ename == "KeyboardInterrupt"
        await until(lambda: second.session()["state"] == "detached", "the end of the wait")
        flag.touch()
        (await busy).check()
        assert (await second.run(HOLD.format(mib=600))).check().text == "600 True\n"
        (await first.run("block.verify()")).check()

    found = pool(ONE, quiet_after=0.3, preempt=[])
    asyncio.run(scene())
