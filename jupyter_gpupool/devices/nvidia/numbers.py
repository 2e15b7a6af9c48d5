# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Whether the process numbers in NVML's lists are those of this PID namespace.

In a container most drivers list the numbers of the host. Such a number is no process here, or, by
chance, another one: bytes would be charged to the wrong session, and the wrong process ended. So a
number counts as a process only where that was proven: a self-test's program, whose number is
known, appeared in the list under it. Without a self-test, in the initial PID namespace, whose
numbers NVML lists. Everywhere else :meth:`Numbers.translate` makes the numbers negative: no
process has such a number, so nobody can mistake one for a process.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from dataclasses import replace
from typing import Sequence

from ...local_machine import FIRST_NAMESPACE, boot_id, pid_namespace
from ..model import DeviceSample, ProcessMemory

#: Samples in a row in which a listed number must have no process before that is evidence: a
#: process that has just ended may be listed for a moment more.
ABSENT = 3


def to_memo(proven: bool | None) -> str:
    """Return what a later broker of this boot and PID namespace is to know; "" if nothing."""
    return "" if proven is None else json.dumps([boot_id(), pid_namespace(), proven])


def from_memo(text: str) -> bool | None:
    """Return what :func:`to_memo` was given in this boot and PID namespace, else None."""
    try:
        *where, proven = json.loads(text or "[]")
    except ValueError:
        return None
    here = [boot_id(), pid_namespace()]
    return proven if where == here and isinstance(proven, bool) else None


class Numbers:
    """What is known of the numbers that NVML lists; one for each :class:`.sampling.Sampler`.

    ``known`` is what an earlier broker found in this namespace.
    """

    def __init__(self, log: logging.Logger, known: bool | None = None) -> None:
        #: Whether they are processes of this namespace; None: not known yet.
        self.proven: bool | None = None
        self._initial = pid_namespace() == FIRST_NAMESPACE
        self._log = log
        self._known = known
        self._settled = False
        self._absent: Counter[int] = Counter()

    def learn(self, before: DeviceSample, after: DeviceSample, pid: int) -> None:
        """Compare the lists before and after process ``pid`` took memory on a device."""
        old = {abs(process.pid) for process in before.processes}
        new = {abs(process.pid) for process in after.processes} - old
        if pid in new:
            self.proven = True
        elif new and pid not in old and self.proven is None:
            self.proven = False

    def settle(self) -> None:
        """The self-tests are over: what they did not tell is as an earlier broker found it."""
        if self.proven is None:
            self.proven = self._known if self._known is not None else self._initial or None
        if self.proven is False and not self._settled:
            self._log.warning(
                "NVML lists process numbers of another PID namespace, as in a container: memory is "
                "counted without them, and no process is ended by such a number"
            )
        self._settled = True

    def translate(self, sample: DeviceSample) -> DeviceSample:
        """Return the sample with the numbers negative that are not known to be processes here."""
        if not self._settled or not sample.processes:
            return sample
        if self.proven and not self._initial:
            self._look_for(sample.processes)
        if self.proven:
            return sample
        hidden = (ProcessMemory(-abs(p.pid), p.bytes) for p in sample.processes)
        return replace(sample, processes=tuple(hidden))

    def _look_for(self, listed: Sequence[ProcessMemory]) -> None:
        """Take back the proof if listed numbers stay without a process."""
        absent = {process.pid for process in listed if process.pid > 0 and _absent(process.pid)}
        self._absent = Counter({pid: self._absent[pid] + 1 for pid in absent})
        if max(self._absent.values(), default=0) >= ABSENT:
            self.proven = False
            self._log.warning(
                "NVML lists process numbers that do not exist here: they are of another PID "
                "namespace, and count as no process from now on"
            )


def _absent(pid: int) -> bool:
    # By signal 0, not by /proc, which may hide the processes of other users.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False
