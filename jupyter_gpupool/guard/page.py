# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""How the broker uses a session's shared page; ``src/page.h`` shows the layout and who writes what.

The broker never maps the page: it reads and writes the page with ``pread`` and ``pwrite``. The
session's user owns the file and could truncate it. A process that has mapped a truncated file may
end with SIGBUS.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Sequence

from .. import procfs
from ..errors import Code, GPUPoolError

MAGIC = 0x47505047
VERSION = 3
DEVICES = 8
SLOTS = 256
UUID_BYTES = 48
HEADER_BYTES = 4096
SLOT_BYTES = 256
SIZE = HEADER_BYTES + SLOTS * SLOT_BYTES

#: The gate (``enum page_gate``).
OPEN, UNUSED, CLOSED, PAUSED = range(4)

#: The value of ``GPUPOOL_PAGE`` if the page has no path that the session can open. In this case
#: each process asks the broker for the page (``page.c``).
PASSED = "passed"

#: Flags with which the broker opens a page. O_NONBLOCK is needed because root in a container may
#: hold a file lease on the page (F_SETLEASE). Without this flag, ``open`` would wait up to 45 s for
#: the file lease, and all other sessions would wait for the broker.
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK

#: The values of ``enum page_pins``, in words for people.
PINS = {
    1: "it uses managed memory",
    2: "it shares device memory or events with another process (CUDA IPC)",
    4: "it shares device memory with a graphics API",
    8: "it uses multicast memory",
}

SLOT_CUDA, SLOT_CONTEXT = 1, 2

#: The two values in a slot's ``sees`` that do not name a device (see ``src/page.h``).
SEES_NONE, SEES_SLICE = 0, 1

#: The values of a slot's ``landing``: how far the process has moved to the devices of the slice
#: (see ``enum slot_landing``).
LANDING_NONE, LANDING_BEGUN, LANDING_MOVES, LANDING_RESTORE, LANDING_ASIDE = range(5)

_FIXED = struct.Struct("<IIBBxxI6Q")
GATE_AT, MANAGED_AT, CONTENDED_AT, DEVICES_AT, EPOCH_AT, PAUSE_AT, LIMIT_AT, CONTEXT_AT = (
    8, 9, 11, 12, 16, 24, 32, 40,
)  # fmt: skip
GRANTED_AT = 64
UUID_AT = GRANTED_AT + 8 * DEVICES
SESSION_AT = UUID_AT + UUID_BYTES * DEVICES
ROOM_AT = SESSION_AT + 64
VAIN_AT = ROOM_AT + 8 * DEVICES
VAIN_UNTIL_AT = VAIN_AT + 8 * DEVICES
_SLOT = struct.Struct(f"<IIQIIII{DEVICES}Q{DEVICES}QII{DEVICES}QQII")
SEES_AT = 32 + 8 * (2 * DEVICES + 1)
LANDING_AT = SEES_AT + 8 * DEVICES
NVML_AT = LANDING_AT + 8
HELD_AT = NVML_AT + 4


def device_name(uuid: str) -> int:
    """Return the number that names a device in a slot (``page_name``: FNV-1a)."""
    name = 0xCBF29CE484222325
    for byte in uuid.encode()[: UUID_BYTES - 1]:
        name = (name ^ byte) * 0x100000001B3 % (1 << 64)
    return name if name > SEES_SLICE else ~name % (1 << 64)


class PageError(GPUPoolError):
    """A page is gone, too short or of another version."""

    code = Code.BAD_PAGE


@dataclass(frozen=True, slots=True)
class Slot:
    """One process of the session. ``used`` and ``context`` are bytes by device.

    ``sees[i]`` names the device that the process sees as the session's device i (see
    :func:`device_name`). ``nvml`` counts the main thread's NVML calls that run now. A suspend
    waits for these calls, but they do not count as use of a device. ``held`` is 1 if a library's
    thread still waits after an interrupt. ``at`` is the place of the slot in the page.
    """

    pid: int
    start_time: int
    inflight: int
    waiting: int
    flags: int
    pins: int
    used: tuple[int, ...]
    context: tuple[int, ...]
    captures: int = 0
    sees: tuple[int, ...] = ()
    landing: int = LANDING_NONE
    nvml: int = 0
    held: int = 0
    at: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """The content of a page. The session may write during the read, so values may differ in age."""

    gate: int
    devices: int
    epoch: int
    limit: int
    granted: tuple[int, ...]
    slots: tuple[Slot, ...]

    @property
    def inflight(self) -> int:
        """Number of calls inside the driver that a suspend must wait for."""
        return sum(slot.inflight for slot in self.slots)

    @property
    def captures(self) -> int:
        """Number of streams that record a graph now. A suspend must not interrupt a recording."""
        return sum(slot.captures for slot in self.slots)

    @property
    def waiting(self) -> int:
        """Threads that wait at the gate."""
        return sum(slot.waiting for slot in self.slots)

    @property
    def used(self) -> tuple[int, ...]:
        """Counted bytes of all processes, by device."""
        n = self.devices
        return tuple(sum(slot.used[i] for slot in self.slots) for i in range(n))

    @property
    def cuda(self) -> bool:
        """Whether any process has called cuInit: the devices of this process are then fixed."""
        return any(slot.flags & SLOT_CUDA for slot in self.slots)

    @property
    def pins(self) -> str:
        """The reasons why the driver cannot suspend the session, as text; "" if there are none."""
        found = 0
        for slot in self.slots:
            found |= slot.pins
        return "; ".join(text for bit, text in PINS.items() if found & bit)


class Page:
    """One session's page, which the broker keeps open. ``close`` does not remove the file."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._fd = descriptor

    @classmethod
    def create(cls, path: Path, session: str, uid: int) -> Page:
        """Make the page of a new session. User ``uid`` owns the file, and the gate is closed.

        Processes of a container cannot open the page by its path, so the broker passes them a
        descriptor.

        Raises
        ------
        OSError
            If the file cannot be made.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Allocate the whole file now. Otherwise, if shared memory became full, a process of the
            # session could end with SIGBUS when it writes to the mapped page.
            os.posix_fallocate(descriptor, 0, SIZE)
            if uid != os.geteuid():
                os.fchown(descriptor, uid, -1)
            page = cls(path, descriptor)
            page._write(SESSION_AT, session.encode()[:63])
            page._write(GATE_AT, bytes([CLOSED]))
            # Write the magic last. A process that finds the magic can then use all other values.
            page._write(0, struct.pack("<II", MAGIC, VERSION))
        except BaseException:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        return page

    @classmethod
    def open(cls, path: Path) -> Page:
        """Open the page that an earlier broker made for a session.

        Raises
        ------
        PageError
            If the file is missing, or is not a page of this version.
        """
        try:
            descriptor = os.open(path, _FLAGS | os.O_NOFOLLOW)
        except OSError as error:
            raise PageError(f"The page {path} cannot be opened: {error}.") from None
        page = cls(path, descriptor)
        try:
            page.read()
        except PageError:
            os.close(descriptor)
            raise
        return page

    @classmethod
    def find(cls, path: Path, session: str) -> Page | None:
        """Find a session's page after its file was deleted; None if no process has the page open.

        The guard in each process of the session keeps a descriptor of the page open. The function
        looks for such a descriptor in the processes of this user.
        """
        gone = f"{path} (deleted)"
        for pid in procfs.all_pids():
            with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
                for link, target in procfs.open_files(pid):
                    page = cls._open_link(path, link) if target == gone else None
                    if page is not None and page._is_of(session):
                        return page
                    if page is not None:
                        page.close()
        return None

    @classmethod
    def _open_link(cls, path: Path, link: Path) -> Page | None:
        with contextlib.suppress(OSError):
            if link.stat().st_uid == os.geteuid():
                return cls(path, os.open(link, _FLAGS))
        return None

    def _is_of(self, session: str) -> bool:
        """Return whether this is the page of ``session``."""
        try:
            self.read()
        except (OSError, PageError):
            return False
        name = os.pread(self._fd, 64, SESSION_AT).split(b"\0", 1)[0]
        return stat.S_ISREG(os.fstat(self._fd).st_mode) and name == session.encode()[:63]

    @classmethod
    def passed(cls, descriptor: int) -> Page:
        """Return the page that the broker has passed to this process.

        Raises
        ------
        PageError
            If the descriptor does not belong to a page of this version.
        """
        page = cls(Path(PASSED), descriptor)
        try:
            page.read()
        except (OSError, PageError):
            os.close(descriptor)
            raise
        return page

    def open_again(self) -> int:
        """Return a new descriptor of the page, to pass to another process. The caller closes it.

        The function opens the file again, because a copy of the broker's descriptor would share its
        flags. Then the other process could set O_APPEND for both. With this flag, Linux ignores the
        offset of ``pwrite``, and the broker could not close the gate.

        Raises
        ------
        OSError
            If this is not possible now.
        """
        return os.open(self._link(), _FLAGS)

    def is_lost(self) -> bool:
        """Return whether the page's path leads to no file, or to a file that is not this page.

        In this case a new child process of the session cannot find the page.
        """
        try:
            return not os.path.samestat(os.fstat(self._fd), self.path.stat())
        except OSError:
            return True

    def restore(self) -> None:
        """Put a link to this process's descriptor at the path of the deleted file.

        Linux cannot give a deleted file a name again. A copy of the file would not help: the
        session would then have two pages, each with its own accounts.

        Raises
        ------
        OSError
            If this is not possible now.
        """
        temporary = self.path.with_name(f".{self.path.name}.{os.urandom(4).hex()}")
        temporary.symlink_to(self._link())
        try:
            temporary.replace(self.path)
        finally:
            temporary.unlink(missing_ok=True)

    def _link(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Close this object's descriptor, and remove a link that :meth:`restore` made.

        The link names the descriptor by its number, and another file may get this number later. So
        the link must not stay. The session's processes keep their descriptors.
        """
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # usually the path is a file
                if str(self.path.readlink()) == self._link():
                    self.path.unlink()
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        """Close the page and delete its file."""
        self.close()
        self.path.unlink(missing_ok=True)

    # ------------------------------------------------------------------ reading

    def gate(self) -> int:
        """Return the gate."""
        found = os.pread(self._fd, 1, GATE_AT)
        if not found:
            raise PageError(f"The page {self.path} was truncated.")
        return found[0]

    def read(self) -> Reading:
        """Return the page's content.

        Raises
        ------
        PageError
            If the page is damaged.
        """
        data = os.pread(self._fd, SIZE, 0)
        if len(data) < SIZE:
            raise PageError(f"The page {self.path} has {len(data)} bytes instead of {SIZE}.")
        magic, version, gate, _, devices, epoch, _, limit, _, _, _ = _FIXED.unpack_from(data)
        if magic != MAGIC or version != VERSION or devices > DEVICES:
            raise PageError(f"The page {self.path} does not have version {VERSION}.")
        granted = struct.unpack_from(f"<{DEVICES}Q", data, GRANTED_AT)[:devices]
        slots = []
        # Find the used slots in one step, because most of the 256 slots of a page are usually
        # empty.
        taken = data[HEADER_BYTES::SLOT_BYTES]
        last = len(taken.rstrip(b"\0"))
        for place in range(last):
            if taken[place]:
                at = HEADER_BYTES + SLOT_BYTES * place
                _, pid, start, inflight, waiting, flags, pins, *rest = _SLOT.unpack_from(data, at)
                inflight += rest[2 * DEVICES + 1]  # ``first``: one thread counts its calls there
                slots.append(
                    Slot(
                        pid, start, inflight, waiting, flags, pins,
                        tuple(rest[:DEVICES]), tuple(rest[DEVICES : 2 * DEVICES]),
                        rest[2 * DEVICES], tuple(rest[2 * DEVICES + 2 : -3]), rest[-3], rest[-2],
                        rest[-1], place,
                    )
                )  # fmt: skip
        return Reading(gate, devices, epoch, limit, granted, tuple(slots))

    def devices(self) -> tuple[str, ...]:
        """Return the devices that the session's processes see, in CUDA's order."""
        count = min(self.read().devices, DEVICES)
        data = os.pread(self._fd, UUID_BYTES * count, UUID_AT)
        texts = [data[at : at + UUID_BYTES] for at in range(0, len(data), UUID_BYTES)]
        return tuple(text.split(b"\0", 1)[0].decode(errors="replace") for text in texts)

    def managed(self) -> bool:
        """Return whether managed memory is allowed."""
        return os.pread(self._fd, 1, MANAGED_AT) == b"\1"

    # ------------------------------------------------------------------ writing

    def set_gate(self, gate: int, *, pause_until: int = 0) -> None:
        """Open, close or pause the gate; ``pause_until`` is CLOCK_MONOTONIC in nanoseconds."""
        if gate == PAUSED:
            self._write(PAUSE_AT, struct.pack("<Q", pause_until))
        self._write(GATE_AT, bytes([gate]))

    def set_devices(self, uuids: Sequence[str]) -> None:
        """Write the devices that the session's processes see, in CUDA's order."""
        if len(uuids) > DEVICES:
            raise PageError(f"{len(uuids)} devices were given; a page has room for {DEVICES}.")
        texts = [uuid.encode()[: UUID_BYTES - 1].ljust(UUID_BYTES, b"\0") for uuid in uuids]
        self._write(UUID_AT, b"".join(texts))
        self._write(DEVICES_AT, struct.pack("<I", len(uuids)))

    def set_grant(self, granted: Sequence[int], limit: int, epoch: int) -> None:
        """Write the grant on each device, the size to which a grant may grow, and the epoch."""
        values = [*granted, *[0] * (DEVICES - len(granted))]
        self._write(GRANTED_AT, struct.pack(f"<{DEVICES}Q", *values))
        self._write(LIMIT_AT, struct.pack("<Q", limit))
        self._write(EPOCH_AT, struct.pack("<Q", epoch))

    def set_room(self, room: Sequence[int]) -> None:
        """Write by how many bytes the grant on each device could grow now; [] means unknown."""
        values = [*(size + 1 for size in room), *[0] * (DEVICES - len(room))]
        self._write(ROOM_AT, struct.pack(f"<{DEVICES}Q", *values))

    def set_vain(self, totals: Sequence[int], until: int) -> None:
        """Write the smallest size of a grant that the broker refuses on each device; [] means none.

        Before ``until`` (CLOCK_MONOTONIC, nanoseconds), no process asks for this size or more.
        """
        values = [*totals, *[0] * (DEVICES - len(totals))]
        self._write(VAIN_AT, struct.pack(f"<{DEVICES}QQ", *values, until))

    def set_policy(self, *, managed: bool, context_bytes: int) -> None:
        """Write whether managed memory is allowed, and how many bytes to charge for a context."""
        self._write(MANAGED_AT, bytes([managed]))
        self._write(CONTEXT_AT, struct.pack("<Q", context_bytes))

    def set_contended(self, contended: bool) -> None:
        """Write whether another session waits for memory of this session."""
        self._write(CONTENDED_AT, bytes([contended]))

    def set_sees(self, slot: Slot, sees: Sequence[int]) -> None:
        """Write which devices a process sees, once the broker has moved the process."""
        values = [*sees, *[SEES_NONE] * (DEVICES - len(sees))]
        self._write(_at(slot) + SEES_AT, struct.pack(f"<{DEVICES}Q", *values))

    def set_landing(self, slot: Slot, landing: int) -> None:
        """Write how far the slot's process has moved to the slice (``enum slot_landing``)."""
        self._write(_at(slot) + LANDING_AT, struct.pack("<Q", landing))

    def _write(self, at: int, data: bytes) -> None:
        os.pwrite(self._fd, data, at)


def _at(slot: Slot) -> int:
    return HEADER_BYTES + SLOT_BYTES * slot.at
