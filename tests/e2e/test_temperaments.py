# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Real kernels on emulated drivers with quirks.

A quirk is an undocumented point in which real drivers may differ. The emulator's README lists the
quirks. The variable EMUCUDA_FAULTS sets them in all processes of a test: the broker, its workers
and the kernels.
"""

from __future__ import annotations

import pytest

from . import cells
from .kit import MiB, Sampler, until
from .scenes import DATA, play, release, suspended

MACHINE = "2x640MiB,context=32MiB"
SLICE = 256 * MiB

MOODS = {
    "a list that lacks contexts and is late": "nvml-less bytes=20MiB; nvml-late ms=300",
    "a list that does not forget": "nvml-lag ms=3600000; init-not-enough",
    "something is kept": "suspend-keeps bytes=1MiB; restore-more bytes=2MiB",
    "nvml waits, and nobody is moved": "nvml-waits; migration-refused",
}


@pytest.mark.parametrize("mood", MOODS.values(), ids=MOODS)
def test_an_idle_notebook_is_suspended_and_later_restored(pool, monkeypatch, mood):
    """Two kernels take turns. The slice of the second one needs almost the whole device."""
    monkeypatch.setenv("EMUCUDA_FAULTS", mood)
    pool = pool("1x640MiB,context=32MiB", default_memory=SLICE, idle_timeout=0.5, overuse="end")

    async def scenario():
        with Sampler(pool):
            first = await pool.kernel("first")
            (await first.run(cells.setup(3, DATA))).check()
            await suspended(first)
            whole = pool.devices()[0]["memory_capacity"]
            second = await pool.kernel("second", memory=whole - 16 * MiB)
            (await second.run(cells.setup(4, DATA))).check()
            await suspended(second)
            for kernel in (first, second, first):
                (await kernel.run("block.verify(); block.compute(); block.verify()")).check()
                await suspended(kernel)
        lost = [row for row in pool.journal() if row["kind"] in ("lost", "overuse", "device-lost")]
        assert not lost
        await first.stop()
        await second.stop()

    play(scenario())


def test_a_notebook_that_cannot_be_moved_waits_for_its_gpu(pool, monkeypatch):
    """The driver cannot restore a process on another device (``migration-refused``).

    The broker's self-test notices this, so the broker never tries it.
    """
    monkeypatch.setenv("EMUCUDA_FAULTS", "migration-refused")
    pool = pool(MACHINE, default_memory=400 * MiB, attach="cell")

    async def scenario():
        first, second = await pool.kernel("first"), await pool.kernel("second")
        (await first.run(cells.setup(3, DATA))).check()
        home = first.session()["devices"]
        await release(pool, first)
        assert not any(d["drained_reason"] for d in pool.devices())
        (await second.run(cells.setup(4, DATA))).check()
        cell = await first.run("block.verify(); device()")
        assert home[0] in cell.check().text
        await until(lambda: first.session()["devices"] == home, "to be where it was")
        await first.stop()
        await second.stop()

    play(scenario())
