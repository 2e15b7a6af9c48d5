# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A user's own broker. The machine's broker may listen at ``service.sock``, one folder higher."""

from __future__ import annotations

import sys
from pathlib import Path

from jupyter_gpupool import endpoint
from jupyter_gpupool.broker.app import main

if __name__ == "__main__":
    socket = Path(sys.argv[sys.argv.index("--socket") + 1])
    endpoint.MACHINE_SOCKET = socket.parent.parent / "service.sock"
    sys.exit(main())
