# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A broker whose pool knows no size of a CUDA context, as if no self-test had measured it."""

from __future__ import annotations

import sys
from dataclasses import replace

from jupyter_gpupool.broker import app
from jupyter_gpupool.devices.nvidia.service import DeviceService
from jupyter_gpupool.pool.model import Device

known = DeviceService._with_landing


def unmeasured(self: DeviceService, device: Device) -> Device:
    return replace(known(self, device), context_bytes=0)


if __name__ == "__main__":
    DeviceService._with_landing = unmeasured
    sys.exit(app.main())
