# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What people ask of a session: another size, release, keep; and what its measured size means."""

from __future__ import annotations

from ..units import format_bytes, format_seconds
from . import events as ev
from . import growth
from .books import Books
from .growth import SETTLE, trim
from .lease import ATTACHED, HAS_LEASE, Session
from .model import MiB, Refusal, Request
from .placement import needs_of
from .policy import Blocked, plan_growth
from .quota import check_form, never, never_there
from .serve import Server
from .wording import explain, stays_reason
from .yielding import empty, suspendable, timeout_at


class Requests:
    """Answers what people ask of one session."""

    def __init__(self, books: Books, server: Server) -> None:
        self._books = books
        self._server = server

    # ------------------------------------------------------------------ can it be met?

    def capacities(self) -> list[int]:
        """Return what each device can give at most, largest first."""
        devices = self._books.inventory.devices.values()
        return sorted((d.capacity for d in devices if d.capacity), reverse=True)

    def suspends(self) -> bool:
        """Return whether any device can suspend."""
        return any(d.device.can_suspend for d in self._books.inventory.devices.values())

    def never(self, request: Request, s: Session) -> Refusal | None:
        """Return why ``request`` of session ``s`` can never be met, or None."""
        return never(
            request, s.owner, self._books.settings, self.capacities(), suspends=self.suspends()
        ) or self._never_there(request, s)

    def _never_there(self, request: Request, s: Session) -> Refusal | None:
        """Return why no device that the processes of ``s`` can use will ever do, or None.

        Without a lease: what is attached or suspended stays with the device of its state.
        """
        inventory = self._books.inventory
        if s.slices or s.suspended or not all(uuid in inventory.devices for uuid in s.bound):
            return None
        needs = needs_of(s, inventory, self._books.settings)
        for need in needs:
            if need.model is None and not need.fixed:
                continue
            fit = sorted(
                d.capacity
                for d in inventory.devices.values()
                if need.fixed == d.device.uuid or need.model == d.device.model
            )
            count = sum((n.fixed, n.model) == (need.fixed, need.model) for n in needs)
            if len(fit) >= count and 0 < fit[-count] < request.memory:
                model = inventory.devices[need.fixed].device.model if need.fixed else need.model
                return never_there(request, str(model), fit[-count], count, fixed=bool(need.fixed))
        return None

    def _session(self, name: str, rid: str) -> Session | None:
        s = self._books.sessions.get(name)
        if s is not None and s.state != "ended":
            return s
        refusal = Refusal(
            "unknown-session",
            f"There is no session {name}.",
            "Run `jupyter gpupool status` to see those that there are.",
            {"session": name},
        )
        self._books.emit(ev.Answer(session=name, rid=rid, refusal=refusal))
        return None

    def _answer(self, s: Session, rid: str, note: str) -> None:
        self._books.emit(ev.Answer(session=s.id, rid=rid, note=note))

    def _refuse(self, s: Session, rid: str, refusal: Refusal) -> None:
        self._books.emit(ev.Answer(session=s.id, rid=rid, refusal=refusal))

    # ------------------------------------------------------------------ another size

    def changed(self, event: ev.RequestChanged) -> None:
        s = self._session(event.session, event.rid)
        if s is None:
            return
        new = event.request
        refusal = (
            check_form(new, self._books.settings)
            or self.never(new, s)
            or self._bound(s, new)
            or self._in_use(s, new)
        )
        if refusal is not None:
            self._refuse(s, event.rid, refusal)
            return
        old, s.request = s.request, new
        books = self._books
        books.note_grown(s)
        if s.state in ATTACHED:
            note = self._resize(s, old)
        elif s.state == "queued":
            books.requeue(s)
            note = "The kernel waits for the new size."
        elif s.state in HAS_LEASE:
            note = "It applies as soon as the change under way is done."
        else:
            note = "It applies when the kernel next gets its slice."
        if new.limit > new.memory and new.limit != old.limit:
            note += (
                f" It may grow to {format_bytes(new.limit)} while that much is free; "
                f"{format_bytes(new.memory)} are guaranteed."
            )
        self._answer(s, event.rid, note)

    def _bound(self, s: Session, new: Request) -> Refusal | None:
        """Return why the number of devices can not change, or None."""
        here = len(s.suspended) or len(s.slices) or len(s.bound) or s.request.devices
        if new.devices in (here, s.request.devices):
            return None
        if not (s.suspended or s.bound or (s.slices and not empty(s))):
            return None
        return Refusal(
            "devices-bound",
            f"{new.devices} GPUs were asked for; this kernel has begun to use CUDA on {here}, and "
            "a process can not change that.",
            "Restart the kernel and ask before the first use of the GPU.",
            {"devices": new.devices, "bound": here},
        )

    def _in_use(self, s: Session, new: Request) -> Refusal | None:
        """Return why the lease can not shrink that far, or None.

        What counts is the device where the kernel uses the most, for it asks for the same on each.
        """
        sizes = s.restored | s.footprints | {x.device: x.bytes for x in s.suspended}
        used = max(sizes.values(), default=0)
        for name, wanted, had in (
            ("memory", new.memory, s.request.memory),
            ("limit", new.limit, s.request.limit),
        ):
            if wanted < had and wanted < used:
                what = "A limit of " if name == "limit" else ""
                return Refusal(
                    "in-use",
                    f"{what}{format_bytes(wanted)} was asked for; the kernel uses "
                    f"{_not_less(used)} now.",
                    f"Free memory first, or ask for at least {_not_less(used)}.",
                    {"memory": new.memory, name: wanted, "in_use": used},
                )
        return None

    def _resize(self, s: Session, old: Request) -> str:
        books = self._books
        memory = s.request.memory
        books.drop_plan(s)
        if s.request.devices != len(s.slices):
            trim(books, s, reclaim=True)
            return "It applies at the next attach: release the slice first (%gpu release)."
        if memory <= old.memory or all(x.bytes >= memory for x in s.slices):
            if memory < old.memory or s.request.limit < old.limit:
                trim(books, s, reclaim=True)
            limit = s.request.limit
            if all(x.bytes <= max(limit, s.footprints.get(x.device, 0)) for x in s.slices):
                return f"The slice is {format_bytes(s.slices[0].bytes)} now."
            return "It applies once the memory in use has been measured."
        books.grow_later(s)
        if self._server.grow(s):
            return f"The slice is {format_bytes(s.slices[0].bytes)} now."
        have = format_bytes(s.slices[0].bytes)
        if s.plan is not None:
            return f"The slice stays {have} until idle kernels have made room."
        plan = plan_growth(books, s)
        if isinstance(plan, Blocked) and plan.why[0] == "quota":
            code, name, limit, used, kernels = plan.why
            why = explain(books, (code, name, limit, used, kernels - 1))  # not counting itself
            return f"The slice stays {have}: {why}. It grows as soon as it is not."
        return (
            f"The slice stays {have}: there is no more on this GPU now. It grows as soon as "
            "memory comes free."
        )

    # ------------------------------------------------------------------ more than guaranteed

    def grow(self, event: ev.GrowAsked) -> None:
        s = self._session(event.session, event.rid)
        if s is None:
            return
        if s.growing:
            # What it was promised of its own guarantee must not be kept from it.
            self._books.drop_plan(s)
        refusal = growth.answer(self._books, s, event)
        if s.growing:
            self._server.grow(s)
        if refusal is not None:
            self._refuse(s, event.rid, refusal)
            return
        held = self._books.inventory[event.device].leases[s.id]
        self._answer(s, event.rid, f"The slice is {format_bytes(held)} now.")

    def measured(self, s: Session, device: str, size: int) -> int:
        """Take note of what ``s`` was seen to use; return the bytes that no grant covers."""
        books = self._books
        held = books.inventory[device].leases.get(s.id, 0)
        if s.state not in ATTACHED:
            if s.suspended or s.state != "detached" or books.now < s.state_since + SETTLE:
                # Older than the suspend (or resume) that it would contradict.
                return 0
            return size
        before, bound = s.footprints.get(device, -1), s.state_bound
        fresh = s.state == "active" or s.sampled_at >= s.idle_since
        plain = size <= held <= s.request.memory
        if before == size and plain and fresh and (s.bound or not size):
            # Nothing new, as nearly always.
            s.sampled_at = books.now
            return 0
        s.footprints[device] = size
        before = max(before, 0)
        s.footprint += size - before
        if held:
            s.sampled_at = books.now
            if size:
                s.bound = tuple(x.device for x in s.slices)
        if held and (size > held or held > s.request.memory):
            growth.measured(books, s, books.inventory[device], size, before)
            held = books.inventory[device].leases[s.id]
        elif size > before:
            s.rose_at = books.now
        if size > held >= before:
            books.log(
                s.id,
                "warning",
                "overuse",
                f"It uses {format_bytes(size)} of a slice of {format_bytes(held)} on {device}.",
            )
        if s.state == "idle":
            books.offer(s)
            if s.state_bound < bound:
                # It may fit in host memory now.
                books.quotas.eased = True
                books.quotas.note(s.owner.name)
        return max(0, size - held)

    # ------------------------------------------------------------------ release and keep

    def release(self, event: ev.ReleaseAsked) -> None:
        s = self._session(event.session, event.rid)
        if s is None:
            return
        books = self._books
        if s.state == "queued":
            refusal = Refusal(
                "nothing-to-release",
                "The kernel waits for a slice and has none.",
                "Interrupt the cell to stop waiting.",
            )
            self._refuse(s, event.rid, refusal)
            return
        if s.state == "detached":
            self._answer(s, event.rid, "The kernel has no slice.")
            return
        if s.state == "detaching":
            self._answer(s, event.rid, "The slice is on its way back already.")
            return
        if not suspendable(s, books) and (s.state == "idle" or s.footprint):
            name = books.inventory[s.slices[0].device].device.name
            refusal = Refusal(
                "cannot-suspend",
                f"The state of this kernel can not be moved off its GPU ({name}).",
                "Free the memory in the kernel, or restart it, to give the slice back.",
            )
            self._refuse(s, event.rid, refusal)
            return
        s.release_asked = True
        s.keep_until = 0.0
        if s.state != "idle":
            cell = any(h.kind != "device" for h in s.holds.values())
            when = "the running cell is done" if cell else "its work on the GPU is done"
            self._answer(s, event.rid, f"The slice goes back when {when}.")
            return
        if timeout_at(s, books) > books.now:
            books.offer(s)
            if s.pressed or (s.id in books.roomless and not s.pinned_reason):
                self._answer(s, event.rid, stays_reason(books, s, books.now))
                return
            why = s.pinned_reason or "the last try was refused"
            left = format_seconds(timeout_at(s, books) - books.now)
            self._answer(s, event.rid, f"The slice can not be moved now ({why}); again in {left}.")
        elif self._server.expire(s):
            self._answer(s, event.rid, "The slice goes back to the pool.")
        else:
            books.offer(s)
            full = (
                "There is no room for its state in host memory; the slice goes back once there is."
            )
            self._answer(s, event.rid, stays_reason(books, s, books.now) or full)

    def keep(self, event: ev.KeepAsked) -> None:
        s = self._session(event.session, event.rid)
        if s is None:
            return
        books = self._books
        s.keep_until = event.until
        s.release_asked = False
        left = event.until - books.now
        if s.state == "idle":
            if left > 0:
                books.leaving.pop(s.id, None)
            books.offer(s)
        if left <= 0:
            note = "The slice is not kept any longer when idle."
        elif s.state in HAS_LEASE:
            note = f"The slice stays for {format_seconds(left)}, even when idle."
        else:
            note = f"Its next slice stays for {format_seconds(left)} from now, even when idle."
        self._answer(s, event.rid, note)


def _not_less(size: int) -> str:
    """Return ``size`` for people, rounded up: whoever asks for that much has enough."""
    return f"{-(-size // MiB)} MiB" if size >= MiB else format_bytes(size)
