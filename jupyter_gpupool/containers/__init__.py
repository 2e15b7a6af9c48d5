# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What containers find in the one folder of the machine that is mounted there.

- ``content``: the broker puts this package, the guard and a kernelspec there
- ``start``: starts the kernel of that kernelspec; also in images that cannot use a GPU
"""
