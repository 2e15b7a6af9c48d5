# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Files for kernels in containers. The broker puts them into a folder that each container mounts.

- ``content``: puts this package, the guard and a kernelspec into the folder; the broker calls it
- ``start``: starts the kernel of that kernelspec, even in images that cannot use a GPU
"""
