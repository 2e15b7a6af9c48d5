# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Records what a driver's two libraries answer on a machine without a device.

``python -m tests.driver_records FOLDER > record.json`` calls the ``libcuda.so.1`` and
``libnvidia-ml.so.1`` of a folder on a machine without an NVIDIA GPU. NVIDIA's own libraries load
and answer there, too. With ``--anywhere``, the machine may have a GPU: the recorder then asks only
the questions whose answers do not depend on a device, and never initialises the driver. Without a
folder, the recorder takes the libraries that the dynamic loader finds.

This process loads no library. A separate child for each question loads the library, calls it and
ends. A crash counts as an answer ("signal 11"); a hang is an error.

``records/`` has the records of two kinds of drivers. The drivers of Debian's non-free packages
libcuda1 and libnvidia-ml1 were recorded without a GPU. Driver 580.159.04 was recorded with
``--anywhere`` on a machine with an H200. ``tests/emulator/test_records.py`` compares the emulated
driver with the records, and ``tests/guard/test_real_drivers.py`` compares the guard with them.
``tests/gpu/test_records.py`` records the driver of a GPU machine, and compares the emulated driver
with that record.

The record is a dict that JSON can hold:

``driver``, ``cuda``
    The version of the libraries from the file's name (None: the name has no version), and the
    version that cuDriverGetVersion returns before cuInit.
``device``
    False: recorded on a machine where cuInit finds no device. None: recorded with
    ``--anywhere``.
``cuda_errors``
    Code: [name, text]; a missing name or text is None. Every code of ``errors.CODES`` that is
    not listed has the answer ``"others"``.
``procaddr``
    Name: the functions that cuGetProcAddress_v2 returns for the name, each with the first version
    for which it returns this function. See ``procaddr.forms``.
``procaddr_refused_from``
    From this version on, cuGetProcAddress_v2 refuses every name and all flags: it returns 1, and
    writes neither the address nor the status. None: it accepts any version.
``procaddr_older_form_differs``
    Questions to which the two forms give different answers: cuGetProcAddress with four arguments,
    and the newer form.
``never_given``
    Exported functions that cuGetProcAddress never returns. Functions whose names begin with
    ``cudbg`` are for a debugger: the record lists them, but the recorder never calls them.
``arguments``
    The text of each single question: the answer.
``calls``, ``nvml_calls``
    Kind of call: result: the functions with that result, or "all others". A kind names the time of
    the call and the arguments. The time is "before init" or "after a failed init". With "zero", all
    arguments are zero. With "buffer", all arguments are the address of a zeroed buffer, which is
    the same in every record. With "buffer but for one", one argument is zero, and all others are
    this address. The record then lists each function with the number (from 1) of an argument that
    changes the answer. "After a failed init" lists only the functions whose answers differ from the
    answers "before init".
``nvml_functions``, ``nvml_errors``, ``nvml_arguments``
    The same fields for NVML.
"""
