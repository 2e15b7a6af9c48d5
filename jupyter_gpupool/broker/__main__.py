# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``python -m jupyter_gpupool.broker``."""

from __future__ import annotations

from .app import main

if __name__ == "__main__":
    raise SystemExit(main())
