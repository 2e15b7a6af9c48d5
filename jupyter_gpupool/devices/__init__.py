# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The GPUs of this machine, behind one Protocol for all vendors.

======================  ========================================================================
``backend``             the Protocol: what the broker needs of a vendor's GPUs
``model``               the results: samples and outcomes, frozen values
``children``            child processes for vendor libraries: the code in the parent
``child``               the start script that runs in each child process
``nvidia``              NVIDIA's GPUs
======================  ========================================================================

The rest of the product imports names from this package, and never from a module of the package.
Only this module chooses the vendor. To add a vendor, add a folder beside ``nvidia``, and choose the
folder in this module.
"""

from . import nvidia as vendor
from .backend import DeviceOptions, Devices, GuardedDevices, OpenDevices
from .model import (
    Continued,
    DeviceSample,
    FileHolder,
    Finding,
    ProcessMemory,
    ResumeOutcome,
    SessionState,
    SuspendOutcome,
    Verdict,
    assumed_context,
)

__all__ = [
    "Continued",
    "DeviceOptions",
    "DeviceSample",
    "Devices",
    "FileHolder",
    "Finding",
    "GuardedDevices",
    "OpenDevices",
    "ProcessMemory",
    "ResumeOutcome",
    "SessionState",
    "SuspendOutcome",
    "Verdict",
    "assumed_context",
    "vendor",
]
