# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The room for suspended state in host memory."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, TypeVar

from ..cgroups import Host, Level
from ..config.reading import HostReserve
from ..units import format_bytes

_T = TypeVar("_T")

#: After a suspend, the free memory must be at least the reserve plus one eighth of the reserve.
#: Without this eighth, memory would be short again as soon as a process takes a few more bytes, and
#: the state would move back and forth.
SLACK = 8


class HostRoom:
    """Sets host memory aside for suspended state, within the limits of all levels.

    A level is the machine or a control group. Its room is its free memory, less the part that must
    stay free, less the bytes of the suspends under way. The system's figures do not show the copies
    of these suspends yet. If this class did not subtract their bytes, two suspends could take the
    same bytes. A thread reads the system's files.
    """

    def __init__(
        self, host: Host | None = None, reserve: Callable[[], HostReserve] = HostReserve
    ) -> None:
        self.host = host or Host()
        self._reserve = reserve
        #: By session with a suspend under way: the bytes of the suspend, and the keys of the levels
        #: in which these bytes count.
        self._going: dict[str, tuple[int, frozenset[str]]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gpupool-host")

    async def read(self, work: Callable[[], _T]) -> _T:
        """Run ``work``, which reads files, in this object's thread; return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """Stop reading."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ figures

    def kept(self, level: Level) -> int:
        """Return the bytes of a level that suspended state must leave free."""
        return self._reserve().of(level.limit, machine=level.group is None)

    def most(self, level: Level) -> int:
        """Return the most bytes of suspended state for a level that holds nothing else."""
        return max(0, level.limit - self._margin(level))

    def machine(self) -> int:
        """Return the bytes that suspends may take in the levels of the broker's own process.

        These levels are the machine and the broker's control groups. In a container, the kernels
        are in these groups, too. The result does not subtract the bytes of suspends under way. This
        method reads files, so call it in the thread of :meth:`read`.
        """
        return max(0, min(level.free - self._margin(level) for level in self.host.levels()))

    def _margin(self, level: Level) -> int:
        kept = self.kept(level)
        return kept + kept // SLACK

    def _spare(self, level: Level) -> int:
        going = sum(size for size, keys in self._going.values() if level.key in keys)
        return level.free - self._margin(level) - going

    # ------------------------------------------------------------------ suspends

    async def take(self, session: str, pid: int, size: int) -> tuple[str, bool]:
        """Set ``size`` bytes aside for a suspend of process ``pid``, until :meth:`give`.

        Return two values. The first value is why the broker refuses the suspend, or "" if the
        broker allows it. The second value is true if the suspend would exceed a limit even when no
        other process uses memory.
        """
        try:
            levels = await self.read(lambda: self.host.levels(pid))
        except OSError as error:
            return (
                f"Host memory cannot be read now: {error}. The pool tries again by itself.",
                False,
            )
        never = self.never(levels, size)
        if never:
            return never, True
        # Below this line there must be no await. Two suspends may have read the levels at the same
        # time, and the second suspend must count the bytes of the first.
        tightest = min(levels, key=self._spare)
        if size and size > self._spare(tightest):
            return self._refusal(tightest, size), False
        self._going[session] = size, frozenset(level.key for level in levels)
        return "", False

    def give(self, session: str) -> None:
        """Stop counting the bytes of a session's suspend, because the suspend is over.

        If the suspend made a copy, the system's figures include the copy now.
        """
        self._going.pop(session, None)

    def never(self, levels: list[Level], size: int) -> str:
        """Return why ``size`` bytes are more than one of these levels can ever hold, or ""."""
        least = min(levels, key=self.most)
        return self._refusal(least, size) if size > self.most(least) else ""

    def _refusal(self, level: Level, size: int) -> str:
        kept = f"{format_bytes(self.kept(level))} must stay free (c.GPUPool.host_reserve)"
        if size > self.most(level):
            return (
                f"{format_bytes(size)} of GPU state cannot be moved to host memory here: {level} "
                f"may use {format_bytes(level.limit)} in all, and {kept}. Free GPU memory in the "
                "kernel, ask for a smaller slice with %gpu, or ask your administrator to raise the "
                "memory limit."
            )
        return (
            f"{format_bytes(size)} of GPU state has no room in host memory now: {level} has "
            f"{format_bytes(level.free)} left, and {kept}. The pool tries again by itself. You can "
            "help: free host memory there, or end kernels that are not needed."
        )
