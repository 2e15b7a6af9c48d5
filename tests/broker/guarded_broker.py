# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A broker that treats its devices as guarded, although no guard runs.

A test itself writes the session's page, as the guard would, and checks how the broker reacts. So
the test needs no guard, and no compiler to build one.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from jupyter_gpupool.broker import app
from jupyter_gpupool.broker.pages import activity, setup
from jupyter_gpupool.devices.nvidia.service import DeviceService

start = DeviceService.start


async def guarded(self, *args, **kwargs):
    return [replace(device, tier="guarded") for device in await start(self, *args, **kwargs)]


if __name__ == "__main__":
    DeviceService.start = guarded
    activity.ABANDONED = float(os.environ.get("TEST_ABANDONED", activity.ABANDONED))
    setup.guard_directory = lambda base: base / "not-compiled"
    sys.exit(app.main())
