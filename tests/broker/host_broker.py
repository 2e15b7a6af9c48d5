# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A broker that reads host memory and control groups from the folder ``host`` beside its socket."""

from __future__ import annotations

import sys
from pathlib import Path

from jupyter_gpupool.broker import app, assembly
from jupyter_gpupool.cgroups import Host

if __name__ == "__main__":
    folder = Path(sys.argv[sys.argv.index("--socket") + 1]).parent / "host"
    assembly.HOST = Host(folder / "cgroup", folder / "proc")
    sys.exit(app.main())
