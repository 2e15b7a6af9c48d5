# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Cases that the emulated NVML lacks: MIG, graphics, missing figures, several Xid events.

The tests replace single functions of NVIDIA's client by name. If the client has no function of this
name, the test fails.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pynvml
import pytest

from jupyter_gpupool.devices.nvidia.nvml import Nvml
from jupyter_gpupool.errors import DriverError

GiB = 1 << 30


class Machine:
    """Two GPUs. The second GPU is in MIG mode: it has instances in places 0 and 2."""

    def __init__(self, monkeypatch):
        self.patch = monkeypatch
        self.memory = {
            name: SimpleNamespace(total=8 * GiB, used=GiB, free=6 * GiB, reserved=GiB)
            for name in ("gpu0", "gpu1", "mig0", "mig2")
        }
        self.set("nvmlInit", lambda: None)
        self.set("nvmlDeviceGetCount", lambda: 2)
        self.set("nvmlDeviceGetHandleByIndex", lambda index: f"gpu{index}")
        self.set("nvmlDeviceGetHandleByUUID", lambda uuid: uuid.removeprefix("U-"))
        self.set("nvmlDeviceGetUUID", lambda handle: f"U-{handle}")
        self.set("nvmlDeviceGetName", lambda handle: f"Name {handle}")
        self.set("nvmlDeviceGetMigMode", lambda handle: [int(handle == "gpu1")] * 2)
        self.set("nvmlDeviceGetMaxMigDeviceCount", lambda handle: 3)
        self.set("nvmlDeviceGetMigDeviceHandleByIndex", self.instance)
        self.set("nvmlDeviceGetMemoryInfo", lambda handle, version=None: self.memory[handle])
        self.set("nvmlDeviceGetUtilizationRates", lambda handle: SimpleNamespace(gpu=37))
        self.set("nvmlDeviceGetComputeRunningProcesses", lambda handle: [])
        self.set("nvmlDeviceGetGraphicsRunningProcesses", lambda handle: [])

    def set(self, name, function):
        self.patch.setattr(pynvml, name, function)

    def fail(self, name, code):
        def fail(*_, **__):
            raise pynvml.NVMLError(code)

        self.set(name, fail)

    def instance(self, handle, place):
        if place == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return f"mig{place}"


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def process(pid, size):
    return SimpleNamespace(pid=pid, usedGpuMemory=size)


def test_gpu_in_mig_mode_appears_as_its_instances(machine):
    rows, problems = Nvml().discover()
    assert [(row["uuid"], row["index"], row["mig"]) for row in rows] == [
        ("U-gpu0", 0, False),
        ("U-mig0", 1, True),
        ("U-mig2", 1, True),
    ]
    assert problems == []
    assert (rows[0]["total"], rows[0]["reserved"]) == (8 * GiB, GiB)


def test_mig_mode_without_instances_is_reported(machine):
    machine.fail("nvmlDeviceGetMigDeviceHandleByIndex", pynvml.NVML_ERROR_NOT_FOUND)
    rows, problems = Nvml().discover()
    assert [row["uuid"] for row in rows] == ["U-gpu0"]
    assert problems == ["GPU 1 is in MIG mode and has no MIG instance to use."]


def test_gpu_without_mig_appears_as_itself(machine):
    machine.fail("nvmlDeviceGetMigMode", pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert [row["mig"] for row in Nvml().discover()[0]] == [False, False]


def test_unreadable_gpu_is_left_out_and_named(machine):
    machine.fail("nvmlDeviceGetMigMode", pynvml.NVML_ERROR_GPU_IS_LOST)
    rows, problems = Nvml().discover()
    assert rows == []
    assert [text.split(" cannot")[0] for text in problems] == ["GPU 0", "GPU 1"]


def test_unknown_figures_stay_unknown(machine):
    machine.fail("nvmlDeviceGetUtilizationRates", pynvml.NVML_ERROR_NOT_SUPPORTED)
    machine.set("nvmlDeviceGetComputeRunningProcesses", lambda _: [process(7, None)])
    (sample,) = Nvml().sample(["U-gpu0"])
    assert sample.utilisation is None
    assert [(row.pid, row.bytes) for row in sample.processes] == [(7, None)]
    assert (sample.used, sample.free, sample.lost) == (GiB, 6 * GiB, "")


def test_process_with_graphics_and_compute_counts_once(machine):
    machine.set("nvmlDeviceGetComputeRunningProcesses", lambda _: [process(7, 5), process(8, 1)])
    machine.set("nvmlDeviceGetGraphicsRunningProcesses", lambda _: [process(7, 9)])
    (sample,) = Nvml().sample(["U-gpu0"])
    assert [(row.pid, row.bytes) for row in sample.processes] == [(7, 9), (8, 1)]


def test_older_memory_call_replaces_a_missing_newer_call(machine):
    def info(handle, version=None):
        if version is not None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return SimpleNamespace(total=8 * GiB, used=2 * GiB, free=6 * GiB)

    machine.set("nvmlDeviceGetMemoryInfo", info)
    (sample,) = Nvml().sample(["U-gpu0"])
    assert (sample.total, sample.used, sample.reserved, sample.free) == (
        8 * GiB,
        2 * GiB,
        0,
        6 * GiB,
    )


def test_failed_device_shows_its_last_figures_and_no_free_memory(machine):
    nvml = Nvml()
    assert nvml.sample(["U-gpu0"])[0].lost == ""
    machine.fail("nvmlDeviceGetMemoryInfo", pynvml.NVML_ERROR_GPU_IS_LOST)
    (sample,) = nvml.sample(["U-gpu0"])
    assert "NVML cannot read the device" in sample.lost
    assert (sample.total, sample.used, sample.free) == (8 * GiB, GiB, 0)
    assert (sample.processes, sample.utilisation) == ((), None)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "No NVIDIA driver was found"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "kernel module is not loaded"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "Reboot"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "/dev/nvidia"),
        (pynvml.NVML_ERROR_UNKNOWN, "Unknown Error"),
    ],
)
def test_driver_that_does_not_start_is_explained(machine, code, says):
    machine.fail("nvmlInit", code)
    with pytest.raises(DriverError, match=says):
        Nvml()


def test_xid_of_the_application_is_not_a_device_failure(machine):
    xids = iter([31, 13, 79, 43, 48])

    def wait(_events, _timeout):
        try:
            xid = next(xids)
        except StopIteration:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN) from None
        kind = pynvml.nvmlEventTypeXidCriticalError
        return SimpleNamespace(device="gpu0", eventType=kind, eventData=xid)

    machine.set("nvmlEventSetCreate", lambda: "set")
    machine.set("nvmlDeviceRegisterEvents", lambda *_: None)
    machine.set("nvmlEventSetWait_v2", wait)
    assert [*Nvml().losses(["U-gpu0"])] == [
        ("U-gpu0", "The driver reported Xid 79."),
        ("U-gpu0", "The driver reported Xid 48."),
    ]


def test_wait_for_events_continues_after_a_time_out(machine):
    turns = itertools.count()

    def wait(_events, _timeout):
        if next(turns) < 3:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        return SimpleNamespace(
            device="gpu0", eventType=pynvml.nvmlEventTypeXidCriticalError, eventData=79
        )

    machine.set("nvmlEventSetCreate", lambda: "set")
    machine.set("nvmlDeviceRegisterEvents", lambda *_: None)
    machine.set("nvmlEventSetWait_v2", wait)
    assert next(Nvml().losses(["U-gpu0"]))[0] == "U-gpu0"


def test_devices_without_events_are_not_watched(machine):
    machine.fail("nvmlEventSetCreate", pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert [*Nvml().losses(["U-gpu0"])] == []
