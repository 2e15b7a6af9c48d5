# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A draft of the plan: what the plan leaves free on each device, in each limit and in host memory.

A :class:`Draft` is a copy of the accounts. The pass tries its plan on this copy, and so does not
change the facts. At first the draft has the free bytes of the facts, minus the bytes that the last
plan promised. The pass then gives bytes to one session after another, and each time fewer bytes are
left in the draft. Growth and forecasts also read a draft, because the bytes that are left in it are
neither promised to a session nor reserved for the head of the queue.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Iterable, Mapping, Sequence

from .facts import DeviceLedger, Facts
from .ledgers import OwnerUsage
from .limits import lacking
from .model import NO_LIMIT, Charge, HostLack, Owner, Reason, Slice
from .placement import Need, Where, choose, preferred
from .session import Session
from .shares import Shares

#: The value of :data:`Where` for a need that accepts any device.
ANY: Where = ("", None)

#: A lease that another session may preempt: the session that has the lease, the bytes of the lease
#: on a device, and a class. Only sessions above this class may preempt the lease
#: (:func:`.running.open_above`). The class is minus infinity if nothing protects the idle lease.
Candidate = tuple[Session, int, float]


@dataclass(frozen=True, slots=True)
class Lack:
    """A limit that a request exceeds: its name, the most that it allows, and the group to which it
    applies.
    """

    name: str
    most: int
    #: "" for the owner's own quota.
    group: str = ""


class Room:
    """One device in a draft, with the bytes that are left for later sessions of the pass."""

    __slots__ = (
        "avail",
        "candidates",
        "expect",
        "leases",
        "ledger",
        "offered",
        "promised",
        "uuid",
    )

    def __init__(self, ledger: DeviceLedger) -> None:
        self.ledger = ledger
        self.uuid = ledger.device.uuid
        #: ``avail`` is the number of bytes that are free now. ``expect`` is the number of bytes
        #: that are free after all suspends under way. Both exclude the promised bytes.
        # This repeats the formula of ``ledger.free`` for speed, because each pass makes a room for
        # each device.
        self.avail = ledger.capacity - ledger.granted - ledger.foreign - ledger.overuse
        self.expect = self.avail + ledger.incoming
        self.promised = 0
        #: The leases on this device. Empty until the draft has a reservation; see
        #: :meth:`Draft.reserve`.
        self.leases: list[tuple[Session, int]] = []
        #: The leases that another session may preempt, and their total bytes; see
        #: :attr:`Draft.offers_known`.
        self.candidates: list[Candidate] = []
        self.offered = 0

    def promise(self, size: int) -> None:
        """Promise ``size`` bytes to a session. A negative ``size`` takes a promise back."""
        self.avail -= size
        self.expect -= size
        self.promised += size

    def spare(self, wanted: int) -> int:
        """Return how many bytes sessions behind the head of the queue can take on this device.

        The head wants ``wanted`` bytes here, and waits until leases on this device end. The result
        is the number of bytes that other sessions can take without a delay of the head. The leases
        may end in any order: the pool need not know when they end.

        Call a lease small if it has fewer bytes than the head still lacks. If all small leases
        together free fewer bytes than the head lacks, the head must wait for at least one large
        lease. This lease frees all bytes that the head lacks, and perhaps more. So the result is
        the size of the smallest large lease, less the bytes that the head lacks. If the small
        leases together free enough bytes, the result is 0.
        """
        return 0 if self.promised else _harmless(wanted - self.avail, self.leases)


def _harmless(missing: int, leases: Iterable[tuple[Session, int]]) -> int:
    """Return the result of :meth:`Room.spare` if ``leases`` must free ``missing`` bytes."""
    if missing <= 0:
        return -missing
    small, large = 0, 0
    for _, size in leases:
        if size < missing:
            small += size
        elif not large or size < large:
            large = size
    return large - missing if large and small < missing else 0


@dataclass(frozen=True, slots=True)
class Reservation:
    """The reservation of the head of the queue: the devices, and the wanted bytes on each.

    On these devices, sessions behind the head get only the bytes that :meth:`Room.spare` returns.
    """

    session: str
    wanted: Mapping[str, int]
    #: The number of slices that the head needs; ``wanted`` may name more devices, as alternatives.
    count: int
    charge: Charge
    #: The time at which the head reserves one more device.
    next_at: float


@dataclass(frozen=True, slots=True)
class Promise:
    """Bytes that one session will get when the suspends under way have freed them."""

    takes: tuple[Slice, ...]
    charge: Charge
    #: The pool's count of begun waits at the time when the plan first made this promise.
    made: int


class Known:
    """Cached answers about a draft; valid until the draft changes."""

    __slots__ = ("hopeless", "most_free", "reaches")

    def __init__(self) -> None:
        #: The answers of :meth:`Draft.reach`.
        self.reaches: dict[tuple[Where, int | None], list[int]] = {}
        #: The key is a kind of request for which the search must fail. The value says for which
        #: owners the search fails, and why; see :mod:`.reach`.
        self.hopeless: dict[object, tuple[float, float, Reason]] = {}
        #: The answer of :meth:`Draft.most_free`.
        self.most_free: int | None = None


@dataclass(slots=True)
class Draft:
    """What the plan leaves for later sessions of the pass: bytes on devices and in limits."""

    facts: Facts
    shares: Shares
    rooms: dict[str, Room] = field(default_factory=dict)
    #: Host bytes that suspends may still take.
    host: int = 0
    reservation: Reservation | None = None
    #: Sessions that this plan suspends.
    leaving: set[str] = field(default_factory=set)
    promises: dict[str, Promise] = field(default_factory=dict)
    #: Sessions that this plan attaches, or whose lease it lets grow. A plan does this at most once
    #: for a session.
    settled: set[str] = field(default_factory=set)
    #: Maps a group to the bytes of its leases that this plan suspends.
    going: dict[str, int] = field(default_factory=dict)
    #: ``offers_known`` says whether the rooms already list the leases that another session may
    #: preempt. ``offers_in_use`` says whether at least one of these leases is in use.
    offers_known: bool = False
    offers_in_use: bool = False
    #: For each owner and device: the bytes of the owner's leases in use whose time slice is over.
    turns_over: dict[Owner, dict[str, int]] = field(default_factory=dict)
    #: The cached answers of ``victims.Trial.tier``. A key is the asking session (or its kind) and
    #: the holder of the lease.
    tiers: dict[tuple[Any, str], int | None] = field(default_factory=dict)
    #: Cached answers; every method that changes the draft replaces this object by an empty one.
    known: Known = field(default_factory=Known)
    #: ``_taken`` has the grants of this plan. ``_leases_known`` says whether the rooms already list
    #: the leases whose end the head of the queue waits for.
    _taken: list[tuple[Session, Slice]] = field(default_factory=list)
    _leases_known: bool = False
    #: The answers of :meth:`opened`.
    _opened: dict[int | None, dict[str, tuple[list[Candidate], int]]] = field(default_factory=dict)
    #: The answers of :meth:`suitable`, which depend on the facts alone.
    _suitable: dict[Where, list[Room]] = field(default_factory=dict)
    _usage: dict[str, OwnerUsage] = field(default_factory=dict)
    #: The bytes that count in the cap, for each group with a cap.
    _groups: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rooms = {uuid: Room(ledger) for uuid, ledger in self.facts.devices.items()}
        self.host = self.facts.host_room
        for name in self.facts.tree.caps:
            self._groups[name] = self.facts.usage_in(name)

    # ------------------------------------------------------------------ free bytes

    def usage(self, owner: str) -> OwnerUsage:
        """Return the totals of the owner's leases and promises in this draft."""
        found = self._usage.get(owner)
        if found is None:
            found = self._usage[owner] = self.facts.usage_of(owner)
        return found

    def count(self, owner: Owner, charge: Charge, sign: int = 1) -> None:
        """Add a charge to the accounts of the owner and its groups; ``sign`` -1 subtracts it."""
        settings = self.facts.settings
        # Nothing reads the accounts of an owner without limits.
        if settings.quotas and settings.quota_of(owner.name) is not NO_LIMIT:
            self.usage(owner.name).add(charge, sign)
        for name in self.facts.tree.capped(owner.group) if self.facts.tree.caps else ():
            self._groups[name] += sign * charge[0]

    def lacking(self, owner: Owner, more: Charge, less: Iterable[Session] = ()) -> Lack | None:
        """Return a limit that ``more`` would exceed; None if all limits allow ``more``.

        The limits are those of the owner and of the owner's groups. ``less`` are leases that go
        back to the pool before ``more`` is added.
        """
        facts = self.facts
        settings, caps = facts.settings, facts.tree.caps
        capped = facts.tree.capped(owner.group) if caps else ()
        quota = settings.quota_of(owner.name) if settings.quotas else NO_LIMIT
        if quota is NO_LIMIT and not capped:
            return None
        back: Charge = (0, 0, 0)
        groups = dict.fromkeys(capped, 0)
        for v in less:
            charge = v.lease.charge
            if v.owner.name == owner.name:
                back = back[0] + charge, back[1] + len(v.lease.slices), back[2] + 1
            if groups:
                for name in facts.tree.capped(v.owner.group):
                    if name in groups:
                        groups[name] += charge
        found = lacking(quota, self.usage(owner.name), more, back)
        if found is not None:
            return Lack(*found)
        for name, freed in groups.items():
            most = facts.tree.caps[name]
            if more[0] > 0 and self._groups[name] - freed + more[0] > most:
                return Lack("memory", most, name)
        return None

    def within_limits(self, owner: Owner, promised: Charge) -> bool:
        """Return whether the bytes promised to a session of ``owner`` are within all limits."""
        self.count(owner, promised, -1)
        lack = self.lacking(owner, promised)
        self.count(owner, promised)
        return lack is None

    def room_of(self, owner: Owner) -> Lack | None:
        """Return the cap with the fewest bytes left, of the owner's groups; None if no cap applies.

        ``most`` of the result is the number of bytes left.
        """
        caps = self.facts.tree.caps
        left = (
            Lack("memory", caps[g] - self._groups[g], g)
            for g in self.facts.tree.capped(owner.group)
        )
        return min(left, key=lambda lack: lack.most, default=None)

    def coming_back(self, owner: Owner) -> list[Session]:
        """Return the leases in the owner's limits that a suspend will end.

        The suspend may be under way, or this draft may plan it.
        """
        if not (self.facts.settings.quotas or self.facts.tree.caps):
            return []
        return [s for s in self.sharing(owner) if s.state == "detaching" or s.id in self.leaving]

    def sharing(self, owner: Owner, group: str | None = None) -> list[Session]:
        """Return the leases that count in the limits of the owner.

        These are the owner's own leases, and the leases of all members of the owner's groups with a
        cap. If ``group`` is the name of a group, return only the leases that count in this group's
        limit. If it is "", return only the leases that count in the owner's own limit.
        """
        facts = self.facts
        if group:
            return [s for s in facts.leased.values() if group in facts.tree.path(s.owner.group)]
        capped = facts.tree.capped(owner.group) if group is None else ()
        if not capped:
            return list(facts.leases_of(owner.name))
        return [
            s
            for s in facts.leased.values()
            if s.owner.name == owner.name or capped[0] in facts.tree.path(s.owner.group)
        ]

    def left(self, ledger: DeviceLedger) -> int:
        """Return the bytes of the device that the next session can get at once."""
        uuid = ledger.device.uuid
        room, held = self.rooms[uuid], self.reservation
        wanted = held.wanted.get(uuid) if held is not None else None
        return room.avail if wanted is None else min(room.avail, room.spare(wanted))

    def reserved(self, room: Room) -> bool:
        """Return whether the head of the queue has a reservation on this device."""
        return self.reservation is not None and room.uuid in self.reservation.wanted

    def now(self, s: Session, needs: Sequence[Need]) -> tuple[Slice, ...] | None:
        """Return the slices with which ``s`` could start at once, or None."""
        least = min(need.least for need in needs) if len(needs) > 1 else needs[0].least
        if self.most_free() < least:
            return None  # this is the usual case when sessions wait
        if self.reservation is None:  # the same values as left(), without a call for each device
            left = {uuid: room.avail for uuid, room in self.rooms.items()}
        else:
            left = {uuid: self.left(room.ledger) for uuid, room in self.rooms.items()}
        return choose(needs, self.facts.devices, left, preferred(s))

    def waits(self, takes: Iterable[Slice], least: int) -> bool:
        """Return True if a session with the promised slices ``takes`` must certainly wait.

        Two conditions must be true. First, at least one promised slice needs bytes of a suspend
        that is under way. Second, no device has ``least`` free bytes, even if the bytes of the
        session's own promise were free. (``least`` is the size of the session's smallest slice.) If
        the result is False, the session may still have to wait.
        """
        most, late = self.most_free(), False
        for x in takes:
            room = self.rooms[x.device]
            most = max(most, room.avail + x.bytes)
            late = late or room.avail + room.promised < x.bytes
        return late and most < least

    # ------------------------------------------------------------------ the most there can be

    def most_free(self) -> int:
        """Return the free bytes on the device that now has the most free bytes."""
        found = self.known.most_free
        if found is None:
            found = self.known.most_free = max([room.avail for room in self.rooms.values()])
        return found

    def opened(self, level: int | None) -> Mapping[str, tuple[list[Candidate], int]]:
        """Return, by device, the leases that a session of class ``level`` might preempt, and their
        total bytes.

        ``level`` is None for a session within the guarantee of a group. The lists are valid for the
        whole pass, like the tiers.
        """
        found = self._opened.get(level)
        if found is None:
            found = self._opened[level] = {}
            for room in self.rooms.values():
                some, size = room.candidates, room.offered
                if some and level is not None:
                    some = [candidate for candidate in some if level > candidate[2]]
                    size = sum([candidate[1] for candidate in some])
                found[room.uuid] = some, size
        return found

    def suitable(self, where: Where) -> list[Room]:
        """Return the rooms of all devices in service that ``where`` allows."""
        found = self._suitable.get(where)
        if found is None:
            fixed, model = where
            found = self._suitable[where] = [
                room
                for room in ((self.rooms[fixed],) if fixed else self.rooms.values())
                if not (room.ledger.paused or room.ledger.fault)
                and (fixed or model is None or room.ledger.device.model == model)
            ]
        return found

    def reach(self, where: Where, level: int | None) -> list[int]:
        """Return the most bytes that a session of class ``level`` can get on each suitable device,
        the largest number first.

        Each lease that the class may preempt counts as free. On devices that the head of the queue
        has reserved, no lease may be preempted.
        """
        reaches = self.known.reaches
        found = reaches.get((where, level))
        if found is None:
            held = self.reservation.wanted if self.reservation is not None else ()
            opened = self.opened(level)
            found = [
                self.left(room.ledger) if room.uuid in held else room.expect + opened[room.uuid][1]
                for room in self.suitable(where)
            ]
            found.sort(reverse=True)
            reaches[where, level] = found
        return found

    # ------------------------------------------------------------------ host memory

    def host_left(self, devices: Iterable[str] = ()) -> int:
        """Return the host bytes that a suspend may take.

        The result excludes the host bytes that the head of the queue will need. But if the suspend
        frees memory only on ``devices`` that the head has reserved, the suspend may take them, too.
        """
        held = self.reservation
        if held is None:
            return self.host
        freed = set(devices)
        if freed and freed <= held.wanted.keys():
            return self.host
        missing = (max(0, size - self.rooms[uuid].expect) for uuid, size in held.wanted.items())
        # The head may have reserved more devices than it needs. If so, only the devices on which
        # the fewest bytes are missing count.
        return self.host - sum(sorted(missing)[: held.count])

    def host_lack(self, victims: Iterable[Session], room: int) -> HostLack:
        """Return why the state of all ``victims`` does not fit; "" if it fits.

        The state must fit in ``room`` bytes, and in the quotas of the victims' owners.
        """
        total = 0
        owners: dict[str, int] = {}
        last: Session | None = None
        for v in victims:
            bound = v.state_bound
            if bound:
                last = v
                total += bound
                owners[v.owner.name] = owners.get(v.owner.name, 0) + bound
        if last is None:
            return ""
        lack: HostLack = "room" if total > room else ""
        if not lack:
            for owner, size in owners.items():
                most = self.facts.settings.quota_of(owner).suspended
                if most is not None and self.usage(owner).suspended + size > most:
                    lack = "quota"
        return (
            "size"
            if lack and last.state_bound > self.facts.settings.host_most(last.owner.name)
            else lack
        )

    # ------------------------------------------------------------------ changes

    def take(self, s: Session, takes: Iterable[Slice], charge: Charge) -> None:
        """Grant ``takes`` to ``s``: later sessions cannot get these bytes."""
        self.settled.add(s.id)
        self.known = Known()
        self.count(s.owner, charge)
        for x in takes:
            room = self.rooms[x.device]
            room.avail -= x.bytes
            room.expect -= x.bytes
            self._taken.append((s, x))
            if self._leases_known:
                self._note_taken(s, x)

    def _note_taken(self, s: Session, x: Slice) -> None:
        """Add the granted slice to the leases of its room, because this lease may also end before
        the head starts.
        """
        room = self.rooms[x.device]
        held = sum(size for v, size in room.leases if v is s)
        room.leases = [(v, size) for v, size in room.leases if v is not s]
        room.leases.append((s, held + x.bytes))

    def _find_leases(self) -> None:
        """List the leases of each device in the device's room, for :meth:`Room.spare`.

        Only a draft with a reservation needs these lists, so the draft makes them late. The facts
        do not change during a pass, so they have the leases from before the pass. This method adds
        the grants of this pass, in the order in which the pass made them.
        """
        self._leases_known = True
        for room in self.rooms.values():
            room.leases = [*room.ledger.leases.items()]
        for s, x in self._taken:
            self._note_taken(s, x)

    def promise(self, s: Session, promise: Promise) -> None:
        """Promise bytes to ``s`` that suspends under way will free."""
        self.promises[s.id] = promise
        self.known = Known()
        for x in promise.takes:
            self.rooms[x.device].promise(x.bytes)
        self.count(s.owner, promise.charge)

    def unpromise(self, s: Session) -> Promise:
        """Withdraw the promise to ``s``, and return it."""
        promise = self.promises.pop(s.id)
        self.known = Known()
        for x in promise.takes:
            self.rooms[x.device].promise(-x.bytes)
        self.count(s.owner, promise.charge, -1)
        return promise

    def suspend(self, v: Session) -> None:
        """Suspend ``v`` in the draft: its bytes become free later, and its state takes host
        memory.
        """
        if v.id in self.promises:
            self.unpromise(v)  # this is a promise of growth: it ends together with the lease
        self.leaving.add(v.id)
        self.known = Known()
        self.host -= v.state_bound
        self.usage(v.owner.name).suspended += v.state_bound
        for name in self.facts.tree.path(v.owner.group):
            self.going[name] = self.going.get(name, 0) + v.lease.charge
        for x in v.lease.slices:
            self.rooms[x.device].expect += x.bytes

    def stays_out(self, v: Session, room: Room, wanted: int) -> bool:
        """Return whether ``v``, after its suspend, would have to wait behind the head of the queue.

        The head wants ``wanted`` bytes of ``room``. If ``v`` would not wait, its suspend does not
        help the head: ``v`` would get its bytes back at its next call. The pool would suspend and
        resume ``v`` at every pause between its calls, without a gain for any session.
        """
        size = sum(x.bytes for x in v.lease.slices if x.device == room.uuid)
        if room.promised:
            return True
        gone = {v.id, *self.leaving}
        stay = [(w, n) for w, n in room.leases if w.id not in gone and w.state != "detaching"]
        return _harmless(wanted - room.expect - size, stay) < size

    def reserve(self, held: Reservation, head: Session) -> None:
        """Reserve memory for the head of the queue, and the quota of the head's owner."""
        if not self._leases_known:
            self._find_leases()
        self.reservation = held
        self.known = Known()
        self.count(head.owner, held.charge)
        for uuid in held.wanted if head.lease.slices else ():
            # The head does not wait for the end of its own lease, so remove it from the list.
            room = self.rooms[uuid]
            room.leases = [(s, size) for s, size in room.leases if s is not head]

    def unreserve(self, held: Reservation, head: Session) -> None:
        """Undo :meth:`reserve`."""
        self.count(head.owner, held.charge, -1)
        self.reservation = None
        self.known = Known()
        if head.lease.slices:
            # The rooms do not list the leases of this head. Another head would wait for these
            # leases too. So the next reservation must make the lists again.
            self._leases_known = False
