# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Takes devices out of service for an admin, and puts them back into service.

``pause`` is for work on the driver or on a device: the broker suspends each session that it can
suspend, and then its own child processes close the device files. ``drain`` empties one device, and
the pool goes on using the driver. Both orders last until ``resume``, and survive a restart of the
broker. A broker that starts while the whole pool is paused does not touch the driver.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from dataclasses import asdict, dataclass, replace
from typing import Any, Awaitable, Iterable, Literal, Sequence

from ... import procfs
from ...deadlines import within
from ...devices import Devices, FileHolder
from ...errors import Code, GPUPoolError, RefusedError
from ...pool import events as e
from ...pool.model import Device, SessionRecord
from ...procfs import session_of
from ...protocol import Message
from ...states import MOVING
from ..configuration import Configuration
from ..core import Core
from ..sessions import LiveSession
from ..store.journal import Journal
from ..store.records import devices_to_text
from ..transport.auth import Peer, owner_of
from ..transport.connection import Connection
from .health import Health
from .monitor import ENVIRON_TIMEOUT
from .setaside import UnleasedSuspends

#: The most characters of a reason.
MAX_REASON = 200

OrderKind = Literal["pause", "drain"]

#: The key of the orders in the journal's metadata.
_META = "maintenance"

#: POLL: seconds between two checks of unfinished orders. SCAN: between two searches of /proc.
POLL, SCAN = 0.2, 1.0

#: Stands for the broker and its children where other processes have the name of a session.
_OWN = "broker"

_WORDS = {"pause": "paused", "drain": "drained"}


@dataclass(frozen=True, slots=True)
class Order:
    """An admin's order to pause or drain; ``device`` is "" for the whole pool."""

    kind: OrderKind
    device: str
    reason: str
    by: str
    since: float
    #: Whether the order is carried out: no lease is left and, for a pause, no device file is open.
    closed: bool = False

    @property
    def text(self) -> str:
        """The reason why sessions wait, as text for people."""
        why = f": {self.reason}" if self.reason else ""
        return f"{_WORDS[self.kind]} by the administrator{why}"


def stored(journal: Journal) -> dict[str, Order]:
    """Return the orders that the journal has, by device."""
    try:
        orders = [Order(**row) for row in json.loads(journal.meta(_META) or "[]")]
    except (TypeError, ValueError):
        return {}
    return {order.device: order for order in orders}


def untouchable(journal: Journal) -> str:
    """Return why a broker that starts now must not touch the driver; "" if it may."""
    order = stored(journal).get("")
    return order.text if order is not None and order.closed else ""


class Maintenance:
    """Carries out ``pause``, ``drain``, ``resume`` and ``retest``."""

    def __init__(
        self,
        core: Core,
        service: Devices,
        configuration: Configuration,
        *,
        health: Health,
        aside: UnleasedSuspends,
        log: logging.Logger,
    ) -> None:
        self._core = core
        self._service = service
        self._configuration = configuration
        self._health = health
        self._aside = aside
        self._log = log
        self._orders = stored(core.journal)
        #: By the device of a pause: the processes that had device files open at the last search,
        #: each with its session, and the number of processes that the broker could not check.
        self._left: dict[str, list[tuple[FileHolder, str]]] = {}
        self._unseen: dict[str, int] = {}
        self._own = procfs.identify(os.getpid())
        #: By the device of an order with no lease left: what the order waits for, as text.
        self._step: dict[str, str] = {}
        #: The sessions whose users the broker has asked to restart their kernel. Each entry has the
        #: order's device, the order's time, and the session.
        self._told: set[tuple[str, float, str]] = set()
        self._busy = asyncio.Lock()
        self._work: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """Put the orders into force that an earlier broker wrote to the journal."""
        for device, order in self._orders.items():
            if order.kind == "pause" and device and not self._service.down:
                # This broker has opened all device files to find the devices, so the pause is not
                # complete now.
                self._orders[device] = replace(order, closed=False)
        for order in self._orders.values():
            self._log.warning("%s", self._sentence(order))
            self._shut(order)

    def close(self) -> None:
        """Stop working; the orders stay in the journal."""
        self._aside.close()
        for task in (self._work, *self._tasks):
            if task is not None:
                task.cancel()

    # ------------------------------------------------------------------ what an admin asks

    def maintain(self, connection: Connection, message: Message) -> None:
        """Answer a ``maintain`` request."""
        peer = connection.peer
        if not self._configuration.access.is_admin(peer):
            raise RefusedError(
                "Only an admin of this pool may take its GPUs out of service.",
                code=Code.NOT_ALLOWED,
                next_step="Ask root, or one of c.GPUPool.admins.",
            )
        action = message["action"]
        device = self._device(str(message.get("device") or ""))
        if action in ("pause", "drain"):
            reason = str(message.get("reason") or "").strip()[:MAX_REASON]
            note = self._order(action, device, reason, owner_of(peer.uid).name)
            connection.answer(message.get("id"), {"note": note, "device": device})
        elif action in ("resume", "retest"):
            method = self._resume if action == "resume" else self._retest
            self._answer_later(connection, message, method(device))
        else:
            raise RefusedError(
                f"There is no maintenance action {action[:40]!r}; the actions are pause, drain, "
                "resume and retest.",
                code=Code.BAD_REQUEST,
            )

    def _device(self, name: str) -> str:
        """Return the UUID of the device that an admin names; "" for all devices.

        The name is the device's number, or the first characters of its UUID.
        """
        if not name:
            return ""
        found = [
            d for d in self._health.devices.values()
            if name == str(d.index) or d.uuid.startswith(name)
        ]  # fmt: skip
        if len({d.uuid for d in found}) == 1:
            return found[0].uuid
        there = ", ".join(f"{d.index} ({d.uuid})" for d in self._health.devices.values())
        what = "names several GPUs" if found else "is no GPU of this pool"
        raise RefusedError(
            f"{name[:60]!r} {what}. The pool has: {there or 'none'}.", code=Code.UNKNOWN_DEVICE
        )

    def _order(self, kind: OrderKind, device: str, reason: str, by: str) -> str:
        if kind == "drain" and not device:
            raise RefusedError(
                "A drain order is for one GPU.",
                code=Code.BAD_REQUEST,
                next_step="Name the GPU with --device, or pause the whole pool.",
            )
        old = self._orders.get(device)
        order = Order(
            kind, device, reason, by, self._core.now(),
            closed=old is not None and old.kind == kind and old.closed,
        )  # fmt: skip
        self._orders[device] = order
        self._core.note(kind, device=device or None, reason=reason, detail={"by": order.by})
        self._log.warning("%s", self._sentence(order))
        self._save()
        self._shut(order)
        self.go_on()
        return self._sentence(order)

    def drain_all(self, reason: str, by: str) -> None:
        """Drain each GPU that has no order of its own. An order for the whole pool stays."""
        for uuid in [uuid for uuid in self._health.devices if uuid not in self._orders]:
            self._order("drain", uuid, reason, by)

    def undrain(self, reason: str) -> None:
        """End the drain orders with this reason, and put their devices back into service."""
        ended = [o for o in self._orders.values() if (o.kind, o.reason) == ("drain", reason)]
        for order in ended:
            del self._orders[order.device]
            self._core.note("unpause", device=order.device)
        self._save()
        for order in ended:
            self._open(order)

    async def _resume(self, device: str) -> str:
        async with self._busy:
            ended = self._ending(device)
            if not ended:
                raise RefusedError("Nothing is paused or drained.", code=Code.NOT_PAUSED)
            found: Sequence[Device] = ()
            if self._service.down or any(self._stood_down(order) for order in ended):
                found = await self._service.renew([device] if device else None)
            self._core.note("unpause", device=device or None)
            if found:
                if self._service.hazard:
                    self._log.warning("%s", self._service.hazard)
                self._core.journal.remember("devices", devices_to_text(found))
                self._exchange(found)
            for order in ended:
                if self._orders.get(order.device) is order:
                    del self._orders[order.device]
                self._left.pop(order.device, None)
                self._step.pop(order.device, None)
                self._aside.forget((order.device, order.since))
            self._save()
            if not device:
                await self._aside.resume()
            for order in ended:
                self._open(order)
        gone = [d for d in self._health.failed if d in self._health.devices]
        note = "The GPUs are in service again." if not device else "The GPU is in service again."
        if gone:
            note += " Out of service: " + " ".join(
                f"GPU {self._health.devices[u].index}: {self._health.failed[u]}" for u in gone
            )
        self._log.warning("%s", note)
        return note

    def _stood_down(self, order: Order) -> bool:
        """Return whether this broker, or an earlier broker, has ended its children for an order."""
        pause = order.kind == "pause" and order.closed
        return pause or self._service.is_aside(order.device)

    def _ending(self, device: str) -> list[Order]:
        if not device:
            return [*self._orders.values()]
        if "" in self._orders:
            raise RefusedError(
                "The whole pool is paused.",
                code=Code.PAUSED,
                next_step="Resume the whole pool: leave out --device.",
            )
        return [self._orders[device]] if device in self._orders else []

    def _exchange(self, found: Iterable[Device]) -> None:
        """After a pause, store the devices in ``found``, which the driver lists now.

        A device that is not in ``found`` goes out of service. A device that was out of service
        comes back only if ``renew`` has just tested it and it can suspend.
        """
        there = {device.uuid: device for device in found}
        for uuid in [uuid for uuid in self._health.devices if uuid not in there]:
            self._health.bad(
                uuid,
                "the driver did not list this GPU after a pause. When nvidia-smi -L lists the GPU "
                "again, pause and then resume the whole pool",
            )
        for uuid, device in there.items():
            passed = uuid in self._service.renewed and device.can_suspend
            if uuid not in self._health.failed or passed:
                self._health.add(device)

    async def _retest(self, device: str) -> str:
        chosen = [u for u in self._health.failed if u in self._health.devices]
        chosen = [uuid for uuid in chosen if device in ("", uuid)]
        if not chosen:
            return "No GPU is out of service because of a failure."
        lines = []
        for uuid in chosen:
            name = f"GPU {self._index(uuid)}"
            why = await self._health.retest(uuid)
            lines.append(f"{name} stays out of service: {why}" if why else f"{name} is back.")
        return " ".join(lines)

    def _answer_later(self, connection: Connection, message: Message, work: Awaitable[str]) -> None:
        async def answer() -> None:
            try:
                note = await work
            except GPUPoolError as error:
                connection.refuse(message.get("id"), error)
            except Exception as error:  # the admin waits for an answer
                self._log.exception("An order of the administrator failed")
                connection.refuse(
                    message.get("id"),
                    RefusedError(f"The order failed: {error!r}.", code=Code.INTERNAL),
                )
            else:
                connection.answer(message.get("id"), {"note": note})

        task = asyncio.get_running_loop().create_task(answer())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------------ the pool

    def _targets(self, order: Order) -> list[str]:
        return [order.device] if order.device else [*self._health.devices]

    def _shut(self, order: Order) -> None:
        for uuid in self._targets(order):
            whole = self._orders.get("", order)
            self._core.handle(e.DevicePaused(now=self._core.now(), device=uuid, reason=whole.text))

    def _open(self, order: Order) -> None:
        for uuid in self._targets(order):
            left = self._orders.get("") or self._orders.get(uuid)
            now = self._core.now()
            if left is not None:
                self._core.handle(e.DevicePaused(now=now, device=uuid, reason=left.text))
            else:
                self._core.handle(e.DeviceResumed(now=now, device=uuid))

    def _save(self) -> None:
        rows = [asdict(order) for order in self._orders.values()]
        self._core.journal.remember(_META, json.dumps(rows))
        self._core.commit()

    # ------------------------------------------------------------------ until an order is carried
    # out

    def go_on(self) -> None:
        """Work on the unfinished orders in a new task.

        Call this when the broker knows all sessions that have a lease.
        """
        if self._work is None or self._work.done():
            self._work = asyncio.get_running_loop().create_task(self._until_closed())

    async def _until_closed(self) -> None:
        scanned = float("-inf")
        loop = asyncio.get_running_loop()
        while any(not order.closed for order in self._orders.values()):
            try:
                scanned = await self._look(scanned, loop.time())
            except (OSError, GPUPoolError) as error:
                # For example, no descriptor is free to list /proc, or a child process does not end.
                for device in self._step:
                    self._step[device] = f"another try, because the last one failed: {error}"
                self._log.error(
                    "A step of the pause failed, and the broker tries it again: %s", error
                )
            await asyncio.sleep(POLL)

    async def _look(self, scanned: float, now: float) -> float:
        """Work once on each unfinished order; return the time of the last search of /proc."""
        due = now >= scanned + SCAN
        async with self._busy:
            for order in [o for o in self._orders.values() if not o.closed]:
                self._tell(order)
                if self._holding(order):
                    continue
                if order.kind == "pause":
                    if not self._stood_aside(order):
                        self._step[order.device] = (
                            "the suspend of kernels that have only called cuInit"
                        )
                        await self._aside.suspend(self._targets(order), (order.device, order.since))
                        if self._holding(order):
                            continue
                    if not self._stood_aside(order):
                        self._step[order.device] = (
                            "the broker's own processes to finish their work and close the device "
                            "files"
                        )
                    await self._stand_down(order)
                    if not self._left.get(order.device):
                        self._step[order.device] = "a search for processes with open device files"
                    if not due:
                        continue
                    scanned = now
                    if await self._open_files(order):
                        # ``status`` names the processes with open files, so show no step.
                        self._step.pop(order.device, None)
                        self._tell_holders(order)
                        continue
                self._done(order)
        return scanned

    def _done(self, order: Order) -> None:
        self._step.pop(order.device, None)
        if self._orders.get(order.device) is order:
            self._orders[order.device] = replace(order, closed=True)
            self._log.warning("%s", self._sentence(self._orders[order.device]))
            self._core.note(_WORDS[order.kind], device=order.device or None, reason=order.reason)
            self._save()

    def _stood_aside(self, order: Order) -> bool:
        """Return whether the broker's child processes for the order's devices have ended."""
        return bool(self._service.down) or self._service.is_aside(order.device)

    async def _stand_down(self, order: Order) -> None:
        if order.device:
            await self._service.stand_down(order.text, [order.device])
        elif not self._service.down:
            await self._service.stand_down(order.text)

    def _holding(self, order: Order) -> list[tuple[LiveSession, SessionRecord]]:
        """Return the sessions that have a lease on the devices of ``order``."""
        targets = {*self._targets(order)}
        found = []
        for name in self._core.busy:
            record, session = self._core.record(name), self._core.sessions.find(name)
            if record and session and any(x.device in targets for x in record.slices):
                found.append((session, record))
        return found

    async def _open_files(self, order: Order) -> bool:
        """Return whether a process of this pool has the device's file open (no device: any file).

        It stores in ``_left`` all processes with such a file open, even those outside the pool.
        """
        if order.device and not self._service.has_file(order.device):
            return False  # a MIG instance shares its GPU's file with other instances
        look = asyncio.to_thread(self._service.holders, order.device)
        found, self._unseen[order.device] = await look
        left = [(holder, await self._whose(holder)) for holder in found]
        self._left[order.device] = left
        return any(whose for _, whose in left)

    async def _whose(self, holder: FileHolder) -> str:
        """Return a process's session, "broker" for this broker or a child of it, or ""."""
        sessions, pid = self._core.sessions, holder.process.pid
        for session in sessions:
            if session.process and procfs.descends(pid, session.process):
                return session.id
        if self._own is not None and procfs.descends(pid, self._own):
            return _OWN
        try:
            named = await within(asyncio.to_thread(session_of, pid), ENVIRON_TIMEOUT)
        except asyncio.TimeoutError:
            return ""
        found = sessions.find(named) if named else None
        return found.id if found is not None and found.may_have(pid) else ""

    def _tell(self, order: Order) -> None:
        """Ask the user of each session that cannot be suspended, once, to restart the kernel."""
        for session, record in self._holding(order):
            why = self._pinned(session, record)
            if why:
                self._ask_to_restart(
                    order,
                    session,
                    f"The GPU state of this kernel cannot be moved to host memory "
                    f"({why.rstrip('.')})",
                )

    def _tell_holders(self, order: Order) -> None:
        """Ask the user of each session with a device file open, once, to restart the kernel."""
        why = (
            f"This kernel has opened the device file of GPU {self._index(order.device)}, so it "
            "keeps that GPU in use"
            if order.device
            else "This kernel has initialised CUDA, but has no GPU memory that the pool could "
            "move. Only a restart makes the kernel stop using the driver"
        )
        for _, whose in self._left[order.device]:
            session = self._core.sessions.find(whose)
            if session is not None:
                self._ask_to_restart(order, session, why)

    def _ask_to_restart(self, order: Order, session: LiveSession, why: str) -> None:
        key = (order.device, order.since, session.id)
        if key in self._told or session.agent is None:
            return
        self._told.add(key)
        what = f"GPU {self._index(order.device)} is" if order.device else "The GPUs are"
        session.send(
            {
                "type": "notice",
                "message": f"{what} being {order.text}. {why}. Save your work and restart this "
                "kernel: the maintenance waits for the restart.",
            }
        )
        self._core.note("restart-notice", session, reason=why)

    def _pinned(self, session: LiveSession, record: SessionRecord) -> str:
        why = record.pinned_reason or session.use.pins
        if why:
            return why
        for piece in record.slices:
            device = self._health.devices.get(piece.device)
            if device is not None and not device.can_suspend:
                return device.tier_reason or "this GPU cannot suspend"
        return ""

    # ------------------------------------------------------------------ for people

    def _sentence(self, order: Order) -> str:
        what = "The pool" if not order.device else f"GPU {self._index(order.device)}"
        if order.closed:
            done = {
                "pause": "no process of the pool has a device file open"
                if not order.device
                else "no kernel has a slice there"
                if not self._service.has_file(order.device)
                else "no process of the pool has this GPU's device file open",
                "drain": "no kernel has a slice there",
            }[order.kind]
            return f"{what} is {order.text}; {done}."
        return f"{what} is being {order.text}."

    def _index(self, uuid: str) -> str:
        device = self._health.devices.get(uuid)
        return uuid if device is None else str(device.index)

    def status(self, peer: Peer) -> list[dict[str, Any]]:
        """Return the orders in force, and what each order still waits for.

        The result contains only what ``peer`` may see.
        """
        access = self._configuration.access
        found = []
        for order in self._orders.values():
            waits = self._waits(order) if not order.closed else []
            shown = [
                {**row, "session": session.id, "label": record.label, "owner": record.owner.name}
                for session, record, row in waits
                if access.may_act(peer, session.uid)
            ]
            row = {
                **asdict(order),
                "text": self._sentence(order),
                "waits": shown,
                "others": len(waits) - len(shown),
                "step": "" if order.closed or waits else self._doing(order),
            }
            if access.is_admin(peer) and order.kind == "pause":
                row["files"] = [self._file(*each) for each in self._left.get(order.device, ())]
                row["unseen"] = self._unseen.get(order.device, 0)
            found.append(row)
        return found

    def _doing(self, order: Order) -> str:
        """Return what ``order`` waits for after the last session has left the order's devices."""
        if order.device in self._step:
            return self._step[order.device]
        return "" if self._left.get(order.device) else "the pool to check which processes use a GPU"

    def _waits(self, order: Order) -> list[tuple[LiveSession, SessionRecord, dict[str, Any]]]:
        holding = self._holding(order)
        if not holding:
            return []
        stays = {
            view.record.id: view.stays_reason
            for view in self._core.pool.view(self._core.now()).sessions
        }
        found = []
        for session, record in holding:
            pinned = self._pinned(session, record)
            if pinned:
                why = f"cannot be suspended: {pinned.rstrip('.')}. Restart or end it."
            elif record.state == "active":
                what = {hold.kind for hold in record.holds}
                why = "a cell runs" if what - {"device"} else "it uses its GPU"
            elif record.state in MOVING:
                why = "its state is being moved"
            else:
                why = stays.get(session.id) or "the pool soon asks it for its slice again"
            devices = [self._index(piece.device) for piece in record.slices]
            found.append(
                (session, record, {"devices": devices, "why": why, "pinned": bool(pinned)})
            )
        return found

    @staticmethod
    def _file(holder: FileHolder, whose: str) -> dict[str, Any]:
        return {
            "pid": holder.process.pid,
            "uid": holder.uid,
            "command": holder.command,
            "session": whose or None,
        }
