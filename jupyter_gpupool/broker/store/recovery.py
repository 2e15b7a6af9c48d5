# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Rebuild the pool of a killed broker from the journal and the driver's state.

The journal names the actions that had begun. The driver shows how far each of them came:

===========  ==============  ======================================================================
journal      driver          result
===========  ==============  ======================================================================
any          process gone    closed
opened       no process yet  detached; then its server names the process, or the session is closed
queued       any             detached; its agent asks again
attaching    none            detached: nothing had been done
attaching    checkpointed    detached, still suspended
attaching    running         attached if it had suspended state: the restore had succeeded;
                             otherwise detached
active/idle  running, none   attached
active/idle  checkpointed    detached and suspended: something outside the pool did it
detaching    running, none   attached: the suspend had not begun, or was undone
detaching    checkpointed    detached and suspended: it had succeeded
any          locked          unlocked, then as running
any          failed          lost: the broker tells the user and ends the session
any          hung            as the journal says (most likely stopped by SIGSTOP)
any          no answer       as the journal says: an unknown state must not end a kernel
===========  ==============  ======================================================================

If living kernels have state on devices, and a broker finds none of these devices, the broker does
not start (:func:`check_reach`). Either it was started with other options, or the driver is broken.
The broker does not count these kernels as lost, because this would solve neither problem.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Collection, Literal, Mapping

from ...devices import Devices
from ...errors import Code, DriverError, GPUPoolError
from ...local_machine import boot_id
from ...pool import events as e
from ...pool.model import Hold, SessionRecord, Slice
from ...procfs import alive
from ...states import ATTACHED
from ..core import Core
from ..gpu.actions import DeviceActions
from ..gpu.health import SuddenEnds
from ..gpu.landing_recovery import LandingRecovery
from ..lifecycle import GRACE, Lifecycle
from ..messages.guard import GuardMessages
from ..pages.activity import DEVICE_HOLD, Activity
from ..pages.control import ControlPages
from ..sessions import LiveSession
from .records import from_json, frozen_in, read_session
from .usage import UsageBook

#: The hold of a recovered session until its agent has reconnected. It replaces the agent's own
#: holds, so that the pool does not take the slice. The hold ends after GRACE seconds; with the
#: attach policy ``lazy``, it ends after only GRACE_LAZY seconds. With this policy, the guard shows
#: when a session uses its device, and the pool then leaves the slice to the session. So this hold
#: protects only a cell that does not use its device at the moment.
RECOVERED_HOLD = "recovered"
GRACE_LAZY = 2.0


@dataclass
class RecoveredSession:
    """A session to recover. If it cannot be recovered, ``lost`` says why."""

    session: LiveSession
    record: SessionRecord
    lost: str = ""
    #: The time at which the session became idle with its slice, from the journal; 0.0 if the
    #: session was not idle.
    idle_since: float = 0.0
    #: Whether the session was active, and its only hold was the hold for its CUDA activity.
    computed: bool = False

    def at_rest(self, since: float = 0.0) -> None:
        """Mark the session as idle since ``since``, or since the journal's time if this is 0.

        The session has no hold then: the pool may take its slice before its agent reconnects.
        """
        idle_since = since or self.idle_since
        self.record = replace(self.record, state="idle", holds=(), idle_since=idle_since)

    def in_use(self, now: float) -> None:
        """Give the session only the hold for its CUDA activity, which it had in the journal."""
        self.record = replace(self.record, holds=(Hold(DEVICE_HOLD, "device", now),))


class OutOfReach(GPUPoolError):
    """Living kernels have state on devices, and this broker has none of these devices."""

    code = Code.OUT_OF_REACH


def check_reach(
    stored: Mapping[str, Mapping[str, Any]], found: Collection[str], problem: str, was: str
) -> None:
    """Refuse to recover sessions whose devices are all missing.

    Parameters
    ----------
    stored:
        The journal's records of this boot.
    found:
        UUIDs of the devices that this broker finds.
    problem:
        Why this broker finds no devices; empty if it finds any.
    was:
        ``c.GPUPool.emulate`` of the previous broker.

    Raises
    ------
    OutOfReach
        If the kernels of such sessions live. Nothing was changed.
    """
    pids: list[int] = []
    places: set[str] = set()
    for entry in stored.values():
        try:
            record = from_json(entry["record"])
            session = read_session(record, entry)
        except (KeyError, TypeError, ValueError):
            continue  # the session cannot be recovered in any case
        there = {*record.bound, *(piece.device for piece in (*record.slices, *record.suspended))}
        if there and session.process is not None and alive(session.process):
            pids.append(session.process.pid)
            places |= there
    if not pids or not places.isdisjoint(found):
        return
    # Use only the first sentence of the problem. The others may give advice about a missing driver.
    why = problem.partition(". ")[0].rstrip(".") or "The devices of the machine have changed"
    many, it, them = "a kernel", "it", "the kernel: process"
    if len(pids) > 1:
        many, it, them = f"{len(pids)} kernels", "they", "the kernels: processes"
    driver = f"on c.GPUPool.emulate = {was!r}" if was else "on the machine's NVIDIA driver"
    raise OutOfReach(
        f"This broker cannot reach the GPUs of {many} of the previous broker, so {it} would be "
        f"lost. {why}. Nothing was changed.",
        next_step=f"The previous broker ran {driver}. Start this broker with the same options (a "
        "new Pooled GPU kernel of the same server does that), repair the driver, or end "
        f"{them} {', '.join(map(str, sorted(pids)))}.",
    )


class Recovery:
    """Recovers the sessions of the previous broker.

    ``alone_since`` is the monotonic time since which no other broker has used these sessions.
    """

    def __init__(
        self,
        core: Core,
        service: Devices,
        *,
        pages: ControlPages,
        activity: Activity,
        guard: GuardMessages,
        landings: LandingRecovery,
        lifecycle: Lifecycle,
        actions: DeviceActions,
        sudden_ends: SuddenEnds,
        usage: UsageBook,
        alone_since: float,
        log: logging.Logger,
    ) -> None:
        self._core = core
        self._service = service
        self._pages = pages
        self._activity = activity
        self._guard = guard
        self._landings = landings
        self._lifecycle = lifecycle
        self._actions = actions
        self._sudden_ends = sudden_ends
        self._usage = usage
        self._alone_since = alone_since
        self._log = log

    async def run(self, socket: str) -> None:
        """Recover the journal's sessions; ``socket`` is where the kernels will find this broker."""
        core, journal = self._core, self._core.journal
        stored = journal.records()
        if stored and journal.meta("boot") not in ("", boot_id()):
            for name in stored:
                journal.put(name, None)
            stored = {}
        journal.remember("boot", boot_id())
        journal.remember("socket", socket)
        # The broker ends the moves of processes before it asks the driver about sessions,
        # because a process in a move is between two devices.
        guarded = [n for n, entry in stored.items() if self._service.guard and _was_guarded(entry)]
        stuck = await asyncio.gather(
            *(self._landings.recover(name, frozen_in(stored[name])) for name in guarded)
        )
        moving = {name for name, is_stuck in zip(guarded, stuck, strict=True) if is_stuck}
        found, dead = await recover(stored, self._service, core.now(), self._log, moving)
        for name, owner, reason in dead:
            journal.put(name, None)
            core.note("close", owner=owner, reason=reason, detail={"session": name})
            suspended = {*frozen_in(stored[name]), *self._landings.forget(name)}
            self._actions.end_frozen(name, [*suspended])
            with suppress(KeyError, TypeError, ValueError):  # an unreadable record
                self._sudden_ends.ended(from_json(stored[name]["record"]))
        for one in found:
            self._adopt_page(one)
        for one in found:
            one.session.use.attached_before = one.record.attached_seconds_total
            core.sessions.add(one.session)
        core.handle(e.Recovered(now=core.now(), records=tuple(one.record for one in found)))
        self._usage.recover()
        for one in found:
            self._go_on(one)
        self._pages.sweep()
        core.commit()

    def _adopt_page(self, one: RecoveredSession) -> None:
        """Open the session's page, and read in it whether the session uses its device."""
        session, record = one.session, one.record
        used = bool(record.bound or record.slices or record.suspended)
        self._pages.adopt(session, used=used)
        self._activity.read(session)
        if not (one.idle_since or one.computed):
            return
        now, alone = self._core.now(), self._alone()
        quiet = self._activity.untouched(session)
        if quiet and one.idle_since:
            one.at_rest()
        elif quiet and alone >= self._activity.quiet_after:
            # The page shows no use, so the session has not used its device since the earlier broker
            # last checked the page.
            one.at_rest(now - alone)
        elif one.computed and session.page is not None:
            one.in_use(now)

    def _go_on(self, one: RecoveredSession) -> None:
        session, core = one.session, self._core
        self._correct_page(one)
        self._landings.go_on(session)
        if one.record.slices:
            core.set_state(session.id, one.record.state)
        if session.process is None:
            self._lifecycle.expect_launch(session)
        else:
            self._lifecycle.watch_process(session, session.process)
        core.dirty(session.id)
        core.note(
            "recovered",
            session,
            device=one.record.slices[0].device if one.record.slices else None,
            bytes=one.record.granted_bytes or None,
            detail={"label": one.record.label, "state": one.record.state},
        )
        if one.lost:
            self._actions.end_session(e.EndSession(session=session.id, message=one.lost))
        elif any(hold.id == RECOVERED_HOLD for hold in one.record.holds):
            lazy = session.page is not None and one.record.attach == "lazy"
            grace = GRACE_LAZY if lazy else GRACE
            self._lifecycle.start_grace(session, grace)

    def _correct_page(self, one: RecoveredSession) -> None:
        """Write into the page what the recovery has found.

        For example, the gate is still closed if the earlier broker was killed during a suspend.
        """
        session, record = one.session, self._core.record(one.session.id)
        if record is not None and not record.suspended:
            # The session is not suspended. If its page has the mark of a suspend, this suspend had
            # not begun, or the driver has resumed the processes since. So remove the mark.
            self._pages.no_longer_aside(session)
        quiet = self._activity.untouched(session)
        self._guard.changed(session)
        if any(hold.id == DEVICE_HOLD for hold in one.record.holds):
            self._activity.go_on(session, self._alone() if quiet else 0.0)

    def _alone(self) -> float:
        return time.monotonic() - self._alone_since


def _was_guarded(entry: Any) -> bool:
    """Return whether a session in the journal had a page; its record may be damaged."""
    record = entry.get("record") if isinstance(entry, dict) else None
    return isinstance(record, dict) and bool(record.get("lands"))


async def recover(
    stored: Mapping[str, Mapping[str, Any]],
    devices: Devices,
    now: float,
    log: logging.Logger,
    landing: Collection[str] = (),
) -> tuple[list[RecoveredSession], list[tuple[str, str, str]]]:
    """Return the living sessions, and (id, owner, reason) of the others.

    ``landing`` names sessions of which a process is suspended only because it was moving to its
    slice. The other processes of such a session run.
    """
    living: list[tuple[LiveSession, SessionRecord]] = []
    dead: list[tuple[str, str, str]] = []
    for name, entry in stored.items():
        try:
            record = from_json(entry["record"])
            session = read_session(record, entry)
        except (KeyError, TypeError, ValueError) as error:
            log.error("The journal's record of session %s cannot be read: %r", name, error)
            dead.append((name, "", "its journal record cannot be read"))
            continue
        if session.process is not None and not alive(session.process):
            dead.append((name, record.owner.name, "its process ended while there was no broker"))
        else:
            living.append((session, record))
    found = await asyncio.gather(
        *(_recover_one(s, r, devices, now, log, lands=s.id in landing) for s, r in living)
    )
    return list(found), dead


async def _recover_one(
    session: LiveSession,
    record: SessionRecord,
    devices: Devices,
    now: float,
    log: logging.Logger,
    *,
    lands: bool,
) -> RecoveredSession:
    if session.process is None:
        # The session's server is starting the kernel now. Its message ``launched`` will name the
        # process.
        return RecoveredSession(session, _detached(record, now))
    try:
        state = await devices.driver_state(session.process, session=session.id)
    except Exception:
        log.exception("The driver's state of session %s is unknown", session.id)
        state = "hung"
    if state == "locked":
        try:
            await devices.unlock(session.process, session=session.id)
            state = await devices.driver_state(session.process, session=session.id)
        except DriverError as error:
            log.error("Session %s cannot be unlocked: %s", session.id, error)
    log.info("Session %s: the journal says %s, the driver says %s", session.id, record.state, state)
    moving, session.moving = session.moving, {}
    if state == "hung":
        # The process is stopped or stuck, and the driver does not show whether it is suspended. So
        # the session keeps what the journal says: its slice or its suspended state.
        state = "checkpointed" if record.suspended and record.state != "attaching" else "running"
    if lands and state == "checkpointed" and record.state in (*ATTACHED, "detaching"):
        state = "running"  # ``Landings`` brings the suspended process back
    if state in ("failed", "locked"):
        return RecoveredSession(
            session, _detached(record, now), f"The driver lost its GPU state ({state})."
        )
    if state == "checkpointed":
        return RecoveredSession(session, _suspended(record, moving, now))
    if record.state in (*ATTACHED, "detaching") or (
        record.state == "attaching" and record.suspended and state == "running"
    ):
        idle_since = record.idle_since if record.state in ("idle", "detaching") else 0.0
        computed = record.state == "active" and {h.id for h in record.holds} == {DEVICE_HOLD}
        return RecoveredSession(
            session, _attached(record, now), idle_since=idle_since, computed=computed
        )
    if record.suspended:
        # The session was suspended, but it runs now, because a program outside the pool has resumed
        # it without a grant.
        log.warning("Session %s was suspended, but it now runs without a slice", session.id)
        record = replace(record, suspended=())
    return RecoveredSession(session, _detached(record, now))


def _attached(record: SessionRecord, now: float) -> SessionRecord:
    # The agent will report its cells; until then the slice counts as in use.
    hold = Hold(RECOVERED_HOLD, "cell", now)
    state: Literal["active"] = "active"
    return replace(
        record, state=state, state_since=now, holds=(hold,), suspended=(), idle_since=0.0,
        wait_reason="",
    )  # fmt: skip


def _detached(record: SessionRecord, now: float) -> SessionRecord:
    # This does not change ``queued_at``, so a session that waited keeps its place if its agent asks
    # again.
    return replace(record, state="detached", state_since=now, holds=(), slices=(), wait_reason="")


def _suspended(record: SessionRecord, moving: Mapping[str, int], now: float) -> SessionRecord:
    suspended = record.suspended or tuple(
        Slice(piece.device, moving.get(piece.device) or piece.bytes) for piece in record.slices
    )
    if not suspended:
        suspended = tuple(Slice(device, record.footprint) for device in record.bound)
    return replace(
        _detached(record, now),
        suspended=suspended,
        bound=record.bound or tuple(piece.device for piece in suspended),
    )
