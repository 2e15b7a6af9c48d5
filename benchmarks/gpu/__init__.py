# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Runs the tests under ``tests/gpu`` and the benchmarks here on a real GPU.

=============  =================================================================================
``__main__``   the command line: ``make gpu``
``plan``       the items to run, their order and their time limits
``runner``     runs one item in its own process group, then kills all processes of the item
``record``     the file of outcomes; ``make gpu`` skips an item that has an outcome
``raw``        arrays, copies and checks through direct calls of the driver
``child``      runs an object in its own process, and kills the process at the end
(others)       each other module is one benchmark
=============  =================================================================================
"""
