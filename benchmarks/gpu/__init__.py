# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Runs the tests under ``tests/gpu`` and the benchmarks here on a real GPU.

=============  =================================================================================
``__main__``   the command line: ``make gpu``
``plan``       the items to run, their order and their time limits
``runner``     runs one item in its own process group, and kills what the item leaves
``record``     the file of outcomes: an item with an outcome is not run again
``raw``        arrays, copies and checks through the driver's own calls
``child``      an object in its own process, which is killed at the end
(others)       each is one benchmark
=============  =================================================================================
"""
