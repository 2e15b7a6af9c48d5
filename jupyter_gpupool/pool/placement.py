# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Where a session may go, and how many bytes it takes there.

A session with suspended state needs, for each device that the state came from, a device of the
same model that can take migrated state (or the very device), each on a distinct one. A session
that has called cuInit but holds nothing knows only the device that it saw: it can go to others of
the model where its processes can be moved with their first context, else nowhere. Everybody else
goes anywhere. The devices of the last lease come first (no migration), then the tightest device
with room (best fit), which keeps the large holes for large requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Iterable, Mapping, Sequence

from .inventory import DeviceLedger, Inventory
from .lease import Session
from .model import PoolSettings, Request, Slice

#: What a session asks for: (group, least bytes, bytes with headroom) of each slice, sorted.
Asked = tuple[tuple[str, int, int], ...]

#: The headroom of a resume is at most this part of a device.
HEADROOM_PART = 16


@dataclass(frozen=True, slots=True)
class Need:
    """One slice that a session needs: bytes on one device, which must be distinct from others."""

    #: Bytes without which it can not be.
    least: int
    #: Bytes to reserve: ``least`` and, to resume, the headroom.
    bytes: int
    #: The device whose state moves here; "" if nothing is suspended.
    origin: str = ""
    #: Bytes to reserve on ``origin``; 0: as anywhere.
    at_origin: int = 0
    #: The only device that will do; "" for any.
    fixed: str = ""
    #: The only model that will do; None for any.
    model: str | None = None

    @property
    def group(self) -> str:
        """The name of the set of devices that will do."""
        if self.fixed:
            return f"at {self.fixed}"
        return "any" if self.model is None else f"of {self.model}"

    def amount(self, ledger: DeviceLedger) -> int:
        """Return the bytes to reserve on this device.

        That is all of ``bytes``, except where the state fits the device but state and headroom
        exceed even an empty one: then it is the whole device. More can not be had anywhere, and
        the state was on such a device before.
        """
        size = self.bytes
        if self.at_origin and ledger.device.uuid == self.origin:
            size = self.at_origin
        if size <= ledger.capacity:
            return size
        return max(self.least, ledger.capacity)

    def allows(self, ledger: DeviceLedger) -> bool:
        """Return whether this device will do, room aside."""
        return not ledger.drained and self.suits(ledger)

    def suits(self, ledger: DeviceLedger) -> bool:
        """Return whether this device would do if it were in service, room aside."""
        device = ledger.device
        if self.fixed:
            return device.uuid == self.fixed
        if self.model is None:
            return True
        return device.model == self.model and (device.can_migrate or device.uuid == self.origin)


def headroom(ledger: DeviceLedger, settings: PoolSettings) -> int:
    """Return the bytes beyond its state that a session is resumed with on such a device.

    At most a sixteenth of the device: what a driver takes by itself is less on a small one.
    """
    return min(settings.resume_headroom, max(1, ledger.capacity // HEADROOM_PART))


def _most(origin: DeviceLedger, inventory: Inventory, enough: int, *, moves: bool) -> int:
    """Return the most that the pool has on a device which state from ``origin`` can go to.

    Or what it has on ``origin``, if that is ``enough``.

    A display server, say, takes a little of a device for ever. State that fills the rest came from
    there, and would wait for ever for headroom which is nowhere to be had.
    """
    own = origin.capacity - origin.foreign
    if not moves or (not origin.drained and own >= enough):
        return own
    ledgers = [
        ledger
        for ledger in inventory.devices.values()
        if ledger.device.model == origin.device.model
        and ledger.device.can_migrate
        and not ledger.drained
    ]
    return max(ledger.capacity - ledger.foreign for ledger in ledgers or [origin])


def _fit(needs: Sequence[Need], inventory: Inventory) -> bool:
    """Return whether devices that only others outside the pool use have room for all of these."""
    used: set[str] = set()
    for at in in_turn(needs):
        for uuid, ledger in inventory.devices.items():
            room = ledger.capacity - ledger.foreign
            if uuid not in used and needs[at].allows(ledger) and room >= needs[at].amount(ledger):
                used.add(uuid)
                break
        else:
            return False
    return True


def _in_place(needs: Sequence[Need], inventory: Inventory) -> tuple[Need, ...] | None:
    """Return needs that ask for no more on the devices they come from than there is; None if
    these lack room for the state itself.

    The roomiest device is there for one slice only: several that all ask for the headroom that
    only it has, beside the memory that others use on the GPUs, would wait without end.
    """
    found = []
    for need in needs:
        ledger = inventory.placeholder(need.origin)
        own = ledger.capacity - ledger.foreign
        if ledger.drained or own < need.least:
            return None
        found.append(replace(need, at_origin=min(need.bytes, own)))
    return tuple(found)


def needs_of(session: Session, inventory: Inventory, settings: PoolSettings) -> tuple[Need, ...]:
    """Return what ``session`` needs to be attached, in the order in which it sees its devices."""
    memory = session.request.memory
    if session.suspended:
        found = []
        for s in session.suspended:
            ledger = inventory.placeholder(s.device)
            device = ledger.device
            # Where nothing enforces its slice, it may have had more than the pool has to give: of
            # what the driver may take, or the admin keeps.
            state = min(s.bytes, ledger.capacity) if ledger.capacity else s.bytes
            least = max(memory, state)
            moves = device.can_migrate and (not session.immovable or bool(ledger.drained))
            wanted = s.bytes + headroom(ledger, settings)
            most = _most(ledger, inventory, wanted, moves=moves)
            found.append(
                Need(
                    least=least,
                    bytes=max(least, min(wanted, most)),
                    origin=s.device,
                    fixed="" if moves else s.device,
                    model=device.model if moves else None,
                )
            )
        if len(found) > 1 and not _fit(found, inventory):
            return _in_place(found, inventory) or tuple(found)
        return tuple(found)
    if session.bound:
        return tuple(_bound(memory, uuid, session, inventory) for uuid in session.bound)
    return (Need(memory, memory),) * session.request.devices


def _bound(memory: int, uuid: str, session: Session, inventory: Inventory) -> Need:
    """Return what a session needs in the place of a device that its processes have looked at.

    Any of the model where they can be moved to it with their first context, else that device.
    """
    device = inventory.placeholder(uuid).device
    if session.lands and device.landing_bytes and not session.immovable:
        return Need(memory, memory, model=device.model)
    return Need(memory, memory, fixed=uuid)


def charge_of(request: Request, needs: Sequence[Need]) -> int:
    """Return what the owner's quota is charged for a lease that meets ``needs``."""
    return sum(min(need.least, request.limit) for need in needs)


def groups_of(needs: Sequence[Need]) -> tuple[str, ...]:
    """Return the groups, as :func:`groups_at` names them, of the devices that can serve a slice."""
    several = "several " if len(needs) > 1 else ""
    return tuple(dict.fromkeys(several + need.group for need in needs))


def groups_at(ledger: DeviceLedger) -> tuple[str, ...]:
    """Return the groups of sessions that a device can serve, alone or with others."""
    own = "any", f"of {ledger.device.model}", f"at {ledger.device.uuid}"
    return *own, *(f"several {group}" for group in own)


def asked_of(needs: Sequence[Need]) -> Asked:
    """Return what is asked of which groups, to be compared by :func:`above`."""
    return tuple(sorted((n.group, n.least, n.at_origin or n.bytes) for n in needs))


def above(asked: Asked, less: Asked) -> bool:
    """Return whether ``asked`` can not be met where ``less`` can not."""
    return len(asked) == len(less) and all(
        a[0] == b[0] and a[1] >= b[1] and a[2] >= b[2] for a, b in zip(asked, less, strict=True)
    )


def preferred(session: Session) -> tuple[str, ...]:
    """Return the devices where it was last, or that it sees, in its order."""
    return tuple(s.device for s in session.suspended) or session.bound or session.last_devices


def in_turn(needs: Sequence[Need]) -> list[int]:
    """Return the order in which needs choose: those without a choice first, then the largest.

    Needs of one model differ only in size, so what suits a larger one suits a smaller one, and
    choosing in this order finds a place for all whenever there is one.
    """
    if len(needs) == 1:
        return [0]
    return sorted(
        range(len(needs)),
        key=lambda i: (not needs[i].fixed, -needs[i].least, -needs[i].bytes, i),
    )


def spare(ledger: DeviceLedger, wanted: int) -> int:
    """Return the bytes on a claimed device that can go to others without harm to the claimant.

    The claimant wants ``wanted`` bytes and waits until leases here end. Giving ``x`` bytes away is
    harmless if it starts no later in any order in which the present leases may end. That is so if
    all leases smaller than what is missing do not suffice together: then a larger one must end in
    any case, and what the smallest of the larger ones has beyond the missing bytes can go.
    """
    if ledger.reserved:
        return 0
    missing = wanted - ledger.avail
    if missing <= 0:
        return -missing
    small, large = 0, 0
    for size in ledger.leases.values():
        if size < missing:
            small += size
        elif not large or size < large:
            large = size
    return large - missing if large and small < missing else 0


def place_now(
    session: Session,
    needs: Sequence[Need],
    inventory: Inventory,
    claimed: Mapping[str, int],
    only: Mapping[str, DeviceLedger] | None = None,
) -> tuple[Slice, ...] | None:
    """Return slices for all ``needs`` out of what is free now, or None.

    ``claimed`` maps devices that somebody ahead accumulates memory on to the bytes wanted there;
    with ``only``, no other devices are looked at.
    """

    def room(ledger: DeviceLedger) -> int:
        wanted = claimed.get(ledger.device.uuid)
        return ledger.avail if wanted is None else min(ledger.avail, spare(ledger, wanted))

    last = preferred(session)
    if len(last) == len(needs):
        same = []
        for need, uuid in zip(needs, last, strict=True):
            ledger = inventory.devices.get(uuid)
            if ledger is None or not need.allows(ledger) or room(ledger) < need.amount(ledger):
                break
            if only is not None and uuid not in only:
                break
            same.append(Slice(uuid, need.amount(ledger)))
        else:
            return tuple(same)
    chosen: dict[int, Slice] = {}
    used: set[str] = set()
    for at in in_turn(needs):
        need = needs[at]
        options: Iterable[DeviceLedger]
        if need.fixed:
            options = [inventory.placeholder(need.fixed)]
        elif only is not None:
            options = sorted(only.values(), key=lambda d: (d.avail, d.device.index))
        else:
            options = inventory.by_avail(need.least)
        for ledger in options:
            uuid = ledger.device.uuid
            if uuid not in used and need.allows(ledger) and room(ledger) >= need.amount(ledger):
                used.add(uuid)
                chosen[at] = Slice(uuid, need.amount(ledger))
                break
        else:
            return None
    return in_order(needs, chosen, inventory)


def in_order(
    needs: Sequence[Need], chosen: Mapping[int, Slice], inventory: Inventory
) -> tuple[Slice, ...]:
    """Return the chosen slices in the order of ``needs``; if that is none, by device number."""
    slices = [chosen[at] for at in range(len(needs))]
    if all(need.group == "any" for need in needs):
        slices.sort(key=lambda s: inventory[s.device].device.index)
    return tuple(slices)
