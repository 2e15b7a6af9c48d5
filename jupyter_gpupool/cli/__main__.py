# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Runs ``python -m jupyter_gpupool.cli``, for systems without a ``jupyter`` command on the path."""

import sys

from . import main

sys.exit(main())
