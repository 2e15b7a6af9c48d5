# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``python -m jupyter_gpupool.cli``, for systems without the ``jupyter`` command on the path."""

import sys

from . import main

sys.exit(main())
