# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Questions for a real GPU: the suite under ``tests/gpu``, and benchmarks.

=============  =================================================================================
``__main__``   the command line: ``make gpu``
``plan``       what is run, in which order, within which bound
``runner``     one item in a process group of its own, with a sure end
``record``     the file of outcomes: its items are not run again
``raw``        arrays, copies and checks through the driver's own calls
``child``      an object in a process of its own, with a sure end
(others)       a benchmark each
=============  =================================================================================
"""
