# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Attribution of GPU memory: to sessions, to the driver, and to programs outside the pool.

Plain functions over plain values; the broker reads the figures and acts on the answers. Sizes are
bytes on one device unless a mapping names the devices. Five questions, in this order:

* *Attribution* (:func:`attribute`): which part of the used memory belongs to which session, which
  to the driver, and which to processes outside the pool.
* *The driver's own memory* (:func:`unlisted`, :func:`driver_share`, :func:`measured_again`): what
  is in use without belonging to a process. No process can free it. If it counted as foreign, a
  request for a whole device would wait without end.
* *Overhead* (:class:`Overhead`): what the driver takes for one process beyond what the guard has
  charged. The guard charges a constant for a context (one self-test measured it) and the bytes that
  the program allocates. Contexts differ, and code is loaded lazily, 200 to 800 MiB for cuBLAS,
  cuDNN or Triton. A comparison of the driver's figure with the guard's shows how much.
* *Overuse* (:func:`overuse`, :func:`confirmed`): which session has more than it was granted, and
  when that counts.
* *State* (:func:`state_to_move`, :func:`state_moved`, :func:`restore_room`): how many bytes a
  suspend will move, how many it has moved, and how many must be free for the restore.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Collection, Iterable, Mapping, Sequence

from .model import MiB, Slice

# ---------------------------------------------------------------------- attribution


@dataclass(frozen=True, slots=True)
class Listed:
    """One process in the driver's list for a device."""

    #: None where the driver does not know.
    bytes: int | None
    #: The session that it belongs to; None: it belongs to no session.
    session: str | None = None
    #: False: its number belongs to another PID namespace (a container lists the host's numbers), so
    #: the process cannot be identified.
    known: bool = True


@dataclass(frozen=True, slots=True)
class Observed:
    """The driver's figures of one device."""

    used: int
    listed: Sequence[Listed] = ()
    #: Bytes that the driver takes by itself beyond those it reports as reserved. The device's
    #: capacity does not contain them.
    driver: int = 0
    #: Bytes that a process's first context takes there.
    context: int = 0


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """A session that has a slice of the device."""

    granted: int
    #: Bytes that the guard counts in the session's processes; 0 without a guard.
    counted: int = 0
    #: False: none of its processes has called cuInit.
    cuda: bool | None = None


@dataclass(frozen=True, slots=True)
class Attribution:
    """The memory of one device, divided among its users."""

    #: Bytes of processes that are outside the pool.
    foreign: int
    #: Bytes of sessions that have a slice there. A session without a figure is absent.
    footprints: Mapping[str, int] = field(default_factory=dict)
    #: Bytes of sessions as the driver alone reports them, with a slice or without.
    shown: Mapping[str, int] = field(default_factory=dict)


def attribute(
    observed: Observed, holders: Mapping[str, LeaseHolder], landing: Collection[str] = ()
) -> Attribution:
    """Split a device's used bytes into the sessions', the driver's and the foreign ones.

    ``holders`` are the sessions with a slice of the device. ``landing`` are sessions whose
    processes take their first context there before they are moved to their slice; the device's
    capacity does not contain the room for these contexts.

    Each byte is used up once, in this order:

    1. Listed bytes of a session with a slice are that session's.
    2. Used bytes that the list does not explain lie in the slices, up to the grants: the whole
       slice of a session that is not listed, one context of a session that is. A process listed
       with a number of another PID namespace counts as not listed: it may belong to a session.
    3. The rest, with the bytes that the list still
    gives to suspended sessions, is the driver's own, up to ``driver``.
    4. What remains is foreign, as are the listed bytes of processes without a session.

    The list may be older than the figures, so no process counts for more than is in use.

    A session's footprint is the larger of what the driver shows and what its guard counts. The
    driver sees its own overhead, but no process of another PID namespace. The guard counts before
    it asks the driver, so its count is never behind. But the guard's count is written by the
    session's own processes: it is trusted only up to the slice, because a byte beyond would be
    taken from all others.
    """
    named: dict[str, int] = {}
    listed = 0
    for entry in observed.listed:
        if entry.bytes is None or not entry.known:
            continue
        listed += entry.bytes
        if entry.session is not None:
            named[entry.session] = named.get(entry.session, 0) + entry.bytes
    strangers = listed - sum(named.values())
    footprints = {name: size for name, size in named.items() if name in holders}
    # No slice covers these. (The pool itself counts what a session has beyond its slice.)
    left = {n: size for n, size in named.items() if n not in holders and n not in landing}
    in_slices = sum(
        min(observed.context, max(0, holder.granted - footprints[name]))
        if name in footprints
        else holder.granted
        for name, holder in holders.items()
    )
    beside = max(0, observed.used - sum(footprints.values()))
    loose = min(
        sum(left.values()) + max(0, observed.used - listed - in_slices), max(0, beside - strangers)
    )
    foreign = min(strangers, beside) + max(0, loose - observed.driver)
    most = max(0, beside - strangers - observed.driver)
    shown = {**footprints, **{name: min(size, most) for name, size in left.items()}}
    for name, holder in holders.items():
        if name not in footprints and holder.cuda is False:
            # The session holds nothing: the pool can take its slice without host memory.
            footprints[name] = 0
        counted = min(holder.counted, holder.granted)
        if counted or name in footprints:
            footprints[name] = max(counted, footprints.get(name, 0))
    return Attribution(foreign, footprints, shown)


# ---------------------------------------------------------------------- the driver's own memory

#: Memory beyond this belongs to processes that the driver does not list, and not to the driver:
#: bytes, and the divisor of the device's size.
DRIVER_MOST, DRIVER_PART = 1 << 30, 8

#: Most bytes, and part of the device, by which the driver's own memory varies between samples.
SLACK, SLACK_PART = 64 * MiB, 256

#: Samples of a device at rest that must agree: the driver lists an ended process for a while.
REST_LOOKS = 3


def unlisted(used: int, sizes: Iterable[int | None]) -> int:
    """Return the used bytes that the list of ``sizes`` gives to no process.

    0 if a process is listed without its size: all of these bytes may belong to it.
    """
    known = [*sizes]
    if None in known:
        return 0
    return max(0, used - sum(size or 0 for size in known))


def slack(total: int) -> int:
    """Return by how much the driver's own memory may vary on a device of ``total`` bytes."""
    return min(SLACK, total // SLACK_PART)


def driver_share(reserved: int, residue: int, total: int) -> int:
    """Return the bytes of a device that belong to the driver.

    ``reserved`` is the driver's own figure, ``residue`` the memory in use that belongs to no
    process. :func:`slack` is added, except where both are 0: such a driver reports exact figures.
    """
    kept = reserved + min(residue, DRIVER_MOST, total // DRIVER_PART)
    return kept + slack(total) if kept else 0


def at_rest(listed: Iterable[Listed], *, leased: bool) -> bool:
    """Return whether used memory that belongs to no process must be the driver's own.

    True only if no session has a slice there (``leased``) and no process outside the pool uses the
    device. What suspended sessions still have is listed as theirs.
    """
    return not leased and all(entry.session is not None for entry in listed)


def measured_again(looks: Sequence[int], reserved: int, total: int, was: int) -> int | None:
    """Return the bytes that belong to the driver, measured at rest; None if they are as before.

    ``looks`` are the latest figures of :func:`unlisted`, ``was`` what has counted so far. The
    driver's own memory grows over weeks in which kernels come and go. After a single measurement
    the growth would count as foreign. A figure slightly below the last one changes nothing.
    """
    if len(looks) < REST_LOOKS:
        return None
    found = driver_share(reserved, min(looks[-REST_LOOKS:]), total)
    return None if was - slack(total) <= found <= was else found


# ---------------------------------------------------------------------- overhead of a process

#: Samples that must agree, one after the other: the program runs between the two readings.
AGREE = 3

#: Bytes of one process that count as the driver's own and not as overuse: at most ``EXCUSED_MOST``
#: and the device divided by ``EXCUSED_PART``, but not less than ``EXCUSED_LEAST``.
EXCUSED_LEAST, EXCUSED_MOST, EXCUSED_PART = 64 * MiB, 1 << 30, 8


@dataclass(frozen=True, slots=True)
class Overhead:
    """What the driver takes for one process on one device beyond the guard's charge."""

    #: Bytes of its context, seen while the process had nothing else. None: never seen alone.
    context: int | None = None
    #: The latest figures of the process with nothing but its context, at most 2.
    alone: tuple[int, ...] = ()
    #: The latest figures of the bytes beyond charge and context, at most AGREE.
    seen: tuple[int, ...] = ()
    #: The least of the last AGREE samples.
    learnt: int = 0

    def look(
        self, constant: int, counted: int, shown: int, *, complete: bool
    ) -> tuple[Overhead, int]:
        """Add one sample; return what is known now, and the bytes beyond the charge in this sample.

        The guard has charged ``constant`` for the context and ``counted`` in all, the driver shows
        ``shown``. ``complete``: the driver's list explains all used memory, so a figure below the
        charge is true.
        """
        context = self.context
        alone: tuple[int, ...] = ()
        if constant and counted == constant and (complete or shown >= constant):
            alone = (*self.alone, shown)[-2:]
            if len(alone) == 2 and alone[0] == alone[1]:
                context = shown
        known = replace(self, context=context, alone=alone)
        correction = known.correction(constant)
        more = max(0, shown - counted - correction)
        seen = (*self.seen, more)[-AGREE:]
        learnt = min(seen) if len(seen) == AGREE else self.learnt
        return replace(known, seen=seen, learnt=learnt), more + max(0, correction)

    def correction(self, constant: int) -> int:
        """Return the bytes that its context takes beyond the charge; negative if it takes less."""
        return self.context - constant if self.context is not None and constant else 0

    def beyond(self, constant: int) -> int:
        """Return the bytes of its slice beyond the charge; negative if it takes less."""
        return self.learnt + self.correction(constant)


def complete(observed: Observed) -> bool:
    """Return whether the driver's list explains all used memory."""
    sizes = [entry.bytes for entry in observed.listed]
    return bool(sizes) and unlisted(observed.used, sizes) <= observed.driver


def excused(total: int) -> int:
    """Return the most that the driver may take for one process on a device of ``total`` bytes."""
    return max(EXCUSED_LEAST, min(EXCUSED_MOST, total // EXCUSED_PART))


# ---------------------------------------------------------------------- overuse

#: Tolerated bytes beyond a slice: a part of the device, within bounds. The driver itself takes
#: memory for the local arrays of all threads that can run at once, more on a larger device. Its
#: memory for each process (see :class:`Overhead`) is tolerated in addition.
TOLERATED_LEAST, TOLERATED_MOST, TOLERATED_PART = 64 * MiB, 512 * MiB, 16

#: Samples in a row that must agree: one may fall between a suspend and its record.
SAMPLES = 3


def tolerated(total: int) -> int:
    """Return the tolerated bytes beyond a slice; ``total`` 0: the device's size is not known."""
    return min(max(TOLERATED_LEAST, total // TOLERATED_PART), TOLERATED_MOST)


def overuse(
    used: Mapping[str, int],
    granted: Mapping[str, int],
    explained: Mapping[str, int],
    totals: Mapping[str, int],
) -> int:
    """Return the bytes that a session has beyond its slices, over all devices.

    All arguments are bytes by device: what the driver shows of the session, its slices, what the
    driver takes for its processes by itself, and the devices' sizes. The tolerance of one device
    does not apply to another.
    """
    over = 0
    for device, size in used.items():
        more = size - granted.get(device, 0) - explained.get(device, 0)
        if more > tolerated(totals.get(device, 0)):
            over += more
    return over


def confirmed(samples: int, over: int) -> tuple[int, bool]:
    """Return the number of samples in a row with overuse, and whether to act now (true only once).

    ``samples`` is the number before this sample, which shows ``over`` bytes.
    """
    samples = samples + 1 if over else 0
    return samples, samples == SAMPLES


# ---------------------------------------------------------------------- state that is moved


def state_to_move(
    slices: Sequence[Slice],
    shown: Mapping[str, int],
    counted: Mapping[str, int],
    contexts: Mapping[str, int],
    *,
    guarded: bool,
    cuda: bool | None,
) -> dict[str, int]:
    """Return the bytes by device that a suspend will move; host memory is reserved for them.

    ``shown`` is what the driver lists of the session, ``counted`` what its guard counts,
    ``contexts`` what a context takes on each device, ``cuda`` whether it has called cuInit. The
    driver does not list processes everywhere and the guard does not count everything, so the larger
    figure is the better one. If both are 0, a session under the guard, which counts every
    allocation, has no more than a context; any other session may have its whole slice.
    """
    seen = {uuid: max(shown.get(uuid, 0), counted.get(uuid, 0)) for uuid in {*shown, *counted}}
    if cuda is False and not any(seen.values()):
        return {}
    return {
        piece.device: seen.get(piece.device)
        or (min(piece.bytes, contexts.get(piece.device, 0)) if guarded else piece.bytes)
        for piece in slices
    }


def state_moved(
    slices: Sequence[Slice], freed: Mapping[str, int], before: Mapping[str, int]
) -> tuple[Slice, ...]:
    """Return the state that a suspend has moved off ``slices``, one part for each of them.

    This is the number of ``freed`` bytes. If it is 0, the driver cannot tell; then the estimate of
    :func:`state_to_move` (``before``) counts, or else the whole slice.
    """
    return tuple(
        Slice(s.device, freed.get(s.device) or before.get(s.device, s.bytes)) for s in slices
    )


def restore_room(state: int, granted: int, headroom: int) -> int:
    """Return the bytes that a device must show as free before a restore of ``state`` is tried.

    At most the ``granted`` bytes, because a state that fills a device leaves no room for
    ``headroom``. But never less than the state, even if the pool has less to give: a restore
    without room kills the process.
    """
    return min(state + headroom, max(state, granted))
