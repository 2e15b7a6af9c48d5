# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The GPUs of this machine, behind one Protocol for all vendors.

======================  ========================================================================
``backend``             the Protocol: what the broker needs of a vendor's GPUs
``model``               the results: samples and outcomes, frozen values
``children``, ``child``   child processes for vendor libraries: the parent's side, the child's side
``nvidia``              NVIDIA's GPUs
======================  ========================================================================

The rest of the product imports from this package only, and from none of its modules. Only this
module chooses a vendor: a further vendor needs a folder beside ``nvidia``, and a choice here.
"""

from . import nvidia as vendor
from .backend import DeviceOptions, Devices, GuardedDevices, OpenDevices
from .model import (
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
