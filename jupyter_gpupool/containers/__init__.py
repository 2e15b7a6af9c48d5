# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The files in the machine's folder. Each container mounts this folder.

- ``content``: puts this package, the guard and a kernelspec into the folder; the broker calls it
- ``start``: starts the kernel of that kernelspec, even in images that cannot use a GPU
"""
