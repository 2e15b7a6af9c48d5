# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``python -m jupyter_gpupool.ipykernel_launcher -f FILE``: an ipykernel in a session of the pool.

The ``argv`` of the Pooled GPU kernelspec names this module, for clients that have no provisioners.
"""

from __future__ import annotations

import sys

from .launcher import IPYKERNEL_LAUNCHER, become


def main() -> None:
    """Replace this process by ipykernel. Python gets the same options as in this process."""
    words = list(sys.orig_argv)
    options = words[1 : words.index(IPYKERNEL_LAUNCHER) - 1] if IPYKERNEL_LAUNCHER in words else []
    become([sys.executable, *options, "-m", "ipykernel_launcher", *sys.argv[1:]])


if __name__ == "__main__":
    main()
