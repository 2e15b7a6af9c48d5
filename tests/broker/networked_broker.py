# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A broker that believes that its state folder is on NFS. No test can mount a real NFS."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from jupyter_gpupool import local_machine
from jupyter_gpupool.broker.app import main

folder = Path(os.environ["TEST_FOLDER"])
(folder / "local").mkdir(exist_ok=True)
local_machine.LOCAL_BASES = (folder / "local",)
there = local_machine._file_system
local_machine._file_system = lambda path: (
    0x6969 if folder / "state" in (path, *path.parents) else there(path)
)

if __name__ == "__main__":
    sys.exit(main())
