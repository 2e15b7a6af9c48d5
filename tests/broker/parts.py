# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Functions that make single parts of a broker, for tests that start no broker process."""

from __future__ import annotations

import logging
from types import SimpleNamespace

from jupyter_gpupool.broker.gpu.monitor import Monitor


async def _nothing():
    return {}


def monitor_of(core, *, room=None, samples=None, health=None, foreign_processes="count"):
    """Return a monitor with the given parts. Its other parts do nothing, or are None."""
    settings = SimpleNamespace(foreign_processes=foreign_processes, sample_interval=1.0)
    return Monitor(
        core,
        SimpleNamespace(down=""),
        SimpleNamespace(settings=settings),
        samples=samples,
        room=room,
        pressure=SimpleNamespace(look=_nothing),
        health=health or SimpleNamespace(failed={}),
        driver_shares=None,
        activity=SimpleNamespace(readings=_nothing, attached={}),
        overheads=None,
        overuse=None,
        homes=None,
        rooms=None,
        looked=lambda: None,
        log=logging.getLogger("test"),
    )
