# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Records what a driver's two libraries answer on a machine without a device.

``python -m tests.driver_records FOLDER > record.json`` calls the ``libcuda.so.1`` and
``libnvidia-ml.so.1`` of a folder on a machine without an NVIDIA GPU; NVIDIA's own libraries load
and answer there, too. The machine may have a GPU with ``--anywhere``: the recorder then asks only
the questions whose answers do not depend on a device, and never initialises the driver. Without a
folder the recorder takes the libraries that the dynamic loader finds.

This process loads no library. A separate child for each question loads the library, calls it and
ends: a crash is recorded as an answer ("signal 11"), a hang is an error.

``records/`` has the records of two kinds of drivers: those that Debian's non-free packages libcuda1
and libnvidia-ml1 provide, recorded without a GPU; and 580.159.04, recorded with ``--anywhere`` on a
machine with an H200. ``tests/emulator/test_records.py`` compares the emulated driver with the
records, and ``tests/guard/test_real_drivers.py`` the guard. ``tests/gpu/test_records.py`` records
the driver of a GPU machine, and compares the emulated one with it.

The record is a dict that JSON can hold:

``driver``, ``cuda``
    Version of the libraries, from the file's name (None: the name has none), and what
    cuDriverGetVersion says before cuInit.
``device``
    False: recorded where cuInit finds none. None: with ``--anywhere``.
``cuda_errors``
    Code: [name, text], each None where there is none; every code of ``errors.CODES`` that is not
    listed has the answer ``"others"``.
``procaddr``
    Name: what cuGetProcAddress_v2 gives for it, from which version on. See ``procaddr.forms``.
``procaddr_refused_from``
    The version from which on cuGetProcAddress_v2 refuses every name and all flags: result 1, and
    it writes neither the address nor the status. None: it accepts any version.
``procaddr_older_form_differs``
    Questions to cuGetProcAddress, of four arguments, with another answer than that of the newer.
``never_given``
    Exported functions that cuGetProcAddress never gives. Those whose names begin with ``cudbg`` are
    a debugger's: they are listed and never called.
``arguments``
    Single questions (their text names them) and answers.
``calls``, ``nvml_calls``
    Kind ("before init" or "after a failed init"; all arguments "zero", or all the address of a
    zeroed "buffer", which is always the same): result: the functions with that result, or "all
    others". After a failed init those are named that then answer otherwise than before. "Buffer but
    for one" names functions and the number (from 1) of the argument that makes a difference if it
    is zero.
``nvml_functions``, ``nvml_errors``, ``nvml_arguments``
    The same for NVML.
"""
