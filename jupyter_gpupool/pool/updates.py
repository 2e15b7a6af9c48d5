# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What each event changes in the facts, before the pass plans again.

Each function returns the actions that follow directly from its event. It serves no other session,
and need not say which sessions the event may affect: the pass that follows looks at all sessions.
"""

from __future__ import annotations

from typing import Callable, Mapping

from ..errors import Code
from ..states import ATTACHED, State
from ..units import format_bytes
from . import events as ev
from . import recall, requests
from .facts import Facts
from .limits import never
from .model import Hold, Refusal, Slice
from .placement import ever
from .requests import SETTLE, grow_by, held_on, trimmed, unused_for_long
from .residence import move_cost
from .running import cost
from .schedule import Plan
from .session import NEVER, Session, restored, weighted
from .transitions import Actions, grant_holds, lose, move, refuse_holds, resize, wish

#: How many seconds the pool waits after a failed attach or a refused suspend before it tries again.
#: The delay doubles with every further failure, up to ``BACK_OFF_MOST``. ``drain`` (work on the
#: GPU), ``host`` and ``limit`` (too little memory) begin with a longer delay than ``busy`` (the
#: next cell has just begun), because their causes last longer.
BACK_OFF = {"attach": 1.0, "busy": 1.0, "drain": 10.0, "host": 10.0, "limit": 10.0}
BACK_OFF_MOST = 60.0
#: For this many seconds after a restart of the broker, a session that waited before may claim its
#: old place in the queue.
REJOIN = 60.0


def update(facts: Facts, event: ev.Event, plan: Plan) -> Actions:
    """Apply one event to the facts; ``plan`` is the plan before this event."""
    kind = type(event)
    if kind in _POOL:
        return _POOL[kind](facts, event)
    if isinstance(event, (ev.DeviceDrained, ev.DevicePaused, ev.DeviceResumed)):
        return _device(facts, event)
    if isinstance(event, ev.DeviceMemorySeen):
        return _device_memory(facts, event, plan)
    name: str = event.session  # type: ignore[attr-defined]
    s = facts.sessions.get(name)
    if s is None or s.state == "ended":
        return _gone(name, s, event)
    facts.forget_times(s)
    if kind in _EFFECTS:
        state, act = _EFFECTS[kind]
        epoch: int = event.epoch  # type: ignore[attr-defined]
        if (s.state, s.epoch) != (state, epoch):
            text = f"{kind.__name__} of epoch {epoch} came for a session that is {s.state}, epoch "
            # LandingRefused may come just after the session dropped its last hold: this is no
            # error.
            level = "debug" if kind is ev.LandingRefused else "warning"
            return _log(name, level, Code.STALE_COMPLETION, f"{text}{s.epoch}; it is ignored.")
        return act(facts, s, event)
    if kind in _PEOPLE:
        return _PEOPLE[kind](facts, s, event, plan)
    return _SESSION[kind](facts, s, event)


def _log(session: str, level: str, code: Code, message: str) -> Actions:
    return [ev.Log(session=session, level=level, code=code, message=message)]  # type: ignore[arg-type]


def _gone(name: str, s: Session | None, event: ev.Event) -> Actions:
    """Answer an event for a session that is lost or that the pool does not know."""
    refusal = Refusal(Code.UNKNOWN_SESSION, f"There is no session {name!r}.", "Restart the kernel.")
    if isinstance(event, ev.HoldTaken):
        if s is not None:
            text = "The GPU state of this kernel was lost."
            refusal = Refusal(Code.LOST, text, "Restart the kernel.")
        return [ev.HoldRefused(session=name, hold=event.hold, refusal=refusal)]
    rid = getattr(event, "rid", None)
    if rid is not None:
        step = "`jupyter gpupool status` lists the sessions."
        refusal = Refusal(Code.UNKNOWN_SESSION, refusal.message, step, {"session": name})
        return [ev.Answer(session=name, rid=rid, refusal=refusal)]
    text = f"{type(event).__name__} came for a session that is gone; it is ignored."
    return _log(name, "debug", Code.UNKNOWN_SESSION, text)


# --------------------------------------------------------------------------- the machine


def _tick(_facts: Facts, _event: ev.Tick) -> Actions:
    return []


def _device_appeared(facts: Facts, event: ev.DeviceAppeared) -> Actions:
    facts.appeared(event.device)
    return []


def _device(facts: Facts, event: ev.DeviceDrained | ev.DevicePaused | ev.DeviceResumed) -> Actions:
    """Take a device out of service, or put it back."""
    uuid = event.device
    if uuid not in facts.devices:
        return _unknown_device(uuid)
    if isinstance(event, ev.DeviceDrained):
        facts.shut(uuid, fault=event.reason or "drained")
    elif isinstance(event, ev.DevicePaused):
        facts.shut(uuid, paused=event.reason or "paused")
    else:
        facts.shut(uuid, paused="")
    return []


def _unknown_device(uuid: str) -> Actions:
    return _log("", "warning", Code.UNKNOWN_DEVICE, f"There is no device {uuid}.")


def _device_memory(facts: Facts, event: ev.DeviceMemorySeen, plan: Plan) -> Actions:
    uuid, over = event.device, 0
    if uuid not in facts.devices:
        return _unknown_device(uuid)
    actions: Actions = []
    # Record the foreign bytes before the sessions' bytes: the foreign bytes limit the growth of
    # sessions in the loop below.
    facts.seen(uuid, event.foreign, facts.devices[uuid].overuse)
    for name, size in event.footprints.items():
        s = facts.sessions.get(name)
        if s is None:
            continue
        if s.state in ATTACHED:
            actions += _measured(facts, s, uuid, size, plan)
            over += max(0, size - held_on(s, uuid))
        elif s.state == "detached" and not s.suspended and facts.now >= s.state_since + SETTLE:
            over += size  # a sample may be older than the lease's end, but by less than SETTLE
    facts.seen(uuid, event.foreign, over)
    return actions


def _measured(facts: Facts, s: Session, uuid: str, size: int, plan: Plan) -> Actions:
    """Record the measured use of an attached session, and adapt the size of its lease."""
    lease, held = s.lease, held_on(s, uuid)
    facts.forget_times(s)
    before = lease.footprints.get(uuid, -1)
    lease.footprints[uuid] = size
    lease.footprint += size - max(before, 0)
    if size > max(before, 0):
        lease.rose_at = facts.now
    if not held:
        return []
    lease.sampled_at = facts.now
    if facts.swap is None:
        lease.cost = cost(s, None)  # a guess from the bytes in use, until a move is measured
    if size:
        s.bound = tuple(x.device for x in lease.slices)
    actions: Actions = []
    if held > s.request.memory:
        lease.measured_at[uuid] = facts.now
    if size > held:
        # If the lease has grown before, the pool probably took grown bytes back as unused just
        # after the session had begun to use them. So grow the lease again.
        if lease.grown_at > NEVER:
            actions = grow_by(facts, s, uuid, size - held, plan)
    elif held > s.request.memory:
        slices = trimmed(s, reclaim=unused_for_long(s, facts.now), only=uuid)
        actions = resize(facts, s, slices)
    held = held_on(s, uuid)
    if size > held >= before:
        text = f"It uses {format_bytes(size)} on {uuid}, where its slice is {format_bytes(held)}."
        actions += _log(s.id, "warning", Code.OVERUSE, text)
    return actions


def _host_memory(facts: Facts, event: ev.HostMemorySeen) -> Actions:
    facts.host_seen(event.available)
    return []


def _host_pressure(facts: Facts, event: ev.HostPressure) -> Actions:
    for s in facts.sessions.values():
        s.pressed = s.id in event.sessions
        facts.forget_times(s)
    return []


def _settings(facts: Facts, event: ev.SettingsChanged) -> Actions:
    """Apply new rules; refuse waiting sessions whose requests these rules can never meet."""
    facts.configure(event.settings, event.groups)
    actions: Actions = []
    for s in list(facts.waiting.values()):
        actions += _refuse_if_hopeless(facts, s, "the rules changed")
    return actions


def _clock_set(facts: Facts, event: ev.ClockSet) -> Actions:
    facts.meters.set_clock(facts.now, facts.settings, event.ahead)
    return []


def _usage_recovered(facts: Facts, event: ev.UsageRecovered) -> Actions:
    since = facts.now if event.since is None else event.since
    facts.meters.recovered(facts.now, facts.settings, event.users, event.groups, since)
    return []


def _used_elsewhere(facts: Facts, event: ev.UsedElsewhere) -> Actions:
    facts.meters.used_elsewhere(facts.now, facts.settings, event.users, event.groups)
    return []


def _recovered(facts: Facts, event: ev.Recovered) -> Actions:
    actions: Actions = []
    for record in event.records:
        if record.id in facts.sessions:
            text = "The session was already recovered, so the pool ignores this second record."
            actions += _log(record.id, "warning", Code.SESSION_EXISTS, text)
            continue
        for x in (*record.slices, *record.suspended):
            facts.device(x.device)
        for uuid in record.bound:
            facts.device(uuid)
        s = restored(record, facts.now)
        facts.add(s)
        s.lease.cost = cost(s, facts.swap)
    return actions


# --------------------------------------------------------------------------- sessions


def _opened(facts: Facts, event: ev.SessionOpened) -> Actions:
    rules = facts.settings, facts.capacities
    refusal = never(event.request, event.owner, *rules, suspends=facts.suspends, least=facts.least)
    if event.session in facts.sessions:
        refusal = Refusal(Code.SESSION_EXISTS, f"Session {event.session} exists already.")
    if refusal is None:
        facts.add(
            Session(
                id=event.session,
                owner=event.owner,
                request=event.request,
                attach=event.attach,
                label=event.label,
                lands=event.lands,
                gated=event.gated,
                opened_at=facts.now,
                state_since=facts.now,
                possible=facts.version,
            )
        )
        if not event.rid:
            return []
    return [ev.Answer(session=event.session, rid=event.rid, refusal=refusal)]


def _ended(facts: Facts, event: ev.SessionEnded) -> Actions:
    s = facts.sessions.get(event.session)
    if s is None:
        return _gone(event.session, s, event)
    actions: Actions = []
    if s.state not in ATTACHED:
        actions += refuse_holds(s, Refusal(Code.UNKNOWN_SESSION, "The kernel has ended."))
    s.holds.clear()
    if s.state != "ended":
        actions += move(facts, s, "ended", event.reason, lost=False)
    facts.host_takes(-s.lease.host_bound)
    facts.remove(s)
    return actions


def _set_aside(facts: Facts, s: Session, event: ev.SetAside) -> Actions:
    if s.state not in ("detached", "queued"):
        return []  # the session has a lease by now, so the attach will restore the state
    for x in event.suspended:
        facts.device(x.device)
    with facts.change(s):
        s.suspended = event.suspended
        s.bound = tuple(x.device for x in event.suspended) or s.bound
    return []


def _devices_settled(facts: Facts, s: Session, event: ev.DevicesSettled) -> Actions:
    return _settle(facts, s, event.bound) if event.bound else []


def _settle(facts: Facts, s: Session, bound: tuple[str, ...]) -> Actions:
    """Record the devices that the processes of a session without a lease see."""
    if s.state not in ("detached", "queued") or s.suspended or bound == s.bound:
        return []
    for uuid in bound:
        facts.device(uuid)
    with facts.change(s):
        s.bound = bound
    if s.state == "queued":
        why = "no GPU that its processes can use is large enough"
        return _refuse_if_hopeless(facts, s, why)
    return []


def _refuse_if_hopeless(facts: Facts, s: Session, why: str) -> Actions:
    """Refuse the holds of a session without a lease if its request can never be met.

    A session with suspended state keeps its holds. For a session that is bound to no device, the
    answer depends only on its request, its owner, the rules and the devices. So ``possible`` caches
    the version at which its request could be met: each change of these four either sets
    ``possible`` to -1 or raises the version.
    """
    if s.suspended or (s.possible == facts.version and not s.bound):
        return []
    refusal = ever(s.request, s, facts)
    if refusal is None:
        s.possible = facts.version
        return []
    actions = refuse_holds(s, refusal)
    return actions + move(facts, s, "detached", why) if s.state == "queued" else actions


# --------------------------------------------------------------------------- holds


def _hold_taken(facts: Facts, s: Session, event: ev.HoldTaken) -> Actions:
    known = event.hold in s.holds
    actions = _settle(facts, s, event.bound) if event.bound else []
    if known and event.hold not in s.holds:
        return actions  # _settle() has just refused this hold with all others
    if not known:
        s.holds[event.hold] = Hold(event.hold, event.kind, facts.now)
    actions += _held(facts, s)
    if s.state in ATTACHED:
        slices = s.lease.slices
        actions.append(ev.HoldGranted(session=s.id, hold=event.hold, epoch=s.epoch, slices=slices))
    return actions


def _held(facts: Facts, s: Session) -> Actions:
    """Make a session with a hold active, or let it wait."""
    if s.measured.gap is not None:
        wish(facts, s, s.measured.gap)
    if s.state == "idle":
        return move(facts, s, "active", "a hold was taken")
    if s.state != "detached":
        return []
    refused = _refuse_if_hopeless(facts, s, "")
    if refused:
        return refused
    since = s.queued_at
    if not since or facts.now - s.state_since > REJOIN:
        since = facts.now
    return move(facts, s, "queued", "a hold needs a slice", since)


def _hold_dropped(facts: Facts, s: Session, event: ev.HoldDropped) -> Actions:
    if s.holds.pop(event.hold, None) is None:
        return []
    _bind(s, event.cuda)
    return _unheld(facts, s)


def _holds_replaced(facts: Facts, s: Session, event: ev.HoldsReplaced) -> Actions:
    _bind(s, event.cuda)
    before = bool(s.holds)
    # Keep the holds of kind ``device``: the broker takes them, so the agent does not report them.
    kept = {h.id: h for h in s.holds.values() if h.kind == "device"}
    s.holds = {h.id: h for h in event.holds if h.kind != "device"} | kept
    if s.holds:
        return _held(facts, s)
    return _unheld(facts, s) if before else []


def _unheld(facts: Facts, s: Session) -> Actions:
    """Make a session without a hold idle, or end its wait."""
    if s.holds:
        return []
    if s.state == "active":
        return move(facts, s, "idle", "the last hold was dropped")
    if s.state == "queued":
        return move(facts, s, "detached", "the wait was cancelled")
    if s.state == "detaching":
        s.idle_since = facts.now  # the start of the idle time if the suspend is refused
    return []


def _bind(s: Session, cuda: bool | None) -> None:
    if s.state in ATTACHED and cuda is not None:
        s.bound = tuple(x.device for x in s.lease.slices) if cuda else ()


# --------------------------------------------------------------------------- ends of effects


def _attach_done(facts: Facts, s: Session, event: ev.AttachDone) -> Actions:
    state = s.suspended
    new: State = "active" if s.holds else "idle"
    actions = move(facts, s, new, "attached", move_cost(event.seconds, event.waited))
    if state:
        # Only the resume needed the headroom.
        memory = s.request.memory
        sizes = zip(s.lease.slices, state, strict=True)
        slices = tuple(Slice(x.device, min(x.bytes, max(memory, h.bytes))) for x, h in sizes)
        actions += resize(facts, s, slices)
    return actions + grant_holds(s)


def _attach_failed(facts: Facts, s: Session, event: ev.AttachFailed) -> Actions:
    if event.lost:
        return lose(facts, s, event.message)
    s.immovable = s.immovable or event.stay
    _back_off(facts, s, "attach")
    if s.holds:
        return move(facts, s, "queued", event.message, event.message)
    return move(facts, s, "detached", event.message)


def _landing_refused(facts: Facts, s: Session, event: ev.LandingRefused) -> Actions:
    for uuid in event.bound:
        facts.device(uuid)
    s.bound = event.bound
    s.immovable = s.immovable or event.stay
    actions = move(facts, s, "detached", event.message)
    s.queued_at = min(hold.since for hold in s.holds.values())  # the wait continues without a break
    actions += _held(facts, s)
    if s.state != "queued":
        s.queued_at = 0.0
    return actions


def _back_off(facts: Facts, s: Session, kind: str) -> None:
    pause = min(BACK_OFF_MOST, BACK_OFF[kind] * 2.0**s.failures)
    s.failures = min(s.failures + 1, 16)
    s.retry_at = facts.now + pause


def _suspend_done(facts: Facts, s: Session, event: ev.SuspendDone) -> Actions:
    held = event.suspended
    if event.seconds > 0 and held:
        took = move_cost(event.seconds, event.waited)
        facts.swap = weighted(facts.swap, took)
        s.measured.suspend = weighted(s.measured.suspend, took)
    if s.holds:
        text = s.preempted or "suspended, and a hold was taken meanwhile"
        return move(facts, s, "queued", text, held, event.cuda)
    text = "suspended" if held else "detached; nothing to suspend"
    return move(facts, s, "detached", text, held, event.cuda)


def _suspend_refused(facts: Facts, s: Session, event: ev.SuspendRefused) -> Actions:
    host = event.kind in ("host", "limit")
    s.roomless = event.message if host and not s.holds else ""
    if event.kind == "pinned":
        s.pinned_reason = event.message or "the driver cannot suspend it"
        s.pinned_at = facts.now
    elif s.lease.preempted or not (event.kind == "busy" and s.holds):
        # If the agent refused because of a hold, there is no back-off: the pool may suspend the
        # session as soon as the hold is dropped. With a back-off, the next short cell could begin
        # before the next attempt, and prevent the suspend again.
        _back_off(facts, s, event.kind)
        s.refused = event.message if event.kind != "host" else ""
        s.confined = event.kind == "limit"
    new: State = "active" if s.holds else "idle"
    return move(facts, s, new, f"{event.kind}: {event.message}") + grant_holds(s)


def _suspend_failed(facts: Facts, s: Session, event: ev.SuspendFailed) -> Actions:
    return lose(facts, s, event.message)


# --------------------------------------------------------------------- the function of each event

_POOL: Mapping[type[ev.Event], Callable[..., Actions]] = {
    ev.Tick: _tick,
    ev.DeviceAppeared: _device_appeared,
    ev.HostMemorySeen: _host_memory,
    ev.HostPressure: _host_pressure,
    ev.SettingsChanged: _settings,
    ev.ClockSet: _clock_set,
    ev.UsageRecovered: _usage_recovered,
    ev.UsedElsewhere: _used_elsewhere,
    ev.Recovered: _recovered,
    ev.SessionOpened: _opened,
    ev.SessionEnded: _ended,
}
_SESSION: Mapping[type[ev.Event], Callable[..., Actions]] = {
    ev.HoldTaken: _hold_taken,
    ev.HoldDropped: _hold_dropped,
    ev.HoldsReplaced: _holds_replaced,
    ev.SetAside: _set_aside,
    ev.DevicesSettled: _devices_settled,
}
#: The functions for the requests of users and admins. They also get the plan, because an answer may
#: depend on the memory that the plan leaves.
_PEOPLE: Mapping[type[ev.Event], Callable[..., Actions]] = {
    ev.RequestChanged: requests.changed,
    ev.GrowAsked: requests.grow,
    ev.ReleaseAsked: requests.release,
    ev.KeepAsked: requests.keep,
    ev.RecallAsked: recall.recall,
    ev.EndAsked: recall.end,
}
#: The functions for events that complete an operation of the broker, each with the state to which
#: the event belongs. The event also belongs to one epoch of the session. If the session has another
#: state or another epoch, the event is too late.
_EFFECTS: Mapping[type[ev.Event], tuple[State, Callable[..., Actions]]] = {
    ev.AttachDone: ("attaching", _attach_done),
    ev.AttachFailed: ("attaching", _attach_failed),
    ev.LandingRefused: ("active", _landing_refused),
    ev.SuspendDone: ("detaching", _suspend_done),
    ev.SuspendRefused: ("detaching", _suspend_refused),
    ev.SuspendFailed: ("detaching", _suspend_failed),
}
