# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The only package that reaches vendor libraries, and only from child processes.

======================  ========================================================================
``model``               what comes out: samples and outcomes, frozen values
``processes``           /proc: identity of a process, and the processes of a session
``driver``              versions and what they can do; sentences about a missing driver
``nvml``                discovery, memory, processes, utilisation (runs in the monitor child)
``checkpoint``          suspend and resume of one process (runs in a worker child)
``child``               how a child program is started, in any Python; ``interpreter``: in which
``packages``            NVIDIA's Python packages: the versions needed, and those there are
``serve``               the loop of a child process: JSON lines on stdin and stdout
``worker``, ``monitor``   the child programs
``selftest``            a tiny CUDA program, and the verdict on a device from suspending it
``guarded``             the same program and verdict under the guard
``examiner``            from the tests to a tier, with the guard or without
``contexts``            what a CUDA context costs on a device
``children``            the parent's end of a child: calls with a wall-clock time-out
``calls``               driver calls on the processes of a session, settled if a worker is lost
``operations``          suspend and resume of a whole session, all of it or nothing
``sampling``            the parent's end of the monitor
``service``             ``DeviceService``: the door for the broker
======================  ========================================================================

``service`` imports ``operations``, ``selftest``, ``children``; these import ``model``. The broker's
process never imports ``pynvml`` or ``cuda``: a vendor library that hangs or crashes takes a
replaceable child with it, and nothing else.
"""
