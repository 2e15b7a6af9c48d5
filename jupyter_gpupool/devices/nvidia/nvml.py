# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""NVML through NVIDIA's own client (nvidia-ml-py). Runs in the monitor child only.

If NVML does not give a number, the number stays unknown. This module never invents a number.
"""

from __future__ import annotations

import ctypes
import sys
import time
from typing import Any, Iterator, Mapping, Sequence

from ...errors import Code, DriverError
from ..model import DeviceSample, ProcessMemory
from .driver import problem
from .interpreter import INSTALL

#: The Xid errors that an application causes. After any other Xid error, the pool cannot trust the
#: device. The list is from the health checks of NVIDIA's k8s-device-plugin.
APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})


def _address(handle: Any) -> int | None:
    """Return a handle, which is a pointer, as a number."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def _error_name(pynvml: Any, error: Any) -> str:
    """Return the name of an NVMLError's constant without ``NVML_ERROR_``, such as GPU_IS_LOST."""
    for name in dir(pynvml):
        if name.startswith("NVML_ERROR_") and getattr(pynvml, name) == error.value:
            return name.removeprefix("NVML_ERROR_")
    return str(error.value)


class Nvml:
    """NVML, initialised for one process.

    Raises
    ------
    DriverError
        If NVML is missing or does not start, with the reason in a sentence.
    """

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise DriverError(
                f"The Python package nvidia-ml-py, which finds the GPUs, is not in {sys.prefix} "
                f"({error}).",
                code=Code.NO_DRIVER,
                next_step=f"Run: {INSTALL}",
            ) from None
        self._n = pynvml
        self._lost: dict[str, str] = {}
        self._last: dict[str, DeviceSample] = {}
        self._handles: dict[str, Any] = {}
        #: For the address of each handle: the UUID of the handle's device. An entry remains after
        #: the device fails, because NVML may not give the UUID of a failed device.
        self._owners: dict[int | None, str] = {}
        self._places: dict[str, int] = {}
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            text = problem(_error_name(pynvml, error), str(error))
            raise DriverError(text, code=Code.NO_DRIVER) from None

    # ------------------------------------------------------------------ discovery

    def versions(self) -> tuple[str, str]:
        """Return the driver's version and its CUDA version; an unknown version is empty."""
        n = self._n
        try:
            driver = str(n.nvmlSystemGetDriverVersion())
        except n.NVMLError:
            driver = ""
        try:
            number = int(n.nvmlSystemGetCudaDriverVersion_v2())
            cuda = f"{number // 1000}.{number % 1000 // 10}"
        except n.NVMLError:
            cuda = ""
        return driver, cuda

    def discover(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the devices, and a sentence for each device that cannot be used.

        Each GPU has one row. A GPU in MIG mode has one row for each MIG instance instead. A row has
        ``uuid``, ``index``, ``minor`` (the number of the device file), ``name``, ``total`` (bytes),
        ``reserved`` (bytes) and ``mig``.
        """
        n = self._n
        rows: list[dict[str, Any]] = []
        problems: list[str] = []
        for index in range(n.nvmlDeviceGetCount()):
            try:
                handle = n.nvmlDeviceGetHandleByIndex(index)
                if not self._mig_mode(handle):
                    rows.append(self._row(handle, index, mig=False))
                    continue
                found = [self._row(h, index, mig=True) for h in self._mig_handles(handle)]
            except n.NVMLError as error:
                problems.append(f"GPU {index} cannot be read and is left out: {error}.")
                continue
            rows += found
            if not found:
                problems.append(f"GPU {index} is in MIG mode and has no MIG instance to use.")
        return rows, problems

    def _row(self, handle: Any, index: int, *, mig: bool) -> dict[str, Any]:
        n = self._n
        uuid = str(n.nvmlDeviceGetUUID(handle))
        self._keep(uuid, handle)
        total, _used, reserved, _free = self._memory(handle)
        name = str(n.nvmlDeviceGetName(handle))
        return {
            "uuid": uuid,
            "index": index,
            "minor": self._minor(handle, index),
            "name": name,
            "total": total,
            "reserved": reserved,
            "mig": mig,
        }

    def _minor(self, handle: Any, index: int) -> int:
        """Return the number of the device file. A container sees the same number as the machine."""
        try:
            return int(self._n.nvmlDeviceGetMinorNumber(handle))
        except self._n.NVMLError:
            return index

    def _mig_mode(self, handle: Any) -> bool:
        n = self._n
        try:
            return bool(n.nvmlDeviceGetMigMode(handle)[0] == n.NVML_DEVICE_MIG_ENABLE)
        except (n.NVMLError_NotSupported, n.NVMLError_FunctionNotFound):
            return False  # a GPU without MIG

    def _mig_handles(self, handle: Any) -> Iterator[Any]:
        n = self._n
        for place in range(n.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                yield n.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
            except n.NVMLError_NotFound:
                continue  # some indices have no MIG instance

    # ------------------------------------------------------------------ sampling

    def sample(self, uuids: Sequence[str]) -> list[DeviceSample]:
        """Return one sample per device, in the order of ``uuids``."""
        return [self._sample(uuid) for uuid in uuids]

    def remember(self, places: Mapping[str, int], lost: Mapping[str, str]) -> None:
        """Store what an earlier monitor found, by UUID: each GPU's index, and why a GPU failed."""
        self._places |= places
        for uuid, reason in lost.items():
            self.mark_lost(uuid, reason)

    def mark_lost(self, uuid: str, reason: str) -> None:
        """Report the device as lost in all later samples, because the driver has reported an Xid.

        NVML may still show the device's memory. The mark lasts until this process ends, because
        only a reset makes the device healthy again.
        """
        self._lost.setdefault(uuid, reason)

    def _sample(self, uuid: str) -> DeviceSample:
        n = self._n
        lost = self._lost.get(uuid, "")
        if not lost:
            try:
                handle = self._handle(uuid)
                total, used, reserved, free = self._memory(handle)
                sample = DeviceSample(
                    uuid=uuid,
                    total=total,
                    used=used,
                    reserved=reserved,
                    free=free,
                    processes=self._processes(handle),
                    utilisation=self._utilisation(handle),
                )
            except n.NVMLError as error:
                lost = f"NVML cannot read the device: {error}."
                self._handles.pop(uuid, None)
            else:
                self._last[uuid] = sample
                return sample
        last = self._last.get(uuid)
        return DeviceSample(
            uuid=uuid,
            total=last.total if last else 0,
            used=last.used if last else 0,
            reserved=last.reserved if last else 0,
            free=0,
            lost=lost,
        )

    def _handle(self, uuid: str) -> Any:
        if uuid not in self._handles:
            self._keep(uuid, self._found(uuid))
        return self._handles[uuid]

    def _keep(self, uuid: str, handle: Any) -> None:
        self._handles[uuid] = handle
        self._owners[_address(handle)] = uuid

    def _found(self, uuid: str) -> Any:
        """Return the handle of a GPU; find the GPU by its index if the index is known.

        Without the index, NVML must search for the UUID. During the search it may open the device
        files of other GPUs, and keep them open.
        """
        n = self._n
        if uuid in self._places:
            # If this call fails, the device is lost. Do not search for the UUID of a lost device,
            # because the search would open other devices.
            handle = n.nvmlDeviceGetHandleByIndex(self._places[uuid])
            if str(n.nvmlDeviceGetUUID(handle)) == uuid:
                return handle
        return n.nvmlDeviceGetHandleByUUID(uuid)

    def _memory(self, handle: Any) -> tuple[int, int, int, int]:
        """Return total, used, reserved and free bytes.

        Except for rounding, the total is the sum of the other three.
        """
        n = self._n
        try:
            memory = n.nvmlDeviceGetMemoryInfo(handle, version=n.nvmlMemory_v2)
            reserved = int(memory.reserved)
        except (n.NVMLError_FunctionNotFound, n.NVMLError_NotSupported):
            # In version 1 of the call, ``used`` includes the driver's reserved memory. So ``total``
            # is still the sum of ``used``, ``reserved`` (0) and ``free``.
            memory = n.nvmlDeviceGetMemoryInfo(handle)
            reserved = 0
        return int(memory.total), int(memory.used), reserved, int(memory.free)

    def _processes(self, handle: Any) -> tuple[ProcessMemory, ...]:
        """Return every process with a compute context, a graphics context or both."""
        n = self._n
        found: dict[int, int | None] = {}
        for name in ("Compute", "Graphics"):
            try:
                rows = getattr(n, f"nvmlDeviceGet{name}RunningProcesses")(handle)
            except (n.NVMLError_NotSupported, n.NVMLError_FunctionNotFound):
                continue
            for row in rows:
                seen, size = found.get(row.pid), row.usedGpuMemory
                found[row.pid] = size if seen is None else max(seen, size or 0)
        return tuple(ProcessMemory(pid, size) for pid, size in sorted(found.items()))

    def _utilisation(self, handle: Any) -> int | None:
        n = self._n
        try:
            return int(n.nvmlDeviceGetUtilizationRates(handle).gpu)
        except (n.NVMLError_NotSupported, n.NVMLError_FunctionNotFound, n.NVMLError_NoPermission):
            return None

    # ------------------------------------------------------------------ events

    def losses(self, uuids: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield ``(uuid, reason)`` for each failure of a device, and wait for the next failure.

        If NVML can report events for none of these devices, the iterator ends at once. Otherwise
        the iterator ends only if NVML fails during a wait.
        """
        n = self._n
        try:
            events = n.nvmlEventSetCreate()
        except n.NVMLError:
            return
        watched = 0
        for uuid in uuids:
            if uuid in self._lost:
                continue
            try:
                handle = self._handle(uuid)
                n.nvmlDeviceRegisterEvents(handle, n.nvmlEventTypeXidCriticalError, events)
                watched += 1
            except n.NVMLError:
                continue  # for example a MIG instance, whose errors only the samples show
        while watched:
            try:
                event = n.nvmlEventSetWait_v2(events, 1000)
            except n.NVMLError_Timeout:
                continue
            except n.NVMLError_GpuIsLost:
                # NVML does not name the lost device here. The next samples show it.
                time.sleep(1.0)
                continue
            except n.NVMLError:
                return
            if event.eventType != n.nvmlEventTypeXidCriticalError:
                continue
            xid = int(event.eventData)
            if xid not in APPLICATION_XIDS:
                yield self._uuid_of(event.device), f"The driver reported Xid {xid}."

    def _uuid_of(self, handle: Any) -> str:
        n = self._n
        try:
            return str(n.nvmlDeviceGetUUID(handle))
        except n.NVMLError:
            # NVML may not give the UUID of a lost device.
            return self._owners.get(_address(handle), "")
