# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Ask the monitor child for NVML's samples, with a time-out; decide whether to trust NVML's pids.

In a container, most drivers list the pids of the host. In the container, a pid of the host may
belong to no process, or to a different process. If the pool trusted such pids, it could charge the
wrong session and end the wrong process.

The sampler trusts NVML's pids if NVML lists the program of a self-test with the pid that the
program has in this PID namespace. If the self-tests give no result, the result of an earlier broker
counts. Without an earlier result, the sampler trusts the pids only if this is the initial PID
namespace, because NVML lists the pids of the initial namespace. :meth:`Numbers.translate` makes
untrusted pids negative, because no process has a negative pid.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import time
from collections import Counter
from dataclasses import replace
from typing import Any, Callable, Collection, Iterator, Mapping, Sequence

from ...errors import Code, DriverError
from ...local_machine import FIRST_NAMESPACE, boot_id, pid_namespace
from ...pool.attribution import slack
from ..children import ChildLost, Children
from ..model import DeviceSample, ProcessMemory

#: Seconds for NVML to read all devices once. After this time, a new process replaces the monitor.
SAMPLE_TIMEOUT = 5.0

#: ``FREED_TIMEOUT``: seconds to wait until NVML shows the memory of an ended or suspended process
#: as free. ``_FREED_POLL``: seconds between two checks.
FREED_TIMEOUT = 2.0
_FREED_POLL = 0.02
#: This time-out replaces FREED_TIMEOUT if the sampler trusts NVML's pids, but NVML lists none of
#: the processes. These processes have no context.
_UNLISTED_TIMEOUT = 0.25


#: A suspended process may keep some device memory: at most KEPT bytes, and at most a quarter
#: (1 / KEPT_PART) of the memory that it had before the suspend.
KEPT, KEPT_PART = 16 << 20, 4


def others(sample: DeviceSample, pids: Collection[int]) -> dict[int, int | None]:
    """Return the bytes of each process that NVML lists, by pid, but without ``pids``."""
    return {p.pid: p.bytes for p in sample.processes if p.pid not in pids}


def _left(before: DeviceSample, after: DeviceSample, pids: Collection[int]) -> bool:
    """Return whether ``pids``, suspended between the two samples, have given their memory back.

    Both NVML's list and the free memory must show this. In the list, each suspended process may
    still have a little memory, because some drivers keep showing it. If another process has come,
    gone or changed its memory, only the list counts.
    """
    had = {p.pid: p.bytes or 0 for p in before.processes if p.pid in pids}
    for process in after.processes:
        most = min(KEPT, had.get(process.pid, 0) // KEPT_PART)
        if process.pid in pids and (process.bytes is None or process.bytes > most):
            return False
    if after.lost or others(before, pids) != others(after, pids):
        return True
    least = sum(size - min(KEPT, size // KEPT_PART) for size in had.values())
    return after.free - before.free >= least - slack(before.total)


class Sampler:
    """Asks the monitor child for samples, and calls ``on_lost`` once for each device that fails.

    If NVML cannot read a device, and the driver then reports an Xid for it, this class calls
    ``on_lost`` a second time, with the Xid.
    """

    def __init__(
        self,
        *,
        children: Children,
        log: logging.Logger,
        on_lost: Callable[[str, str], None],
        timeout: float = SAMPLE_TIMEOUT,
        numbers: bool | None = None,
    ) -> None:
        self.child = children.make("monitor", on_event=self._take)
        self.numbers = Numbers(log, numbers)
        self._timeout = timeout
        #: For each copy that is under way: how many seconds the copy may take. ``_longest`` is the
        #: largest of these numbers, also of copies that have ended. It starts again when a copy
        #: begins and no other copy is under way.
        self._copies: list[float] = []
        self._longest = 0.0
        #: When the last copy ended.
        self._copied = -math.inf
        self._on_lost = on_lost
        self._uuids: tuple[str, ...] = ()
        self._watching = 0
        self._xids: dict[str, str] = {}
        self._places: dict[str, int] = {}
        #: For each lost device: the reason that was told last.
        self._told: dict[str, str] = {}

    async def discover(self) -> dict[str, Any]:
        """Return the result of ``monitor.discover``.

        Raises
        ------
        DriverError
            If the driver is missing, or if NVML does not answer. The error says why.
        """
        found = await self._call("discover", 60.0)
        self._places = {row["uuid"]: row["index"] for row in found["devices"] if not row["mig"]}
        return found

    async def watch(self, uuids: Sequence[str]) -> None:
        """Report failures of these devices from now on."""
        self._uuids = tuple(uuids)
        self._watching = 0
        await self._rewatch()

    async def look_away(self, uuids: Sequence[str]) -> None:
        """Watch only these devices from now on, and open no other device.

        The method replaces the monitor process, and does not call NVML itself. If the old process
        has not answered a request yet, the new process answers it, but only for these devices.
        """
        self._uuids = tuple(uuids)
        await self.child.replace()

    @contextlib.contextmanager
    def copying(self, seconds: float) -> Iterator[None]:
        """Give samples up to ``seconds`` more time while a checkpoint or restore copies memory.

        Some drivers do not answer NVML during a copy, so a late sample is then no failure. A sample
        that was requested before the copy also gets more time. If many copies follow each other, a
        sample does not get more time for all of them, but only for the longest copy.
        """
        self._longest = max(seconds, self._longest if self._copies else 0.0)
        self._copies.append(seconds)
        try:
            yield
        finally:
            self._copies.remove(seconds)
            self._copied = time.monotonic()

    async def sample_soon(self, uuids: Sequence[str]) -> list[DeviceSample]:
        """Return the same as :meth:`sample`, but do not wait for the end of a copy.

        Raises
        ------
        DriverError
            As :meth:`sample`, or if NVML does not answer because the driver is copying.
        """
        if not self._copies:
            return await self.sample(uuids)
        task = asyncio.ensure_future(self.sample(uuids))
        done, _ = await asyncio.wait({task}, timeout=self._timeout)
        if done:
            return task.result()
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        raise DriverError(
            f"NVML has not answered for {self._timeout:g} s, while the driver copies the memory of "
            "another kernel.",
            code=Code.NVML,
        )

    async def sample(self, uuids: Sequence[str] | None = None) -> list[DeviceSample]:
        """Return one sample for each of ``uuids`` (None: all), in that order.

        Raises
        ------
        DriverError
            If NVML does not answer in time. This method has then killed the monitor process.
        """
        await self._rewatch()

        def fields() -> dict[str, Any]:
            # This may be the first request to a new monitor process. The new process needs the
            # indices ("places") to find the devices, so that it opens no other device.
            wanted = self._uuids if uuids is None else uuids
            return {"uuids": wanted, "lost": self._xids, "places": self._places}

        answer = await self._call("sample", self._timeout, fields)
        samples = []
        for row in answer["samples"]:
            processes = tuple(ProcessMemory(**process) for process in row["processes"])
            sample = DeviceSample(**{**row, "processes": processes})
            if not sample.lost and sample.uuid in self._xids:
                # The monitor read the device before the Xid. The event was faster than the answer.
                reason = self._xids[sample.uuid]
                sample = replace(sample, lost=reason, free=0, processes=(), utilisation=None)
            samples.append(self.numbers.translate(sample))
            if sample.lost:
                self._tell(sample.uuid, sample.lost)
            else:
                self._told.pop(sample.uuid, None)
        return samples

    async def wait_freed(
        self, pids: Collection[int], before: Sequence[DeviceSample]
    ) -> tuple[list[DeviceSample], bool]:
        """Wait, with a time-out, until the devices of ``before`` hold no memory of ``pids``.

        Return new samples, and whether the memory is free.

        If NVML's lists in ``before`` show none of ``pids``, this method waits for an increase of
        free memory instead. The time-out depends on whether the sampler trusts NVML's pids:

        - If it does, the processes have no context and almost no memory. The time-out is short.
        - If it does not, NVML may list the processes with other pids. The time-out is long.
        """
        uuids = [sample.uuid for sample in before]
        shown = any(process.pid in pids for sample in before for process in sample.processes)
        loop = asyncio.get_running_loop()
        nothing = not shown and self.numbers.proven
        deadline = loop.time() + (_UNLISTED_TIMEOUT if nothing else FREED_TIMEOUT)
        while True:
            after = await self.sample(uuids)
            if shown:
                freed = all(_left(b, a, pids) for b, a in zip(before, after, strict=True))
            else:
                freed = any(a.free > b.free for a, b in zip(after, before, strict=True))
            if freed or loop.time() >= deadline:
                return after, freed or bool(nothing)
            await asyncio.sleep(_FREED_POLL)

    async def renew(self, uuids: Collection[str]) -> None:
        """Start a new monitor process, and forget earlier failures of ``uuids``.

        After a reset, a failed device may be healthy again. If devices were exchanged, NVML finds
        the new devices only in a new process.
        """
        for uuid in uuids:
            self._xids.pop(uuid, None)
        await self.child.replace()

    async def _rewatch(self) -> None:
        """Tell a new monitor process which devices to watch, and which are lost."""
        if not self._uuids or (self.child.pid and self._watching == self.child.generation):
            return
        await self._call(
            "watch",
            self._timeout,
            lambda: {"uuids": self._uuids, "lost": self._xids, "places": self._places},
        )
        self._watching = self.child.generation

    async def _call(
        self, op: str, timeout: float, fields: Callable[[], Mapping[str, Any]] = dict
    ) -> dict[str, Any]:
        try:
            return await self.child.ask(op, timeout, latest=fields, more=self._more())
        except ChildLost as error:
            raise DriverError(
                f"NVML did not answer: {error}",
                code=Code.NVML,
                next_step="The pool starts a new process and asks again; nvidia-smi shows whether "
                "the driver hangs.",
            ) from None

    def _more(self) -> Callable[[], float]:
        """Return the function ``more`` for one request (see :meth:`.children.Child.call`).

        The function gives the request more time while a copy is under way, and after a copy.
        """
        given = 0.0

        def more() -> float:
            nonlocal given
            now = time.monotonic()
            wanted = (now if self._copies else self._copied) + self._timeout - now
            seconds = max(0.0, min(wanted, self._longest + self._timeout - given))
            given += seconds
            return seconds

        return more

    def _take(self, message: dict[str, Any]) -> None:
        if message["event"] == "lost" and message["uuid"]:
            uuid, reason = message["uuid"], message["reason"]
            if uuid not in self._xids and self._told.get(uuid) != reason:
                # A sample may have reported that the device cannot be read. The Xid must be
                # reported in addition, because only a reset helps after an Xid. If a sample has
                # already reported the Xid, this event says nothing new.
                self._told.pop(uuid, None)
            self._xids[uuid] = reason
            self._tell(uuid, reason)

    def _tell(self, uuid: str, reason: str) -> None:
        if uuid not in self._told:
            self._told[uuid] = reason
            self._on_lost(uuid, reason)


#: If NVML lists a pid in this many samples in a row, but the pid has no process here, NVML's pids
#: belong to another PID namespace. One sample proves nothing: NVML may still list a process that
#: has just ended.
ABSENT = 3


def to_memo(proven: bool | None) -> str:
    """Return ``proven`` as text for a later broker; "" if it is None.

    The text is valid until the next boot, and only in this PID namespace.
    """
    return "" if proven is None else json.dumps([boot_id(), pid_namespace(), proven])


def from_memo(text: str) -> bool | None:
    """Return the value that :func:`to_memo` put into ``text``.

    The result is None if ``text`` is from another boot or from another PID namespace.
    """
    try:
        *where, proven = json.loads(text or "[]")
    except ValueError:
        return None
    here = [boot_id(), pid_namespace()]
    return proven if where == here and isinstance(proven, bool) else None


class Numbers:
    """Decides whether NVML lists pids of this PID namespace; one for each :class:`Sampler`.

    ``known`` is an earlier broker's result in this namespace.
    """

    def __init__(self, log: logging.Logger, known: bool | None = None) -> None:
        #: Whether NVML's pids belong to this PID namespace; None means that this is not known yet.
        self.proven: bool | None = None
        self._initial = pid_namespace() == FIRST_NAMESPACE
        self._log = log
        self._known = known
        self._settled = False
        self._absent: Counter[int] = Counter()

    def learn(self, before: DeviceSample, after: DeviceSample, pid: int) -> None:
        """Learn from two samples whether NVML lists process ``pid`` with this pid.

        The process has taken memory on the device between the samples.
        """
        old = {abs(process.pid) for process in before.processes}
        new = {abs(process.pid) for process in after.processes} - old
        if pid in new:
            self.proven = True
        elif new and pid not in old and self.proven is None:
            self.proven = False

    def settle(self) -> None:
        """Decide after the self-tests. If they gave no result, use an earlier broker's result.

        Without an earlier result, the pids count as proven only in the initial PID namespace.
        """
        if self.proven is None:
            self.proven = self._known if self._known is not None else self._initial or None
        if self.proven is False and not self._settled:
            self._log.warning(
                "The process numbers that NVML lists belong to another PID namespace, as in a "
                "container. The pool does not use these numbers to count memory or to end a process"
            )
        self._settled = True

    def translate(self, sample: DeviceSample) -> DeviceSample:
        """Return the sample; make its pids negative if they may belong to another PID namespace."""
        if not self._settled or not sample.processes:
            return sample
        if self.proven and not self._initial:
            self._look_for(sample.processes)
        if self.proven:
            return sample
        hidden = (ProcessMemory(-abs(p.pid), p.bytes) for p in sample.processes)
        return replace(sample, processes=tuple(hidden))

    def _look_for(self, listed: Sequence[ProcessMemory]) -> None:
        """Stop trusting NVML's pids if a pid has no process in :data:`ABSENT` samples in a row."""
        absent = {process.pid for process in listed if process.pid > 0 and _absent(process.pid)}
        self._absent = Counter({pid: self._absent[pid] + 1 for pid in absent})
        if max(self._absent.values(), default=0) >= ABSENT:
            self.proven = False
            self._log.warning(
                "NVML lists process numbers that do not exist here, so they belong to another PID "
                "namespace. From now on, the pool does not use these numbers to count memory or to "
                "end a process"
            )


def _absent(pid: int) -> bool:
    # Use signal 0 instead of /proc, because /proc may hide the processes of other users.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False
