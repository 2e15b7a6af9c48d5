# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Which waiting sessions to look at after an event, in what order, and to carry out their plans.

After each event only those are looked at whose case may have changed: plans on devices that
gained memory, newcomers, the head of the queue, and behind it those that fit on a device that
gained. The walk goes in the order of the queue, so that whoever is ahead chooses first.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Iterator

from . import wanted
from .books import Books
from .claims import accumulates, make_claim
from .growth import reclaim
from .inventory import DeviceLedger
from .lease import Session
from .model import Slice
from .placement import Asked, above, asked_of, needs_of, place_now, spare
from .policy import Blocked, Plan, count_leaving, plan_attach, plan_growth, promised
from .queue import Entry
from .yielding import host_room, paused

#: Rounds per event; a round only follows when the last one took a promise back.
ROUNDS = 8


class Server:
    """Serves the queue of one pool."""

    def __init__(self, books: Books) -> None:
        self._books = books
        #: Host bytes at the last look: for the head, and for those behind it.
        self._room = (0, 0)
        #: What some session or owner needs of it became less.
        self._eased = False
        #: Somebody was blocked for want of host memory since there last was more of it.
        self._host_short = False

    def run(self) -> None:
        """Serve whoever can be served after an event."""
        books = self._books
        for _ in range(ROUNDS):
            wanted.note(books)
            inventory = books.inventory
            cancelled: list[Session] = []
            for ledger in inventory.shrunk().values():
                self._overpromised(ledger, cancelled)
            gained, freed = inventory.gained(), inventory.freed()
            fell, books.quotas.fell = books.quotas.fell, {}
            host = self._host_eased()
            if host and books.host_waits:
                fell.update(books.host_waits)
                books.host_waits.clear()
            if host and books.leaving:
                for s in list(books.leaving.values()):
                    self.expire(s)
            if not (gained or fell or host or cancelled or books.fresh or books.recheck_head):
                break
            if books.order or any(ledger.growers for ledger in gained.values()):
                if books.planned or any(ledger.plans for ledger in freed.values()):
                    self._plans(freed, fell, cancelled)
                self._walk(gained, fell, cancelled, host=host)
                self._grow(gained)
            books.recheck_head = False

    def _host_eased(self) -> bool:
        """Return whether more state may be suspended than at the last look."""
        books = self._books
        before, self._room = self._room, (books.host.room, host_room(books, guarded=True))
        self._eased, books.quotas.eased = books.quotas.eased, False
        if not (self._eased or self._room[0] > before[0] or self._room[1] > before[1]):
            return False
        short, self._host_short = self._host_short, False
        return short or bool(books.leaving or books.host_waits)

    # ------------------------------------------------------------------ idle leases

    def expire(self, s: Session) -> bool:
        """Suspend an idle session whose time is over, or remember it until there is host room."""
        books = self._books
        if books.may_suspend(s):
            books.leaving.pop(s.id, None)
            books.suspend(s, paused(s, books) or ("release" if s.release_asked else "idle"))
            return True
        books.leaving[s.id] = s
        return False

    def bring_back(self, s: Session, reason: str) -> bool:
        """Resume a suspended session that asks for nothing, if that takes nothing from anybody.

        Return whether its state is on the way to a device.
        """
        books = self._books
        if books.by_quota.get(s.owner.name):
            return False  # another session of its owner waits for what is left of the quota
        claimed = books.claim.wanted if books.claim is not None else {}
        before, s.needs = s.needs, needs_of(s, books.inventory, books.settings)
        plan = plan_attach(books, s, claimed, guarded=bool(claimed))
        s.needs = before
        if not (isinstance(plan, Plan) and plan.ready):
            return False
        books.move(s, "queued", reason)
        books.enqueue(s, books.now)
        books.grant(s, plan.takes, reason)
        return True

    # ------------------------------------------------------------------ plans under way

    def _overpromised(self, ledger: DeviceLedger, cancelled: list[Session]) -> None:
        """Take promises back, the latest first, that this device can not keep any more."""
        while ledger.plans and (ledger.drained or ledger.expect < 0):
            last = max(ledger.plans.values(), key=_turn)
            self._cancel(last, cancelled)

    def _cancel(self, s: Session, cancelled: list[Session]) -> None:
        books = self._books
        books.drop_plan(s)
        if s.entry is not None:
            books.set_lane(s, "open")
            cancelled.append(s)

    def _plans(
        self, freed: dict[str, DeviceLedger], fell: dict[str, None], cancelled: list[Session]
    ) -> None:
        """Carry out the plans for which there is memory (here or elsewhere) and quota now."""
        books = self._books
        concerned: dict[str, Session] = {}
        most = 0
        for ledger in freed.values():
            concerned.update(ledger.plans)
            most = max(most, ledger.avail)
        if most > 0 or fell:
            for s in books.planned.values():
                if (s.entry is not None and s.entry[3] <= most) or s.owner.name in fell:
                    concerned[s.id] = s
        for s in sorted(concerned.values(), key=_turn):
            plan = s.plan
            if plan is None:
                continue
            less = promised(books, s)
            owner = s.owner.name
            lacking = books.quotas.lacking(owner, plan.charge, plan.devices, plan.leases, less)
            if lacking is not None:
                count_leaving(books, owner, less)
                if books.quotas.lacking(owner, plan.charge, plan.devices, plan.leases, less):
                    self._cancel(s, cancelled)
            elif self._ready(s, plan):
                self._commit(s, plan)
            elif s.entry is not None and s.entry[3] <= most:
                only = freed if len(s.needs) == 1 else None
                takes = place_now(s, s.needs, books.inventory, self._claimed(s), only)
                if takes is not None:
                    books.grant(s, takes, "memory came free elsewhere")

    def _ready(self, s: Session, plan: Plan) -> bool:
        turn = _turn(s)
        for take in plan.takes:
            ledger = self._books.inventory[take.device]
            before = sum(
                x.bytes
                for other in ledger.plans.values()
                if other is not s and _turn(other) < turn and other.plan is not None
                for x in other.plan.takes
                if x.device == take.device
            )
            if ledger.free - before < take.bytes:
                return False
        return True

    def _commit(self, s: Session, plan: Plan) -> None:
        """Carry out a plan for which nothing has to happen first."""
        books = self._books
        books.drop_plan(s)
        if s.entry is not None:
            books.grant(s, plan.takes, "a slice is free")
            return
        more = {x.device: x.bytes for x in plan.takes}
        slices = [Slice(x.device, x.bytes + more.get(x.device, 0)) for x in s.slices]
        books.resize(s, slices)
        books.note_growth(s)

    # ------------------------------------------------------------------ the queue

    def _walk(
        self,
        gained: dict[str, DeviceLedger],
        fell: dict[str, None],
        cancelled: list[Session],
        *,
        host: bool,
    ) -> None:
        books = self._books
        new = self._newcomers(fell, cancelled)
        changed = bool(gained or fell or host or books.recheck_head)
        looked: set[str] = set()
        head: Session | None = None
        while True:
            first = books.open.first()
            if new and (first is None or new[0] <= first):
                s = books.sessions.get(heappop(new)[4])
                if s is not None and s.entry is not None and s.lane not in ("", "planned"):
                    looked.add(s.id)
                    self._consider(s, new, guarded=False)
                continue
            if first is None:
                break
            head = books.sessions[first[4]]
            known = head.id in looked or (
                books.claim is not None and books.claim.session == head.id and not changed
            )
            same = books.claim is not None and books.claim.session == head.id
            only = gained if same and not (fell or host or books.recheck_head) else None
            if only is not None and len(head.needs) == 1:
                need = head.needs[0]
                known = known or not any(
                    d.pot >= need.least and need.allows(d) for d in only.values()
                )
            served = not known and self._consider(head, new, guarded=False, only=only)
            if not served and head.lane == "open":
                break
        if head is None or head.lane != "open":
            books.set_claim(None)
            return
        self._claim_for(head)
        assert head.entry is not None
        self._behind([e for e in books.open if e > head.entry] + new if changed else new)

    def _newcomers(self, fell: dict[str, None], cancelled: list[Session]) -> list[Entry]:
        books = self._books
        new = [s.entry for s in cancelled if s.entry is not None]
        for s in books.fresh.values():
            assert s.entry is not None
            new.append(s.entry)
        for owner in fell:
            queue = books.by_quota.get(owner)
            first = queue.first() if queue else None
            if first is not None:
                new.append(first)
        heapify(new)
        return new

    def _behind(self, heap: list[Entry]) -> None:
        """Serve those behind the head, in order; nothing comes free on the way."""
        books = self._books
        heapify(heap)
        most = self._most()
        failed: dict[str, list[Asked]] = {}
        before: Entry | None = None
        while heap:
            entry = heappop(heap)
            s = books.sessions.get(entry[4])
            if s is None or s.entry != entry or entry == before:
                continue
            if s.lane not in ("fresh", "open", "quota"):
                continue
            before = entry
            if s.lane == "open" and entry[3] > most:
                continue
            asked = asked_of(s.needs)
            tried = failed.setdefault(asked[0][0], [])
            if s.lane == "open" and any(above(asked, less) for less in tried):
                continue
            served = self._consider(s, heap, guarded=True)
            if served:
                most = self._most()
                failed.clear()  # its victims may leave more than it takes
            elif s.lane == "open" and s.why[0] in ("busy", "behind"):
                tried.append(asked)

    def _most(self) -> int:
        """Return the most bytes that anybody behind the head can find on one device."""
        claimed = self._books.claim.wanted if self._books.claim is not None else {}
        return max(
            (
                min(d.avail, spare(d, claimed[u])) if u in claimed else d.pot
                for u, d in self._books.inventory.devices.items()
                if not d.drained
            ),
            default=0,
        )

    def _consider(
        self,
        s: Session,
        new: list[Entry],
        *,
        guarded: bool,
        only: dict[str, DeviceLedger] | None = None,
    ) -> bool:
        """Serve or plan for one waiting session if that is possible; put it in its lane if not."""
        books = self._books
        assert s.entry is not None
        owner, arrived, was = s.owner.name, s.lane == "fresh", s.lane
        queue = books.by_quota.get(owner)
        if queue is not None and was != "quota":
            ahead = queue.first()
            if ahead is not None and ahead < s.entry:
                s.why = ("quota-behind",)
                books.set_lane(s, "quota")
                return False
        claimed = books.claim.wanted if guarded and books.claim is not None else {}
        if not guarded and books.claim is not None and books.claim.session != s.id:
            # A new head: whoever claimed so far is behind it.
            books.set_claim(None)
        plan = plan_attach(books, s, claimed, guarded=guarded, only=only)
        if books.grown and not _ready(plan) and reclaim(books):
            # What others have grown and do not use goes first, before anybody is suspended.
            plan = plan_attach(books, s, claimed, guarded=guarded)
        if arrived and books.planned and not (isinstance(plan, Plan) and not plan.victims):
            # Whoever is ahead may use what was promised to those behind.
            for later in self._promised_behind(s):
                for w in later:
                    books.drop_plan(w)
                    books.set_lane(w, "open")
                    assert w.entry is not None
                    heappush(new, w.entry)
                plan = plan_attach(books, s, claimed, guarded=guarded)
                if isinstance(plan, Plan):
                    break
        if isinstance(plan, Blocked):
            s.why = plan.why
            self._host_short = self._host_short or plan.host
            books.set_lane(s, plan.lane)
            if plan.lane == "quota" and plan.why[0] == "host":
                books.host_waits[owner] = None
        elif plan.ready:
            self._commit(s, plan)
        else:
            s.why = ("planned", tuple(x.device for x in plan.takes))
            books.begin_plan(s, plan)
        if was == "quota" and s.lane != "quota":
            # The owner's next one is not behind it any more.
            queue = books.by_quota.get(owner)
            first = queue.first() if queue is not None else None
            if first is not None:
                heappush(new, first)
        return isinstance(plan, Plan)

    def _promised_behind(self, s: Session) -> Iterator[list[Session]]:
        """Yield whose promises behind ``s`` may be taken back: the last that will do, or all."""
        books = self._books
        assert s.entry is not None
        if len(s.needs) == 1:
            need, last = s.needs[0], None
            for w in books.planned.values():
                if w.plan is None or w.entry is None or w.entry < s.entry:
                    continue
                if last is not None and last.entry is not None and last.entry > w.entry:
                    continue
                for take in w.plan.takes:
                    ledger = books.inventory[take.device]
                    enough = take.bytes + ledger.expect >= need.amount(ledger)
                    if enough and need.allows(ledger):
                        last = w
            if last is not None:
                yield [last]
        behind = [w for w in books.planned.values() if w.entry is not None and w.entry > s.entry]
        if behind:
            yield behind

    def _claimed(self, s: Session) -> dict[str, int]:
        claim = self._books.claim
        if claim is None or claim.session == s.id or s.entry is None:
            return {}
        head = self._books.sessions[claim.session].entry
        return claim.wanted if head is not None and head < s.entry else {}

    def _claim_for(self, head: Session) -> None:
        books = self._books
        if head.head_since is None:
            head.head_since = books.now
        old = books.claim if books.claim is not None and books.claim.session == head.id else None
        claim = old
        if claim is None or books.recheck_head or claim.next_at <= books.now:
            claim = make_claim(books, head, old)
            if claim != books.claim:
                books.set_claim(claim)
        for victim in accumulates(books, claim):
            books.suspend(victim, "the next kernel in the queue waits for memory")

    # ------------------------------------------------------------------ growth

    def _grow(self, gained: dict[str, DeviceLedger]) -> None:
        for ledger in gained.values():
            for s in list(ledger.growers.values()):
                self.grow(s)

    def grow(self, s: Session) -> bool:
        """Give an attached session what it asks for beyond what it has; tell whether it has it."""
        books = self._books
        if s.plan is not None or s.state not in ("active", "idle"):
            return False
        plan = plan_growth(books, s)
        if books.grown and not _ready(plan) and reclaim(books):
            plan = plan_growth(books, s)
        if isinstance(plan, Blocked):
            return False
        if plan.ready:
            self._commit(s, plan)
            return True
        books.begin_plan(s, plan)
        return False


def _ready(plan: Plan | Blocked) -> bool:
    return isinstance(plan, Plan) and plan.ready


def _turn(s: Session) -> tuple[int, Entry]:
    """Return the order in which plans are carried out: growth of leases, then the queue."""
    return (0, (0.0, 0.0, 0, 0, s.id)) if s.entry is None else (1, s.entry)
