# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Attribution of GPU memory: to sessions, to the driver, and to programs outside the pool.

The results depend only on the arguments: the broker reads the figures from the driver, and acts on
the results. A size is a number of bytes on one device, except in a mapping by device. The module
computes five things, in this order:

* *Attribution* (:func:`attribute`): which part of the used memory belongs to which session, which
  to the driver, and which to processes outside the pool.
* *The driver's own memory* (:func:`unlisted`, :func:`driver_share`, :func:`measured_again`): the
  used memory that belongs to no process. No process can free this memory. If the pool counted this
  memory as foreign, a request for a whole device would wait without end.
* *Overhead* (:class:`Overhead`): the bytes that the driver takes for one process beyond the bytes
  that the guard has charged. The guard charges the bytes that the program allocates, and for a
  context a constant that a self-test has measured. But contexts differ in size, and the driver
  loads code only when it is used: 200 to 800 MiB for cuBLAS, cuDNN or Triton. The overhead is the
  driver's figure minus the guard's figure.
* *Overuse* (:func:`overuse`, :func:`confirmed`): which session uses more than it was granted, and
  after how many samples the broker acts.
* *State* (:func:`state_to_move`, :func:`state_moved`, :func:`restore_room`): how many bytes a
  suspend will move, how many bytes it has moved, and how many bytes must be free for the restore.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Collection, Iterable, Mapping, Sequence

from .model import MiB, Slice

# ---------------------------------------------------------------------- attribution


@dataclass(frozen=True, slots=True)
class Listed:
    """One process in the driver's list for a device."""

    #: None if the driver does not know the size.
    bytes: int | None
    #: The session of the process; None if it belongs to no session.
    session: str | None = None
    #: False if the process number is from another PID namespace. Such a process cannot be
    #: identified. (In a container, the driver lists the host's process numbers.)
    known: bool = True


@dataclass(frozen=True, slots=True)
class Observed:
    """The driver's figures of one device."""

    used: int
    listed: Sequence[Listed] = ()
    #: Bytes that the driver uses for itself, but does not report as reserved. The capacity that the
    #: pool counts for the device does not contain these bytes.
    driver: int = 0
    #: Bytes that a process's first context takes on the device.
    context: int = 0


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """A session that has a slice of the device."""

    granted: int
    #: Bytes that the guard counts for the session's processes; 0 without a guard.
    counted: int = 0
    #: Whether a process of the session has called cuInit; None if unknown.
    cuda: bool | None = None


@dataclass(frozen=True, slots=True)
class Attribution:
    """The memory of one device, divided among its users."""

    #: Bytes of processes that are outside the pool.
    foreign: int
    #: Maps each session with a slice on the device to its bytes. Sessions with an unknown number of
    #: bytes are absent.
    footprints: Mapping[str, int] = field(default_factory=dict)
    #: Maps each listed session, with or without a slice, to its bytes. These bytes are the driver's
    #: figures, without the guard's count.
    shown: Mapping[str, int] = field(default_factory=dict)


def attribute(
    observed: Observed, holders: Mapping[str, LeaseHolder], landing: Collection[str] = ()
) -> Attribution:
    """Split the used bytes of a device among the sessions, the driver and foreign processes.

    ``holders`` are the sessions with a slice of the device. ``landing`` are sessions whose
    processes create their first context on this device before the broker moves them to their slice
    on another device. The memory for these contexts is not a part of the device's capacity.

    Each byte is given to one user only, in this order:

    1. Listed bytes of a session with a slice belong to this session.
    2. Used bytes that the driver lists for no process belong to the sessions with a slice. A
       session that is not listed gets at most the bytes of its slice. A listed session gets at most
       the bytes of one context, and at most the rest of its slice. A process of another PID
       namespace counts as not listed, because the process may belong to a session.
    3. The remaining bytes, and the bytes that the list still shows for suspended sessions, belong
       to the driver, up to ``driver`` bytes in total.
    4. The bytes that remain after these steps are foreign. The listed bytes of processes without a
       session are also foreign.

    The list may be older than the device's figures, so no process counts for more bytes than are in
    use.

    A session's footprint is the larger of what the driver shows and what its guard counts. The
    driver's figure contains the driver's overhead, but omits processes of other PID namespaces. The
    guard counts an allocation before it calls the driver, so its count is never too small. But the
    session's own processes write the guard's count, so the pool trusts the count only up to the
    size of the slice. With a larger count, a session could take bytes from other sessions.
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
    # The listed bytes of sessions without a slice: these sessions are suspended. (The bytes that a
    # session uses beyond its slice are not in ``left``.)
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
            # Without cuInit the session has no device memory. So the pool needs no host memory to
            # take the session's slice.
            footprints[name] = 0
        counted = min(holder.counted, holder.granted)
        if counted or name in footprints:
            footprints[name] = max(counted, footprints.get(name, 0))
    return Attribution(foreign, footprints, shown)


# ---------------------------------------------------------------------- the driver's own memory

#: Unlisted memory counts as the driver's own only up to a limit: the smaller of ``DRIVER_MOST`` and
#: the device's size divided by ``DRIVER_PART``. Unlisted memory beyond the limit must belong to
#: processes that the driver does not list.
DRIVER_MOST, DRIVER_PART = 1 << 30, 8

#: The driver's own memory varies a little between two samples. The largest normal difference is the
#: smaller of ``SLACK`` and the device's size divided by ``SLACK_PART``.
SLACK, SLACK_PART = 64 * MiB, 256

#: The driver's own memory is the smallest of this many samples. The broker takes the samples while
#: no slice and no foreign process uses the device. One sample is not enough, because the driver
#: still lists a process for a while after the end of the process.
REST_LOOKS = 3


def unlisted(used: int, sizes: Iterable[int | None]) -> int:
    """Return the used bytes that belong to no listed process.

    ``sizes`` are the sizes of the listed processes. If one size is unknown (None), the result is 0,
    because all unlisted bytes may belong to that process.
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

    ``reserved`` are the bytes that the driver reports as its own. ``residue`` are the used bytes
    that belong to no process. If both are 0, the driver's figures are exact, and the result is 0.
    Otherwise the result includes :func:`slack`.
    """
    kept = reserved + min(residue, DRIVER_MOST, total // DRIVER_PART)
    return kept + slack(total) if kept else 0


def at_rest(listed: Iterable[Listed], *, leased: bool) -> bool:
    """Return whether used memory that belongs to no process must be the driver's own.

    ``leased`` says whether a session has a slice on the device. The result is true if no session
    has a slice and no process outside the pool uses the device. Suspended sessions may still have
    bytes on the device, but the driver lists these bytes.
    """
    return not leased and all(entry.session is not None for entry in listed)


def measured_again(looks: Sequence[int], reserved: int, total: int, was: int) -> int | None:
    """Return the driver's own bytes, measured again at rest; None if they have not changed.

    ``looks`` are the latest results of :func:`unlisted`. ``was`` is the number of bytes that the
    broker has used until now. A new number slightly below ``was`` counts as unchanged.

    The driver's own memory grows over weeks, while kernels start and end. If the broker measured
    this memory only once, the growth would count as foreign.
    """
    if len(looks) < REST_LOOKS:
        return None
    found = driver_share(reserved, min(looks[-REST_LOOKS:]), total)
    return None if was - slack(total) <= found <= was else found


# ---------------------------------------------------------------------- overhead of a process

#: The smallest of this many consecutive samples counts. One sample is not enough: the program
#: continues to run between the reading of the driver's figure and of the guard's figure.
AGREE = 3

#: The largest overhead of a process that does not count as overuse: the smaller of ``EXCUSED_MOST``
#: and the device's size divided by ``EXCUSED_PART``, but at least ``EXCUSED_LEAST``.
EXCUSED_LEAST, EXCUSED_MOST, EXCUSED_PART = 64 * MiB, 1 << 30, 8


@dataclass(frozen=True, slots=True)
class Overhead:
    """The bytes that the driver takes for one process on one device beyond the guard's charge."""

    #: Bytes of the process's context, measured while the process had no other memory; None if not
    #: measured.
    context: int | None = None
    #: The driver's latest figures (at most 2) for the process while it had no memory except its
    #: context.
    alone: tuple[int, ...] = ()
    #: The latest samples, at most ``AGREE``. A sample is the number of bytes beyond the guard's
    #: charge, minus :meth:`correction`.
    seen: tuple[int, ...] = ()
    #: The smallest of the last ``AGREE`` samples in ``seen``.
    learnt: int = 0

    def look(
        self, constant: int, counted: int, shown: int, *, complete: bool
    ) -> tuple[Overhead, int]:
        """Add one sample; return the new record, and the bytes beyond the charge in this sample.

        The guard has charged ``constant`` bytes for the context and ``counted`` bytes in total. The
        driver shows ``shown`` bytes. ``complete`` says whether the listed processes account for all
        used memory. If they do, ``shown`` is correct even if it is below the guard's charge.
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
        """Return the size of the context minus ``constant``, its charge; 0 if the size is unknown.

        The result is negative if the context is smaller than the charge.
        """
        return self.context - constant if self.context is not None and constant else 0

    def beyond(self, constant: int) -> int:
        """Return the bytes that the driver takes for the process, minus the guard's charge."""
        return self.learnt + self.correction(constant)


def complete(observed: Observed) -> bool:
    """Return whether all used memory belongs to listed processes or to the driver itself."""
    sizes = [entry.bytes for entry in observed.listed]
    return bool(sizes) and unlisted(observed.used, sizes) <= observed.driver


def excused(total: int) -> int:
    """Return the largest overhead of a process that does not count as overuse.

    ``total`` is the size of the device in bytes.
    """
    return max(EXCUSED_LEAST, min(EXCUSED_MOST, total // EXCUSED_PART))


# ---------------------------------------------------------------------- overuse

#: The tolerated bytes beyond a slice: the device's size divided by ``TOLERATED_PART``, but at least
#: ``TOLERATED_LEAST`` and at most ``TOLERATED_MOST``. They depend on the size of the device: the
#: driver takes memory for the local arrays of all threads that can run at the same time, and a
#: larger device runs more threads. In addition, the broker tolerates the driver's overhead for each
#: process (see :class:`Overhead`).
TOLERATED_LEAST, TOLERATED_MOST, TOLERATED_PART = 64 * MiB, 512 * MiB, 16

#: The broker acts after this many consecutive samples with overuse. A single sample proves nothing:
#: the broker may take a sample after a suspend, but before the pool records this suspend.
SAMPLES = 3


def tolerated(total: int) -> int:
    """Return the tolerated bytes beyond a slice; ``total`` is 0 if the device's size is not
    known.
    """
    return min(max(TOLERATED_LEAST, total // TOLERATED_PART), TOLERATED_MOST)


def overuse(
    used: Mapping[str, int],
    granted: Mapping[str, int],
    explained: Mapping[str, int],
    totals: Mapping[str, int],
) -> int:
    """Return the bytes that a session has beyond its slices, summed over all devices.

    Each argument maps devices to bytes. ``used`` is the session's memory as the driver shows it.
    ``granted`` is the session's slices. ``explained`` is the driver's overhead for the session's
    processes. ``totals`` is the sizes of the devices. The excess on a device counts only if it is
    larger than the tolerated bytes of this device.
    """
    over = 0
    for device, size in used.items():
        more = size - granted.get(device, 0) - explained.get(device, 0)
        if more > tolerated(totals.get(device, 0)):
            over += more
    return over


def confirmed(samples: int, over: int) -> tuple[int, bool]:
    """Return the number of consecutive samples with overuse, and whether the broker must act now.

    ``samples`` is the number before this sample. This sample shows ``over`` bytes of overuse. In a
    series of samples with overuse, the second value is true only once.
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
    """Return, by device, the bytes that a suspend will move to host memory.

    The pool reserves host memory for these bytes. ``shown`` are the bytes that the driver lists for
    the session, and ``counted`` are the bytes that its guard counts. ``contexts`` is the size of a
    context on each device. ``cuda`` says whether the session has called cuInit. The function takes
    the larger of ``shown`` and ``counted``, because some drivers do not list all processes, and the
    guard does not count the driver's overhead. If both are 0, a session with a guard has at most a
    context, because the guard counts every allocation. A session without a guard may use its whole
    slice.
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
    """Return the state that a suspend has moved away from ``slices``: one part for each slice.

    The size of a part is the number of bytes that ``freed`` has for the device. If ``freed`` has no
    number, the driver does not know the size. The function then uses ``before``, the estimate of
    :func:`state_to_move`. If ``before`` has no number either, it uses the size of the slice.
    """
    return tuple(
        Slice(s.device, freed.get(s.device) or before.get(s.device, s.bytes)) for s in slices
    )


def restore_room(state: int, granted: int, headroom: int) -> int:
    """Return the bytes that a device must show as free before the broker tries a restore of
    ``state``.

    The result is ``state`` plus ``headroom``, but at most ``granted``: a state that fills a device
    leaves no room for the headroom. The result is never less than ``state``, even if ``granted`` is
    smaller, because a restore without room kills the process.
    """
    return min(state + headroom, max(state, granted))
