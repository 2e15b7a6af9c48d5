# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A broker that sees two models of emulated GPUs: A at even indices and B at odd indices."""

from __future__ import annotations

import sys
from typing import Any, Mapping

from jupyter_gpupool.broker import app
from jupyter_gpupool.devices.nvidia.service import DeviceService

known = DeviceService._add


def add(self: DeviceService, row: Mapping[str, Any]) -> None:
    known(self, {**row, "name": f"{row['name']} {'AB'[row['index'] % 2]}"})


if __name__ == "__main__":
    DeviceService._add = add
    sys.exit(app.main())
