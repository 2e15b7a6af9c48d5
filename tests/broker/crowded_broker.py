# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A broker in its own mount namespace, in which the shared memory is full."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from jupyter_gpupool.broker.app import main

CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000

if __name__ == "__main__":
    libc = ctypes.CDLL(None, use_errno=True)
    done = [
        libc.unshare(CLONE_NEWNS),
        libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None),
        libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, b"size=64k"),
    ]
    assert not any(done), os.strerror(ctypes.get_errno())
    try:
        Path("/dev/shm/filler").write_bytes(bytes(1 << 20))
    except OSError:
        pass  # expected: the file is larger than the file system
    sys.exit(main())
