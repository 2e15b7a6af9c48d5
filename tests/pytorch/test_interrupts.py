# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""An interrupt ends the wait of a thread that PyTorch itself has started.

PyTorch runs a backward pass in a thread of its own, and the pass calls Python code of the notebook.
"""

from __future__ import annotations

import asyncio

from tests.e2e.kit import until
from tests.e2e.scenes import play, release

MEMORY = 600 << 20

FORWARD = """
import threading
import torch
x = torch.arange(4., device="cuda", requires_grad=True)
seen = []
class Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        seen.append(threading.current_thread() is threading.main_thread())
        return grad * 2
y, g = Noted.apply(x), torch.ones(4, device="cuda")
"""

#: A cell that keeps the device busy until the other notebook's wait has been interrupted.
BUSY = """
import time
from pathlib import Path
while not Path({flag!r}).exists():
    work.add_(1)
    torch.cuda.synchronize()
    time.sleep(0.01)  # it is busy with less than that, and need not take a processor
"""


def test_one_interrupt_ends_the_wait_of_a_backward_pass(pool, tmp_path):
    pool = pool("1x1GiB,context=64MiB")
    flag = tmp_path / "go"

    async def scenario():
        one = await pool.kernel("one", memory=MEMORY, timeout=200)
        (await one.run(FORWARD, timeout=100)).check()
        await release(pool, one)
        other = await pool.kernel("other", memory=MEMORY, timeout=200)
        (await other.run("import torch; work = torch.ones(8, device='cuda')", timeout=100)).check()
        busy = asyncio.create_task(other.run(BUSY.format(flag=str(flag)), timeout=100))
        cell = asyncio.create_task(one.run("y.backward(g)", timeout=100))
        try:
            await until(lambda: one.session()["state"] == "queued", "to wait", 30)
            await one.interrupt()
            done = await asyncio.wait_for(cell, 20)
            assert done.ename in ("KeyboardInterrupt", "RuntimeError"), done
            assert one.session()["suspended_bytes"]
        finally:
            flag.touch()
            (await busy).check()
        cell = await one.run("Noted.apply(x).backward(g); print(x.grad.tolist(), seen)", timeout=60)
        assert cell.check().text == "[2.0, 2.0, 2.0, 2.0] [False, False]\n"
        await one.stop()
        await other.stop()

    play(scenario())
