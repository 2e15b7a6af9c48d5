# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What each event changes in the facts, before the plan is made again.

Each function returns the actions that follow from the event itself. None of them serves anybody
else, and none says that something may have changed: the pass looks at everything.
"""

from __future__ import annotations

from typing import Callable, Mapping

from ..errors import Code
from ..states import ATTACHED
from ..units import format_bytes
from . import events as ev
from . import requests
from .facts import Facts, Session, restored, weighted
from .limits import never
from .model import Hold, Refusal, Slice
from .needs import ever
from .requests import SETTLE, grow_by, held_on, trimmed, unused_for_long
from .schedule import Plan
from .transitions import (
    Actions,
    grant_holds,
    lose,
    move,
    refuse_holds,
    resize,
    wish,
)

#: Seconds before a session is tried again after a failed attach or a refused suspend; doubled with
#: every further failure, up to ``BACK_OFF_MOST``. ``drain`` and ``host`` begin later because work
#: and memory pressure last longer than a race with the next cell.
BACK_OFF = {"attach": 1.0, "busy": 1.0, "drain": 10.0, "host": 10.0}
BACK_OFF_MOST = 60.0
#: Seconds after a restart of the broker in which a session that was waiting may claim its place.
REJOIN = 60.0


def update(facts: Facts, event: ev.Event, plan: Plan) -> Actions:
    """Take note of one event; ``plan`` is what was decided before it."""
    return _TABLE[type(event)](facts, event, plan)


def _log(session: str, level: str, code: Code, message: str) -> Actions:
    return [ev.Log(session=session, level=level, code=code, message=message)]  # type: ignore[arg-type]


def _unknown_session(name: str, what: str) -> Actions:
    return _log(name, "debug", Code.UNKNOWN_SESSION, what)


# --------------------------------------------------------------------------- the machine


def _tick(_facts: Facts, _event: ev.Tick, _plan: Plan) -> Actions:
    return []


def _device_appeared(facts: Facts, event: ev.DeviceAppeared, _plan: Plan) -> Actions:
    facts.appeared(event.device)
    return []


def _known(facts: Facts, uuid: str) -> Actions:
    if uuid in facts.devices:
        return []
    return _log("", "warning", Code.UNKNOWN_DEVICE, f"There is no device {uuid}.")


def _device_drained(facts: Facts, event: ev.DeviceDrained, _plan: Plan) -> Actions:
    unknown = _known(facts, event.device)
    if not unknown:
        facts.shut(event.device, fault=event.reason or "drained")
    return unknown


def _device_paused(facts: Facts, event: ev.DevicePaused, _plan: Plan) -> Actions:
    unknown = _known(facts, event.device)
    if not unknown:
        facts.shut(event.device, paused=event.reason or "paused")
    return unknown


def _device_resumed(facts: Facts, event: ev.DeviceResumed, _plan: Plan) -> Actions:
    unknown = _known(facts, event.device)
    if not unknown:
        facts.shut(event.device, paused="")
    return unknown


def _device_memory(facts: Facts, event: ev.DeviceMemorySeen, plan: Plan) -> Actions:
    actions = _known(facts, event.device)
    if actions:
        return actions
    # Before the sessions: what they may grow by is another now.
    ledger = facts.devices[event.device]
    facts.seen(event.device, event.foreign, ledger.overuse)
    over = 0
    for name, size in event.footprints.items():
        s = facts.sessions.get(name)
        if s is not None:
            over += _beyond(facts, s, event.device, size)
            if s.state in ATTACHED:
                actions += _measured(facts, s, event.device, size, plan)
                over += max(0, size - held_on(s, event.device))
    facts.seen(event.device, event.foreign, over)
    return actions


def _beyond(facts: Facts, s: Session, _uuid: str, size: int) -> int:
    """Return the bytes that a session without a lease uses: a sample may be older than its end."""
    if s.state in ATTACHED or s.suspended or s.state != "detached":
        return 0
    return size if facts.now >= s.state_since + SETTLE else 0


def _measured(facts: Facts, s: Session, uuid: str, size: int, plan: Plan) -> Actions:
    """Take note of what an attached session was seen to use, and fit its lease to it."""
    lease, held = s.lease, held_on(s, uuid)
    before = lease.footprints.get(uuid, -1)
    if before == size and s.known and size <= held <= s.request.memory and (s.bound or not size):
        lease.sampled_at = facts.now  # nothing new, as nearly always
        return []
    facts.touch(s)
    lease.footprints[uuid] = size
    lease.footprint += size - max(before, 0)
    if size > max(before, 0):
        lease.rose_at = facts.now
    if not held:
        return []
    lease.sampled_at = facts.now
    if size and not s.bound:
        s.bound = tuple(x.device for x in lease.slices)
    if held > s.request.memory:
        lease.measured_at[uuid] = facts.now
    actions: Actions = []
    if size > held:
        # If it has grown, it took these while they were found unused and taken back.
        if lease.grown_at > float("-inf"):
            actions = grow_by(facts, s, uuid, size - held, plan)
    elif held > s.request.memory:
        slices = trimmed(s, reclaim=unused_for_long(s, facts.now), only=uuid)
        actions = resize(facts, s, slices)
    held = held_on(s, uuid)
    if size > held >= before:
        text = f"It uses {format_bytes(size)} of a slice of {format_bytes(held)} on {uuid}."
        actions += _log(s.id, "warning", Code.OVERUSE, text)
    return actions


def _host_memory(facts: Facts, event: ev.HostMemorySeen, _plan: Plan) -> Actions:
    facts.host_seen(event.available)
    return []


def _host_pressure(facts: Facts, event: ev.HostPressure, _plan: Plan) -> Actions:
    for s in facts.sessions.values():
        if s.pressed != (s.id in event.sessions):
            s.pressed = not s.pressed
            facts.touch(s)
    return []


def _settings(facts: Facts, event: ev.SettingsChanged, _plan: Plan) -> Actions:
    """Apply new rules to everything; this reads all sessions, and happens rarely."""
    facts.configure(event.settings)
    actions: Actions = []
    for s in list(facts.waiting.values()):
        refusal = None if s.suspended else ever(s.request, s, facts)
        if refusal is not None:
            actions += refuse_holds(s, refusal)
            actions += move(facts, s, "detached", "the rules changed")
    return actions


# --------------------------------------------------------------------------- sessions


def _opened(facts: Facts, event: ev.SessionOpened, _plan: Plan) -> Actions:
    refusal: Refusal | None
    if event.session in facts.sessions:
        refusal = Refusal(Code.SESSION_EXISTS, f"Session {event.session} exists already.")
    else:
        refusal = never(
            event.request,
            event.owner,
            facts.settings,
            facts.capacities,
            suspends=facts.suspends,
        )
    if refusal is None:
        facts.add(
            Session(
                id=event.session,
                owner=event.owner,
                request=event.request,
                attach=event.attach,
                label=event.label,
                lands=event.lands,
                opened_at=facts.now,
                state_since=facts.now,
            )
        )
    if refusal is None and not event.rid:
        return []
    return [ev.Answer(session=event.session, rid=event.rid, refusal=refusal)]


def _recovered(facts: Facts, event: ev.Recovered, _plan: Plan) -> Actions:
    actions: Actions = []
    for record in event.records:
        if record.id in facts.sessions:
            actions += _log(record.id, "warning", Code.SESSION_EXISTS, "Recovered twice; ignored.")
            continue
        for x in (*record.slices, *record.suspended):
            facts.device(x.device)
        for uuid in record.bound:
            facts.device(uuid)
        facts.add(restored(record, facts.now))
    return actions


def _ended(facts: Facts, event: ev.SessionEnded, _plan: Plan) -> Actions:
    s = facts.sessions.get(event.session)
    if s is None:
        return _unknown_session(event.session, f"Session {event.session} ended twice.")
    actions: Actions = []
    if s.state not in ATTACHED:
        actions += refuse_holds(s, Refusal(Code.UNKNOWN_SESSION, "The kernel has ended."))
    s.holds.clear()
    if s.state != "ended":
        actions += move(facts, s, "ended", event.reason, lost=False)
    facts.host_takes(-s.lease.host_bound)
    facts.remove(s)
    return actions


# --------------------------------------------------------------------------- holds


def _hold_taken(facts: Facts, event: ev.HoldTaken, _plan: Plan) -> Actions:
    s = facts.sessions.get(event.session)
    if s is None or s.state == "ended":
        text = (
            f"There is no session {event.session}."
            if s is None
            else "The GPU state of this kernel was lost."
        )
        refusal = Refusal(
            Code.UNKNOWN_SESSION if s is None else Code.LOST, text, "Restart the kernel."
        )
        return [ev.HoldRefused(session=event.session, hold=event.hold, refusal=refusal)]
    known = event.hold in s.holds
    actions = _settle(facts, s, event.bound) if event.bound else []
    if known and event.hold not in s.holds:
        return actions  # refused just now, with the others
    if not known:
        s.holds[event.hold] = Hold(event.hold, event.kind, facts.now)
    actions += _held(facts, s)
    if s.state in ATTACHED:
        slices = s.lease.slices
        actions.append(ev.HoldGranted(session=s.id, hold=event.hold, epoch=s.epoch, slices=slices))
    return actions


def _held(facts: Facts, s: Session) -> Actions:
    """Let a session with at least one hold be active or wait."""
    if s.measured.gap is not None:
        wish(facts, s)
    if s.state == "idle":
        return move(facts, s, "active", "a hold was taken")
    if s.state != "detached":
        return []
    refusal = None if s.suspended else ever(s.request, s, facts)
    if refusal is not None:
        return refuse_holds(s, refusal)
    since = s.queued_at
    if not since or facts.now - s.state_since > REJOIN:
        since = facts.now
    return move(facts, s, "queued", "a hold needs a slice", since)


def _set_aside(facts: Facts, event: ev.SetAside, _plan: Plan) -> Actions:
    s = facts.sessions.get(event.session)
    if s is None or s.state not in ("detached", "queued"):
        return []  # it was attached meanwhile: whoever suspended it restores it
    for x in event.suspended:
        facts.device(x.device)
    with facts.change(s):
        s.suspended = event.suspended
        s.bound = tuple(x.device for x in event.suspended) or s.bound
    return []


def _devices_settled(facts: Facts, event: ev.DevicesSettled, _plan: Plan) -> Actions:
    s = facts.sessions.get(event.session)
    return [] if s is None else _settle(facts, s, event.bound)


def _settle(facts: Facts, s: Session, bound: tuple[str, ...]) -> Actions:
    """Take note of the devices that the processes of a session without a lease see."""
    if not bound or s.state not in ("detached", "queued") or s.suspended:
        return []
    for uuid in bound:
        facts.device(uuid)
    before = s.bound
    with facts.change(s):
        s.bound = bound
    if s.state == "queued" and bound != before:
        refusal = ever(s.request, s, facts)
        if refusal is not None:
            why = "no GPU that its processes can use is large enough"
            return [*refuse_holds(s, refusal), *move(facts, s, "detached", why)]
    return []


def _landing_refused(facts: Facts, event: ev.LandingRefused, _plan: Plan) -> Actions:
    s = facts.sessions.get(event.session)
    if s is None or s.state != "active" or s.epoch != event.epoch:
        text = "A landing in no lease refused."
        return _log(event.session, "debug", Code.STALE_LANDING, text)
    for uuid in event.bound:
        facts.device(uuid)
    s.bound = event.bound
    s.immovable = s.immovable or event.stay
    actions = move(facts, s, "detached", event.message)
    s.queued_at = min(hold.since for hold in s.holds.values())  # as if it had waited on
    actions += _held(facts, s)
    if s.id not in facts.waiting:
        s.queued_at = 0.0
    return actions


def _hold_dropped(facts: Facts, event: ev.HoldDropped, _plan: Plan) -> Actions:
    s = facts.sessions.get(event.session)
    if s is None:
        return _unknown_session(event.session, "A hold of no session dropped.")
    if s.holds.pop(event.hold, None) is None:
        return []
    _bind(s, event.cuda)
    return _unheld(facts, s)


def _unheld(facts: Facts, s: Session) -> Actions:
    """Let a session without a hold be idle, or stop waiting."""
    if s.holds:
        return []
    if s.state == "active":
        # A release that was asked for makes it due at once.
        return move(facts, s, "idle", "the last hold was dropped")
    if s.state == "queued":
        return move(facts, s, "detached", "the wait was cancelled")
    if s.state == "detaching":
        s.idle_since = facts.now  # from now on, if the suspend is refused
        facts.touch(s)
    return []


def _holds_replaced(facts: Facts, event: ev.HoldsReplaced, _plan: Plan) -> Actions:
    s = facts.sessions.get(event.session)
    if s is None or s.state == "ended":
        return _unknown_session(event.session, "Holds of no session replaced.")
    _bind(s, event.cuda)
    before = bool(s.holds)
    # The agent says nothing about the device's activity, which the broker watches itself.
    kept = {h.id: h for h in s.holds.values() if h.kind == "device"}
    s.holds = {h.id: h for h in event.holds if h.kind != "device"} | kept
    if s.holds:
        return _held(facts, s)
    return _unheld(facts, s) if before else []


def _bind(s: Session, cuda: bool | None) -> None:
    if s.state in ATTACHED and cuda is not None:
        s.bound = tuple(x.device for x in s.lease.slices) if cuda else ()


# --------------------------------------------------------------------------- ends of effects


def _current(
    facts: Facts, name: str, epoch: int, expected: str, what: str
) -> tuple[Session | None, Actions]:
    """Return the session whose effect has ended; None, with what to log, if it has moved on."""
    s = facts.sessions.get(name)
    if s is not None and s.state == expected and s.epoch == epoch:
        return s, []
    now = "gone" if s is None else f"{s.state}, epoch {s.epoch}"
    text = f"{what} of epoch {epoch} came for a session that is {now}; dropped."
    return None, _log(name, "debug" if s is None else "warning", Code.STALE_COMPLETION, text)


def _attach_done(facts: Facts, event: ev.AttachDone, _plan: Plan) -> Actions:
    s, actions = _current(facts, event.session, event.epoch, "attaching", "AttachDone")
    if s is None:
        return actions
    restored_ = s.suspended
    new = "active" if s.holds else "idle"
    actions = move(facts, s, new, "attached", event.seconds)  # type: ignore[arg-type]
    if restored_:
        # The headroom was for the resume only.
        memory = s.request.memory
        sizes = zip(s.lease.slices, restored_, strict=True)
        slices = tuple(Slice(x.device, min(x.bytes, max(memory, h.bytes))) for x, h in sizes)
        actions += resize(facts, s, slices)
    return actions + grant_holds(s)


def _attach_failed(facts: Facts, event: ev.AttachFailed, _plan: Plan) -> Actions:
    s, actions = _current(facts, event.session, event.epoch, "attaching", "AttachFailed")
    if s is None:
        return actions
    if event.lost:
        return lose(facts, s, event.message)
    s.immovable = s.immovable or event.stay
    _back_off(facts, s, "attach")
    if s.holds:
        return move(facts, s, "queued", event.message, event.message)
    return move(facts, s, "detached", event.message)


def _back_off(facts: Facts, s: Session, kind: str) -> None:
    pause = min(BACK_OFF_MOST, BACK_OFF[kind] * 2.0**s.failures)
    s.failures = min(s.failures + 1, 16)
    s.retry_at = facts.now + pause


def _suspend_done(facts: Facts, event: ev.SuspendDone, _plan: Plan) -> Actions:
    s, actions = _current(facts, event.session, event.epoch, "detaching", "SuspendDone")
    if s is None:
        return actions
    held = event.suspended
    if event.seconds > 0 and held:
        facts.swap = weighted(facts.swap, event.seconds)
        s.measured.suspend = weighted(s.measured.suspend, event.seconds)
    if s.holds:
        text = "suspended, and a hold was taken meanwhile"
        return move(facts, s, "queued", text, held, event.cuda)
    text = "suspended" if held else "detached; nothing to suspend"
    return move(facts, s, "detached", text, held, event.cuda)


def _suspend_refused(facts: Facts, event: ev.SuspendRefused, _plan: Plan) -> Actions:
    s, actions = _current(facts, event.session, event.epoch, "detaching", "SuspendRefused")
    if s is None:
        return actions
    s.roomless = event.message if event.kind == "host" and not s.holds else ""
    if event.kind == "pinned":
        s.pinned_reason = event.message or "the driver cannot suspend it"
        s.pinned_at = facts.now
    elif not (event.kind == "busy" and s.holds):
        # Else it is known what is in the way, and it may be asked again once that is over. A later
        # try would find the next of its short cells.
        _back_off(facts, s, event.kind)
    new = "active" if s.holds else "idle"
    actions = move(facts, s, new, f"{event.kind}: {event.message}")  # type: ignore[arg-type]
    return actions + grant_holds(s)


def _suspend_failed(facts: Facts, event: ev.SuspendFailed, _plan: Plan) -> Actions:
    s, actions = _current(facts, event.session, event.epoch, "detaching", "SuspendFailed")
    return actions if s is None else lose(facts, s, event.message)


_TABLE: Mapping[type[ev.Event], Callable[..., Actions]] = {
    ev.DeviceAppeared: _device_appeared,
    ev.DeviceDrained: _device_drained,
    ev.DevicePaused: _device_paused,
    ev.DeviceResumed: _device_resumed,
    ev.DeviceMemorySeen: _device_memory,
    ev.HostMemorySeen: _host_memory,
    ev.HostPressure: _host_pressure,
    ev.SettingsChanged: _settings,
    ev.Tick: _tick,
    ev.SessionOpened: _opened,
    ev.Recovered: _recovered,
    ev.SessionEnded: _ended,
    ev.HoldTaken: _hold_taken,
    ev.HoldDropped: _hold_dropped,
    ev.SetAside: _set_aside,
    ev.DevicesSettled: _devices_settled,
    ev.LandingRefused: _landing_refused,
    ev.HoldsReplaced: _holds_replaced,
    ev.RequestChanged: requests.changed,
    ev.GrowAsked: requests.grow,
    ev.ReleaseAsked: requests.release,
    ev.KeepAsked: requests.keep,
    ev.AttachDone: _attach_done,
    ev.AttachFailed: _attach_failed,
    ev.SuspendDone: _suspend_done,
    ev.SuspendRefused: _suspend_refused,
    ev.SuspendFailed: _suspend_failed,
}
