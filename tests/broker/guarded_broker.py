# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A broker whose devices count as guarded, although no guard runs.

The tests write the page in place of the guard. They check the broker's answer to each change of the
page, and need no compiler.
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
