# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``python -m jupyter_gpupool.cli``, for where the ``jupyter`` command is not on the path."""

import sys

from . import main

sys.exit(main())
