# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter_gpupool.slice``: a block of a Python program that holds a slice.

A command of ``jupyter gpupool run``, a kernel and their children already have a session. In these
processes, the block joins that session. Any other process gets its own session. Such a process was
started without the guard, so the module loads the guard before the process loads the driver. The
dynamic loader then uses the guard in place of the driver's library. If the process has already
loaded the driver, it is too late to load the guard: the process runs without the guard, if the pool
allows this. If the process has already called cuInit, the module refuses the block, because the
process cannot move to the GPU of its slice.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import BrokerUnavailable, Code, GPUPoolError, RefusedError
from ..kernel.frameworks import CudaProbe, show_devices
from ..kernel.guard_state import Guard
from ..kernel.link import SessionLink
from ..startrecord import COPY_VARIABLE, REVIVE_VARIABLE
from ..units import format_bytes, parse_seconds
from .opening import Asked, open_session, own_environment, read_size
from .progress import Progress, too_long, waiting_for

#: If the session's slice is too small for a block and has not grown, the pool must take the slice
#: back before it grants a larger one. The block waits at most this many seconds until the pool has
#: taken the slice back, and then fails.
LEAVE = 30.0

_SESSION = ("GPUPOOL_SOCKET", "GPUPOOL_SESSION", "GPUPOOL_TOKEN")

_LIBRARY, _NVML = "libcuda.so.1", "libnvidia-ml.so.1"

_COUNT = itertools.count(1)


class HeldSlice:
    """A slice that a block holds; see :func:`jupyter_gpupool.slice`."""

    def __init__(
        self,
        memory: int | str = "",
        *,
        limit: int | str = "",
        devices: int = 0,
        compute: int = 0,
        priority: str = "",
        group: str = "",
        max_wait: float | str | None = None,
        name: str = "",
    ) -> None:
        self._asked = Asked(
            memory=read_size(memory, "memory"),
            limit=read_size(limit, "limit"),
            devices=devices,
            compute=compute,
            priority=priority,
            group=group,
        )
        try:
            self._max_wait = None if max_wait is None else parse_seconds(max_wait)
        except ValueError as error:
            raise RefusedError(
                f"The value of max_wait is wrong: {error}", code=Code.BAD_REQUEST
            ) from None
        self._name = name
        self._hold = ""
        self._place: _OwnSession | None = None
        self._before: dict[str, Any] = {}

    @property
    def devices(self) -> tuple[str, ...]:
        """The UUIDs of the GPUs of the slice; () while there is no slice."""
        return () if self._place is None else tuple(s.device for s in self._place.link.slices)

    @property
    def memory(self) -> int:
        """The bytes of the slice on each of its GPUs; 0 while there is no slice."""
        place = self._place
        return 0 if place is None else min((s.bytes for s in place.link.slices), default=0)

    @property
    def guarded(self) -> bool:
        """Whether this process has the guard; False while there is no slice.

        The guard limits the process to its slice, and makes CUDA calls wait while it has no slice.
        """
        return self._place is not None and self._place.guarded

    def __repr__(self) -> str:
        if not self.devices:
            return "<GPU slice, not held>"
        return f"<GPU slice of {format_bytes(self.memory)} on {', '.join(self.devices)}>"

    def __enter__(self) -> HeldSlice:
        if self._place is not None:
            raise RefusedError(
                "A block already uses this slice object. Each block needs its own object.",
                code=Code.DUPLICATE,
            )
        place = _place(self._asked, self._name or _script())
        hold = f"slice-{os.getpid()}-{next(_COUNT)}"
        with place.changing:
            _check_group(place.link, self._asked.group)
            if not place.blocks:
                self._before = _ask_for(place.link, self._asked)
            else:
                _check_same(place.link, self._asked)
            place.blocks += 1
        try:
            _wait_for(place, hold, self._max_wait)
        except BaseException:
            place.link.drop(hold)
            self._leave(place)
            raise
        show_devices([piece.device for piece in place.link.slices])
        self._place, self._hold = place, hold
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        place, self._place = self._place, None
        # A forked child does not release the slice, because the slice belongs to the parent.
        if place is not None and place.pid == os.getpid():
            place.link.drop(self._hold)
            self._leave(place)

    def _leave(self, place: _OwnSession) -> None:
        """Restore the request that the session had before the block."""
        with place.changing:
            place.blocks -= 1
            before, self._before = self._before, {}
            if before:
                _put_back(place.link, before)


class _OwnSession:
    """The session of this process, and the connection to that session."""

    def __init__(self, link: SessionLink, *, guarded: bool, own: bool, memory: int) -> None:
        self.link = link
        self.guarded = guarded
        #: Whether the session was opened for this process. No other program then shows what the
        #: process waits for, so this module shows it.
        self.own = own
        self.memory = memory
        self.pid = os.getpid()
        #: The number of blocks that hold the slice or wait for it.
        self.blocks = 0
        self.changing = threading.Lock()


_lock = threading.Lock()
_known: _OwnSession | None = None


def _forget() -> None:
    """Forget the session in a forked child: its connection and threads belong to the parent."""
    global _known, _lock
    _known, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def _place(asked: Asked, name: str) -> _OwnSession:
    """Return this process's session. The first call joins or opens it."""
    global _known  # noqa: PLW0603 (one connection for the process)
    with _lock:
        if _known is None:
            inside = all(os.environ.get(variable) for variable in _SESSION)
            _known = _join() if inside else _open(asked, name)
            _known.link.start()
        place = _known
    place.link.wait_ready()
    if place.link.unreachable_for():
        raise place.link.unavailable()
    return place


def _join() -> _OwnSession:
    """Return the session of a process that was started in a session."""
    guard = Guard(os.environ)
    link = SessionLink(
        *(os.environ[variable] for variable in _SESSION),
        attach=os.environ.get("GPUPOOL_ATTACH", "cell"),
        cuda=(lambda: None) if guard.on else CudaProbe(),
        cuda_blocks=not guard.on,
        on_lost=_say,
        environ={
            variable: os.environ.get(variable, "") for variable in (REVIVE_VARIABLE, COPY_VARIABLE)
        },
        member=True,
    )
    guarded = guard.on
    guard.close()
    return _OwnSession(link, guarded=guarded, own=False, memory=0)


def _open(asked: Asked, name: str) -> _OwnSession:
    """Open a session for this process, and return it.

    Raises
    ------
    RefusedError
        If the process has called CUDA already, or the pool refuses.
    """
    probe = CudaProbe()
    if probe() is not False:
        raise RefusedError(
            "This program has called CUDA already. It would stay on the GPU that CUDA found first, "
            "even if its slice is on another GPU.",
            code=Code.DEVICES_BOUND,
            next_step="Ask for the slice before the first CUDA call, or start the program with: "
            "jupyter gpupool run -- COMMAND.",
        )
    session = open_session(
        asked,
        label=name,
        process=os.getpid,
        attach="lazy",
        guarded=not _is_loaded(_LIBRARY),
    )
    env = session.environment(own_environment(os.environ))
    for variable in set(os.environ) - set(env):
        del os.environ[variable]
    os.environ.update(env)
    if session.guarded:
        _load_guard(Path(env["LD_PRELOAD"].replace(" ", os.pathsep).split(os.pathsep)[0]))
    link = session.link(
        cuda=(lambda: None) if session.guarded else probe,
        cuda_blocks=not session.guarded,
        on_lost=_say,
    )
    return _OwnSession(link, guarded=session.guarded, own=True, memory=session.memory)


def _is_loaded(library: str) -> bool:
    """Return whether this process has loaded a library of this name."""
    try:
        ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    return True


def _load_guard(path: Path) -> None:
    """Load the guard's libraries, so that they replace the driver's libraries of the same name."""
    for library in (path, path.with_name(_NVML)):
        if library.exists() and not _is_loaded(library.name):
            ctypes.CDLL(str(library), mode=os.RTLD_GLOBAL | os.RTLD_NOW)


# ---------------------------------------------------------------------- the request


def _different(link: SessionLink, asked: Asked) -> dict[str, Any]:
    """Return the fields of ``asked`` that differ from the session's present request."""
    return {n: value for n, value in asked.fields().items() if link.request.get(n) != value}


def _check_same(link: SessionLink, asked: Asked) -> None:
    """Refuse a second block whose request does not fit the first block's: both share a slice."""
    wanted = {**link.request, **asked.fields()}
    for name in ("memory", "limit", "devices", "compute", "priority"):
        have, want = link.request.get(name), wanted.get(name)
        enough = name in ("memory", "devices") and isinstance(have, int) and have >= int(want or 0)
        if have == want or enough:
            continue
        if name in ("memory", "limit"):
            have, want = (format_bytes(int(size or 0)) for size in (have, want))
        raise RefusedError(
            f"This program already holds a slice with {name}={have}, and a second block asks for "
            f"{name}={want}.",
            code=Code.IN_USE,
            next_step="Ask in the outer block for what both blocks need, or end the outer block "
            "before the second one begins.",
        )


def _check_group(link: SessionLink, group: str) -> None:
    """Refuse a block that names another group, because a session never changes its group."""
    if not group:
        return
    sessions = link.call("status")["sessions"]
    found = next((s.get("group", "") for s in sessions if s["id"] == link.session), "")
    if found != group:
        raise RefusedError(
            f"The session of this program is in the group {found!r}, not in {group!r}.",
            code=Code.NOT_IN_GROUP,
            next_step=f"Start the program with: jupyter gpupool run --group {group} -- COMMAND.",
        )


def _ask_for(link: SessionLink, asked: Asked) -> dict[str, Any]:
    """Change the session's request; return the old values of the changed fields.

    Raises
    ------
    GPUPoolError
        If the pool refuses, or it cannot take back a slice that is too small.
    """
    changed = _different(link, asked)
    if not changed:
        return {}
    names = {*changed, *({"limit"} if "memory" in changed else ())}
    given: dict[str, Any] = {name: link.request.get(name) for name in names}
    link.call("request", **changed)
    smallest = min((piece.bytes for piece in link.slices), default=0)
    if link.attached and not link.holds and smallest < asked.memory:
        # The slice has not grown, perhaps because its GPU has too little free memory. So the
        # session releases the slice, and waits for a slice of the new size.
        link.call("release")
        if not _has_left(link):
            why = link.pinned_reason or link.reason or "the program uses the slice"
            _put_back(link, given)
            raise RefusedError(
                f"The slice of this program is smaller than {format_bytes(asked.memory)}, and the "
                f"pool could not take it back to grant a larger one: {why}.",
                code=Code.CANNOT_SUSPEND,
                next_step="Ask for less, or start the program with more: jupyter gpupool run "
                "--memory SIZE -- COMMAND.",
            )
    return {name: value for name, value in given.items() if value is not None}


def _has_left(link: SessionLink) -> bool:
    """Wait up to LEAVE seconds for the pool to take the released slice; return whether it has."""
    give_up = time.monotonic() + LEAVE
    while link.attached and time.monotonic() < give_up:
        time.sleep(0.01)
    return not link.attached


def _put_back(link: SessionLink, before: dict[str, Any]) -> None:
    """Restore the request that the session had before a block.

    If the session uses more memory than ``before`` asks for, the pool refuses to restore the
    memory. This function then restores only the fields other than ``memory`` and ``limit``.
    """
    try:
        link.call("request", **before)
    except BrokerUnavailable:
        link.owe_request(before)
    except RefusedError as error:
        rest = {n: v for n, v in before.items() if n not in ("memory", "limit")}
        if error.code == Code.IN_USE and rest:
            _put_back(link, rest)


# ---------------------------------------------------------------------- the wait


def _wait_for(place: _OwnSession, hold: str, most: float | None) -> None:
    """Wait until the session has its slice and the hold.

    Raises
    ------
    GPUPoolError
        If the pool refuses, or the wait takes longer than ``most`` seconds.
    """
    link, changed = place.link, threading.Event()
    began = time.monotonic()
    terminal = place.own and os.isatty(2)
    progress = Progress(_write, 2, "") if terminal else None
    wait = link.wait(hold, "manual", changed.set)
    try:
        while wait.answer is None:
            if link.given_up(wait):
                raise link.unavailable()
            waited = time.monotonic() - began
            if most is not None and waited >= most:
                raise too_long(link, most, "max_wait")
            if progress is not None:
                progress.waits(
                    lambda seconds: waiting_for(link, place.memory, seconds, begun=False)
                )
            changed.wait(min(0.5, most - waited) if most is not None else 0.5)
            changed.clear()
    finally:
        if progress is not None:
            progress.clear()
    if isinstance(wait.answer, GPUPoolError):
        raise wait.answer


def _script() -> str:
    """Return the name of the running program."""
    return Path(sys.argv[0]).name if sys.argv and sys.argv[0] not in ("", "-c") else "python"


def _write(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _say(text: str) -> None:
    _write(f"GPU pool: {text}\n")
