# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Runs the tests under ``tests/gpu`` and the benchmarks here on a real GPU.

=============  =================================================================================
``__main__``   the command line: ``make gpu``
``plan``       the items to run, their order and their time limits
``runner``     runs one item in its own process group, and kills the processes it leaves
``record``     the file of outcomes; ``make gpu`` skips an item that has an outcome
``raw``        arrays, copies and checks through the driver's own calls
``child``      runs an object in its own process, and kills the process at the end
(others)       each is one benchmark
=============  =================================================================================
"""
