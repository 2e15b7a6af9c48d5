# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Helpers of several end-to-end tests: they start kernels, and wait for a state of a session."""

from __future__ import annotations

import asyncio

from . import cells
from .kit import until

#: MiB of a test's array. It needs several chunks, but is quick to copy.
DATA = 16


async def state(kernel, wanted, timeout=60):
    """Wait until the session is in the state, and return it."""
    return await until(
        lambda: (s := kernel.session()) and s["state"] == wanted and s,
        f"{kernel.label} to be {wanted}",
        timeout,
        show=kernel.session,
    )


async def suspended(kernel):
    """Wait until the session's state is in host memory, and return the session."""
    return await until(
        lambda: (s := kernel.session()) and s["state"] == "detached" and s["suspended_bytes"] and s,
        f"{kernel.label} to be suspended",
        show=kernel.session,
    )


async def release(pool, kernel):
    """Suspend the kernel, and wait until its state is in host memory."""
    pool.call("release", session=kernel.session()["id"])
    return await suspended(kernel)


async def occupied(pool, flag):
    """Start a kernel that computes on the only device until the file ``flag`` exists.

    Return the kernel and its running cell.
    """
    busy = await pool.kernel("busy")
    cell = asyncio.create_task(busy.run(cells.setup(1, DATA) + cells.computing(flag)))
    await state(busy, "active")
    return busy, cell


async def with_blocks(pool, label):
    """Start a kernel that defines the class ``Block`` but does not use a device; return it."""
    kernel = await pool.kernel(label)
    (await kernel.run(f"SEED = 2\n{cells.DEFINE}")).check()
    return kernel


def said(cell):
    """Return all outputs that a cell showed."""
    return cell.text + cell.evalue + " ".join(cell.displays)


def play(scenario, within=280):
    """Run a coroutine to its end; fail after ``within`` seconds."""
    asyncio.run(asyncio.wait_for(scenario, within))
