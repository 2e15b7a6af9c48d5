# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The GPUs of this machine, behind one Protocol for all vendors.

======================  ========================================================================
``backend``             the Protocols: what the product needs of a vendor's folder and its GPUs
``model``               the results: samples and outcomes, frozen values
``children``            child processes for vendor libraries: the code in the parent
``child``               the start script that runs in each child process
``nvidia``              NVIDIA's GPUs
======================  ========================================================================

The rest of the product imports names from this package, and never from a module of the package.
Only this module chooses the vendor. To add a vendor, add a folder beside ``nvidia`` that implements
``backend.Vendor``, and choose the folder in this module. The server and the demo also import this
package, so it loads no library of a vendor, and a vendor's folder imports its larger modules only
when they are needed. Kernels do not import this package: the broker sends them the vendor's values
as environment variables.
"""

from . import nvidia
from .backend import DeviceOptions, Devices, GuardedDevices, OpenDevices, Vendor
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

vendor: Vendor = nvidia

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
    "Vendor",
    "Verdict",
    "assumed_context",
    "vendor",
]
