# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""One machine with systemd and two accounts for all tests of this folder."""

from __future__ import annotations

import pytest

from .kit import Systemd

#: One GPU. If one of two kernels asks for 300 MiB, the GPU has room for only one of them at a time.
CONFIG = """
c.GPUPool.emulate = "1x512MiB,context=32MiB"
c.GPUPool.default_memory = "250MiB"
c.GPUPool.reclaim_after = 0
"""


@pytest.fixture(scope="session")
def machine():
    found = Systemd()
    try:
        found.start()
        for user in ("ada", "bob"):
            found.run("useradd", "--create-home", user)
        config = found.root / "etc/gpupool/pool.py"
        config.parent.mkdir(exist_ok=True)
        config.write_text(CONFIG)
        yield found
    finally:
        print(found.tail())
        found.close()
