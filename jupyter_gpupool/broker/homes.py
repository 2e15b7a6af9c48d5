# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The devices that kernels see before they have a slice; :mod:`..pool.placement` chooses them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Callable, Mapping

from ..pool.model import PoolView, Request, SessionRecord
from ..pool.placement import home_devices
from .pace import Pace

if TYPE_CHECKING:
    from .activity import Activity
    from .pages import Pages
    from .runner import Runner

#: CUDA's numbering of devices must be NVML's, or an index means two devices.
_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

#: Defaults of frameworks that would take the whole device at their first use, or memory that cannot
#: be suspended.
_FRUGAL = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    # cudf.pandas uses managed memory by default, which the driver cannot suspend.
    "CUDF_PANDAS_RMM_MODE": "async",
}


def environment(devices: tuple[str, ...]) -> Mapping[str, str]:
    """Return the variables that show a new kernel these devices."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices), **_ORDER, **_FRUGAL}


class Homes:
    """Reads what the choice depends on, and tells kernels of a better one.

    ``recent`` returns a view of the pool that may be a moment old.
    """

    def __init__(self, runner: Runner, recent: Callable[[], PoolView]) -> None:
        self._runner = runner
        self._recent = recent

    def first(self, request: Request) -> tuple[str, ...]:
        """Return the devices that a new kernel sees; its first attach corrects them."""
        return home_devices(
            self._recent().devices, self._kernels(), memory=request.memory, count=request.devices
        )

    def now(self, record: SessionRecord, seen: tuple[str, ...]) -> tuple[str, ...]:
        """Return the devices for a kernel that sees ``seen`` and is about to settle."""
        planned = self._runner.pool.preferred(record.id)
        return home_devices(
            self._recent().devices, self._kernels(),
            memory=record.request.memory, count=record.request.devices, seen=seen, planned=planned,
        )  # fmt: skip

    async def refresh(self, pages: Pages, activity: Activity) -> None:
        """Let kernels that have not called cuInit see devices with room for them."""
        devices, kernels = self._recent().devices, self._kernels()
        pace = Pace()
        for session in [*self._runner.sessions]:
            await pace.step()
            if session.page is None or session.process is None:
                continue  # nobody reads its page yet
            record, seen = self._runner.record(session.id), session.home
            if not seen or record is None or _settled(record):
                continue
            better = home_devices(
                devices, kernels, memory=record.request.memory, count=len(seen), seen=seen
            )
            if better == seen:
                continue
            reading = activity.read(session)
            if reading is not None and not reading.cuda:
                pages.set_home(session, better)
                kernels.subtract(seen)
                kernels.update(better)

    def _kernels(self) -> Counter[str]:
        """Return how many kernels see each device."""
        return Counter(uuid for session in self._runner.sessions for uuid in session.home)


def _settled(record: SessionRecord) -> bool:
    return record.state != "detached" or bool(record.suspended or record.bound)
