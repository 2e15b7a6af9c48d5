# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The pool's texts: why a kernel waits or keeps its slice, refusals, and answers."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, get_args

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.limits import never
from jupyter_gpupool.pool.model import PREEMPT_ALL, Device, Owner, Quota, Refusal, Request, Rule
from jupyter_gpupool.pool.words import FOR_OTHERS
from jupyter_gpupool.text import sentence

from ..pool.builders import RULES, Lab, all_of, device
from .sheet import Sheet

GiB = 1 << 30

HOST = {"host_memory": 64 * GiB, "resume_headroom": 0}


def gpu(index: int, model: str = "H100", **fields: Any) -> Device:
    """Return a device of 16 GiB."""
    return dataclasses.replace(
        device(index, 16 * GiB, model=model, **fields), name=f"NVIDIA {model}"
    )


def lab(*devices: Device, **rules: Any) -> Lab:
    return Lab(*(devices or (gpu(0), gpu(1))), **{**HOST, **rules})


def wait(pool: Lab, name: str, size: int, **fields: Any) -> None:
    """Open a session that waits for ``size`` GiB."""
    pool.open(name, size * GiB, **fields)
    pool.hold(name)


def bound(pool: Lab, name: str, *devices: str) -> list[ev.Action]:
    """Let a session wait whose process has already initialised CUDA on ``devices``."""
    return pool.send(ev.HoldTaken, session=name, hold="h", kind="device", bound=devices)


# --------------------------------------------------------------------------- why it waits


def planned() -> tuple[Lab, str]:
    pool = lab(gpu(0))
    pool.idle("a", 12 * GiB)
    wait(pool, "w", 10)
    return pool, "w"


def all_busy() -> tuple[Lab, str]:
    pool = lab()
    pool.running("a", 16 * GiB)
    pool.running("b", 16 * GiB)
    wait(pool, "w", 8)
    return pool, "w"


def part_busy() -> tuple[Lab, str]:
    pool = lab()
    pool.running("a", 12 * GiB)
    pool.running("b", 10 * GiB)
    wait(pool, "w", 8)
    return pool, "w"


def both_busy() -> tuple[Lab, str]:
    pool = lab()
    pool.running("a", 12 * GiB)
    wait(pool, "w", 8, devices=2)
    return pool, "w"


def roomless() -> tuple[Lab, str]:
    pool = lab(gpu(0))
    pool.idle("a", 10 * GiB)
    wait(pool, "w", 10)
    pool.refused("a", "host", "control group /user.slice has 1 GiB left.")
    return pool, "w"


def just_moved() -> tuple[Lab, str]:
    pool = lab(gpu(0), max_swap_overhead=0.1)
    pool.idle("a", 16 * GiB)
    pool.release("a")
    pool.after(2)
    pool.suspended("a", ("G0", 12 * GiB), seconds=1.0)
    pool.hold("a")
    pool.after(2)
    pool.done("a", seconds=1.0)
    pool.after(3)
    pool.drop("a")
    wait(pool, "w", 16)
    return pool, "w"


def settled_before_its_slice() -> tuple[Lab, str]:
    pool = lab()
    pool.running("b", 16 * GiB)
    pool.running("a", 16 * GiB)
    pool.open("w", 12 * GiB)
    bound(pool, "w", "G0")
    pool.end("a")
    return pool, "w"


def settled_on_a_model() -> tuple[Lab, str]:
    devices = [
        dataclasses.replace(gpu(index, model), landing_bytes=GiB, memory_total=17 * GiB)
        for index, model in enumerate(("H100", "H100", "L4"))
    ]
    pool = lab(*devices)
    pool.running("b", 16 * GiB)
    pool.running("c", 16 * GiB)
    pool.open("w", 10 * GiB, lands=True)
    bound(pool, "w", "G0")
    return pool, "w"


def state_not_moved() -> tuple[Lab, str]:
    pool = lab()
    pool.parked("w", used=10 * GiB, memory=10 * GiB)
    pool.running("b", 12 * GiB)
    pool.hold("w")
    pool.send(
        ev.AttachFailed, session="w", epoch=pool.record("w").epoch, message="not moved", stay=True
    )
    pool.after(2)
    return pool, "w"


def behind_head() -> tuple[Lab, str]:
    pool = lab(gpu(0))
    pool.running("a", 4 * GiB)
    pool.running("b", 4 * GiB)
    wait(pool, "head", 10)
    wait(pool, "small", 2)
    wait(pool, "w", 2)
    return pool, "w"


def host_budget_full() -> tuple[Lab, str]:
    pool = lab(gpu(0), host_memory=16 * GiB)
    pool.parked("p", used=10 * GiB, memory=10 * GiB)
    pool.idle("a", 16 * GiB)
    wait(pool, "w", 16)
    return pool, "w"


def host_short() -> tuple[Lab, str]:
    pool = lab(gpu(0))
    pool.idle("a", 16 * GiB)
    pool.send(ev.HostMemorySeen, available=5 * GiB)
    wait(pool, "w", 16)
    return pool, "w"


def state_too_large() -> tuple[Lab, str]:
    pool = lab(gpu(0), host_memory=10 * GiB, preempt=PREEMPT_ALL)
    pool.running("a", 4 * GiB, limit=16 * GiB)
    pool.grow("a", 12 * GiB)
    pool.after(60)
    wait(pool, "w", 4)
    return pool, "w"


def others_quota_full() -> tuple[Lab, str]:
    pool = lab(gpu(0), quotas={"ann": Quota(suspended=16 * GiB)})
    pool.parked("p", used=10 * GiB, memory=10 * GiB, owner="ann")
    pool.idle("a", 16 * GiB, owner="ann")
    wait(pool, "w", 16, owner="bob")
    return pool, "w"


def quota(limit: Quota, reserved: bool = False) -> Callable[[], tuple[Lab, str]]:
    def scene() -> tuple[Lab, str]:
        pool = lab(quotas={"ann": limit})
        if reserved:
            pool = lab(gpu(0), quotas={"ann": limit})
            pool.running("a", 16 * GiB)
            wait(pool, "head", 16, owner="ann")
        else:
            pool.running("a", 4 * GiB, owner="ann")
            pool.running("b", 4 * GiB, owner="ann") if limit.leases != 1 else None
        wait(pool, "w", 10, owner="ann")
        return pool, "w"

    return scene


def behind_own() -> tuple[Lab, str]:
    pool = lab(quotas={"ann": Quota(memory=16 * GiB)})
    pool.running("a", 10 * GiB, owner="ann")
    wait(pool, "b", 10, owner="ann")
    wait(pool, "w", 6, owner="ann")
    return pool, "w"


def own_without_host_memory() -> tuple[Lab, str]:
    pool = lab(quotas={"ann": Quota(leases=1)}, host_memory=16 * GiB)
    pool.parked("p", used=10 * GiB, memory=10 * GiB)
    pool.idle("a", 12 * GiB, owner="ann")
    wait(pool, "w", 10, owner="ann")
    return pool, "w"


def paused() -> tuple[Lab, str]:
    pool = lab(gpu(0))
    pool.send(ev.DevicePaused, device="G0", reason="paused by the administrator: new driver")
    wait(pool, "w", 4)
    return pool, "w"


def drained() -> tuple[Lab, str]:
    pool = lab()
    pool.running("w", 10 * GiB)
    pool.drop("w", cuda=True)
    pool.release("w")
    pool.suspended("w")
    pool.send(ev.DeviceDrained, device="G0", reason="The driver reported Xid 79.")
    pool.hold("w")
    return pool, "w"


def out_of_service() -> tuple[Lab, str]:
    pool = lab(gpu(0), gpu(1, "L4"))
    pool.parked("w", used=8 * GiB, memory=10 * GiB)
    pool.send(ev.DeviceDrained, device="G0", reason="Xid 79")
    pool.hold("w")
    return pool, "w"


def foreign() -> tuple[Lab, str]:
    pool = lab(gpu(0))
    pool.seen("G0", foreign=8 * GiB)
    wait(pool, "w", 12)
    return pool, "w"


def retry() -> tuple[Lab, str]:
    pool = lab(gpu(0))
    wait(pool, "w", 4)
    pool.failed("w", "GPU-5d1c cannot be read: NVML did not answer.")
    return pool, "w"


def closed() -> tuple[Lab, str]:
    pool = lab(classes_allowed=frozenset({"notebook"}))
    wait(pool, "w", 4, priority="batch")
    return pool, "w"


def closed_by_day() -> tuple[Lab, str]:
    pool = lab(classes_allowed=frozenset({"notebook"}), classes_open={"batch": 20 * 3600.0})
    wait(pool, "w", 4, priority="batch")
    return pool, "w"


#: In each row: a situation, the rule of the ``Reason`` in this situation, and a function that
#: creates the situation.
WAITS: tuple[tuple[str, str, Callable[[], tuple[Lab, str]]], ...] = (
    ("An idle kernel makes room", "planned", planned),
    ("All GPUs are full", "busy", all_busy),
    ("Some memory is free, but too little", "busy", part_busy),
    ("It needs two GPUs at once", "busy", both_busy),
    ("An idle kernel stays, because host memory is short", "busy", roomless),
    ("The idle kernel has just been restored", "busy", just_moved),
    ("It initialised CUDA before it had a slice", "busy", settled_before_its_slice),
    ("It initialised CUDA on a model whose GPUs are all busy", "busy", settled_on_a_model),
    ("Its state can return to one GPU only", "busy", state_not_moved),
    ("The free memory is reserved", "behind-head", behind_head),
    ("The budget for suspended state is used up", "host", host_budget_full),
    ("The machine has little free memory", "host", host_short),
    ("The state in its way is larger than host memory", "host", state_too_large),
    ("The quota of suspended state of other users is in use", "host", others_quota_full),
    ("Its owner's other kernels use the quota of memory", "quota", quota(Quota(memory=16 * GiB))),
    ("Its owner's other kernels use the quota of GPUs", "quota", quota(Quota(devices=2))),
    ("Its owner's other kernel uses the quota of slices", "quota", quota(Quota(leases=1))),
    ("A waiting kernel has reserved the quota", "quota", quota(Quota(leases=1), reserved=True)),
    ("An earlier kernel of its owner waits for the quota", "behind-own", behind_own),
    (
        "Its owner's idle kernel must leave, but host memory has no room",
        "quota-host",
        own_without_host_memory,
    ),
    ("Its priority class may not run now", "class-closed", closed),
    ("A schedule lets its priority class run later", "class-closed", closed_by_day),
    ("An admin has paused the GPU", "paused", paused),
    ("The only GPU that it can use has failed", "drained", drained),
    ("The pool has no GPU that it can use", "nowhere", out_of_service),
    ("Programs outside the pool use the GPU", "foreign", foreign),
    ("The last attach failed", "retry", retry),
)


def waits(sheet: Sheet) -> set[str]:
    """Write the reasons for which kernels wait; return the rules of these reasons."""
    met = set()
    for situation, rule, scene in WAITS:
        pool, name = scene()
        told = pool.pool.explain(name)
        assert told.reason is not None, situation
        met.add(told.reason.rule)
        assert told.reason.rule == rule, f"{situation}: {told.reason.rule}"
        sheet.put(situation, sentence(told.text), rule)
    return met


def waits_of_others(sheet: Sheet) -> None:
    """Write what other users see as the reason for which a kernel waits."""
    for rule in get_args(Rule):
        sheet.put(f"By the rule {rule}", f"Waits for {FOR_OTHERS[rule]}.")


# --------------------------------------------------------------------------- why it stays


def stays(sheet: Sheet) -> None:
    """Write the reasons for which an idle kernel keeps its slice after its idle time."""

    def put(situation: str, pool: Lab) -> None:
        views = pool.pool.view(pool.now).sessions
        sheet.put(situation, next(v.stays_reason for v in views if v.record.id == "a"))

    pool = lab(gpu(0, can_suspend=False))
    pool.idle("a", 10 * GiB)
    put("The GPU cannot suspend", pool)

    pool = lab(idle_timeout=60.0)
    pool.idle("a", 10 * GiB)
    pool.after(60.0)
    pool.refused("a", "drain", "Its work on the GPU did not end within 5 s.")
    put("The driver refused to suspend it", pool)

    pool = lab(idle_timeout=60.0, host_memory=15 * GiB)
    pool.parked("b", 10 * GiB, 10 * GiB)
    pool.idle("a", 10 * GiB)
    pool.after(60.0)
    put("The budget of host memory is used up", pool)

    pool = lab(idle_timeout=60.0)
    pool.idle("a", 10 * GiB)
    pool.send(
        ev.SettingsChanged, settings=dataclasses.replace(pool.pool.settings, host_memory=5 * GiB)
    )
    pool.after(60.0)
    put("The budget of host memory is too small for it", pool)

    pool = lab(idle_timeout=60.0, quotas={"me": Quota(suspended=15 * GiB)})
    pool.parked("b", 10 * GiB, 10 * GiB, owner="me")
    pool.idle("a", 10 * GiB, owner="me")
    pool.after(60.0)
    put("Its owner's quota of suspended state is used up", pool)

    pool = lab(idle_timeout=60.0)
    pool.idle("a", 10 * GiB)
    pool.send(ev.HostMemorySeen, available=5 * GiB)
    pool.after(60.0)
    put("The machine has little free memory", pool)

    pool = lab(idle_timeout=60.0)
    pool.idle("a", 10 * GiB)
    pool.send(ev.HostPressure, sessions=("a",))
    pool.after(60.0)
    put("Its own control group has little free memory", pool)


# --------------------------------------------------------------------------- refusals


def refusals(sheet: Sheet) -> None:
    """Write the refusals of requests that can never succeed, even after a long wait."""
    ask = Request(memory=4 * GiB, limit=4 * GiB)
    two = [16 * GiB, 16 * GiB]

    def put(situation: str, request: Request, capacities: list[int] = two, **rules: Any) -> None:
        settings = dataclasses.replace(RULES, **{**HOST, **rules})
        refusal = never(request, Owner("ann"), settings, capacities, suspends=True)
        assert refusal is not None, situation
        _put(sheet, situation, refusal)

    def other(**fields: Any) -> Request:
        return dataclasses.replace(ask, **fields)

    size = {"memory": 20 * GiB, "limit": 20 * GiB}
    less = {"memory": 10 * GiB, "limit": 10 * GiB}
    bounded = {"max_memory_per_kernel": 12 * GiB}
    put("A size of zero", other(memory=0, limit=0))
    put("A limit below the guaranteed memory", other(limit=2 * GiB))
    put("Zero GPUs", other(devices=0))
    put("A compute share of zero", other(compute=0))
    put("An unknown priority class", other(priority="urgent"))
    put("A pool without a GPU", ask, [])
    put("More GPUs than the pool has", other(devices=4))
    put("More than a kernel may have", other(**size), **bounded)
    put(
        "A limit above what a kernel may have",
        other(limit=20 * GiB),
        max_memory_per_kernel=GiB * 12,
    )
    put("More than the largest GPU has", other(**size))
    put("More than two GPUs have", other(**size, devices=2))
    put("A limit above the largest GPU", other(limit=20 * GiB))
    put(
        "More than the quota",
        other(**less),
        quotas={"*": Quota(memory=8 * GiB)},
    )
    put("More GPUs than the quota", other(devices=2), quotas={"*": Quota(devices=1)})
    put("A quota that allows no slice", ask, quotas={"*": Quota(leases=0)})
    put("More than fits in host memory", other(**less), host_memory=8 * GiB)
    put(
        "More than the quota of suspended state",
        other(**less),
        quotas={"*": Quota(suspended=8 * GiB)},
    )


def answers(sheet: Sheet) -> None:
    """Write how the pool answers a kernel that has a session and sends a request."""

    def put(situation: str, actions: list[ev.Action]) -> None:
        found = all_of(actions, ev.Answer) or all_of(actions, ev.HoldRefused)
        assert found, situation
        if found[0].refusal is not None:
            _put(sheet, situation, found[0].refusal)
        else:
            sheet.put(situation, found[0].note)

    pool = lab(gpu(0), gpu(1))
    pool.open("a", 4 * GiB)
    put("Another size, without a slice", pool.change("a", 6 * GiB))
    put("Another size that may grow", pool.change("a", 6 * GiB, limit=8 * GiB))
    put("Release, without a slice", pool.release("a"))
    put("Keep, without a slice", pool.keep("a", 600.0))
    pool.change("a", 4 * GiB)
    pool.hold("a")
    put("Another size, while it attaches", pool.change("a", 6 * GiB))
    pool.change("a", 4 * GiB)
    pool.done("a")
    pool.seen("G0", a=3 * GiB)
    put("A larger size, with a slice", pool.change("a", 6 * GiB))
    put("A smaller size, with a slice", pool.change("a", 4 * GiB))
    put("A size below the memory in use", pool.change("a", 2 * GiB))
    put("Another number of GPUs, once CUDA is in use", pool.change("a", 4 * GiB, devices=2))
    put("Keep", pool.keep("a", 600.0))
    put("End of keep", pool.keep("a", -1.0))
    put("Release, while a cell runs", pool.release("a"))
    pool.drop("a")
    put("Release, while it is being suspended", pool.release("a"))
    put("An unknown session", pool.release("nobody"))

    pool = lab(gpu(0))
    pool.idle("a", 4 * GiB)
    put("Release, while it is idle", pool.release("a"))

    pool = lab(gpu(0))
    pool.idle("a", 4 * GiB)
    pool.running("b", 10 * GiB)
    put("A larger size, and the GPU is full", pool.change("a", 8 * GiB))

    pool = lab(gpu(0))
    pool.running("a", 4 * GiB)
    pool.idle("b", 10 * GiB)
    put("A larger size, and an idle kernel makes room", pool.change("a", 8 * GiB))

    pool = lab(gpu(0), quotas={"ann": Quota(memory=8 * GiB)})
    pool.running("a", 4 * GiB, owner="ann")
    pool.running("b", 4 * GiB, owner="ann")
    put("A larger size, and the quota is in use", pool.change("a", 6 * GiB))

    pool = lab(gpu(0))
    pool.running("a", 16 * GiB)
    wait(pool, "w", 4)
    put("Release, while it waits", pool.release("w"))
    put("Another size, while it waits", pool.change("w", 6 * GiB))

    pool = lab(gpu(0, can_suspend=False))
    pool.idle("a", 4 * GiB)
    pool.seen("G0", a=GiB)
    put("Release, on a GPU that cannot suspend", pool.release("a"))

    pool = lab(gpu(0), host_memory=15 * GiB)
    pool.parked("b", 10 * GiB, 10 * GiB)
    pool.idle("a", 10 * GiB)
    put("Release, and host memory is full", pool.release("a"))

    pool = lab(gpu(0))
    pool.idle("a", 4 * GiB)
    pool.release("a")
    pool.refused("a", "pinned", "it uses managed memory")
    put("Release, and the driver cannot suspend it", pool.release("a"))

    sheet.sub("A program asks for more than its slice")
    pool = lab(gpu(0))
    pool.running("a", 4 * GiB, limit=8 * GiB)
    pool.running("b", 10 * GiB)
    put("It grows", pool.grow("a", GiB))
    put("Beyond its limit", pool.grow("a", 6 * GiB))
    put("No memory is free", pool.grow("a", 3 * GiB))
    put("On a GPU where it has no slice", pool.grow("a", GiB, device="G7"))
    pool = lab(gpu(0))
    pool.running("a", 4 * GiB, limit=12 * GiB)
    pool.running("b", 8 * GiB)
    wait(pool, "w", 8)
    put("The free memory is reserved", pool.grow("a", 2 * GiB))
    pool = lab(gpu(0), host_memory=6 * GiB)
    pool.running("a", 4 * GiB, limit=12 * GiB)
    pool.open("o", 6 * GiB)
    pool.grow("a", 2 * GiB)
    put("Beyond what host memory holds", pool.grow("a", 5 * GiB))
    pool = lab(gpu(0), quotas={"ann": Quota(memory=6 * GiB)})
    pool.running("a", 4 * GiB, limit=6 * GiB, owner="ann")
    pool.running("b", GiB, owner="ann")
    put("Beyond the quota", pool.grow("a", 2 * GiB))
    wait(pool, "w", 5, owner="ann")
    put("The quota is for a waiting kernel", pool.grow("a", GiB))

    sheet.sub("A wait that ends without a slice")
    pool = lab(gpu(0), max_wait=600.0)
    pool.running("a", 16 * GiB)
    wait(pool, "w", 12)
    put("After the longest wait", pool.after(600.0))
    pool = lab(gpu(0))
    wait(pool, "w", 12)
    put("The driver lost its state", pool.failed("w", "The process is gone.", lost=True))
    put("After its kernel was lost", pool.hold("w"))
    put("In an unknown session", pool.hold("nobody"))
    pool = lab(gpu(0))
    pool.running("a", 16 * GiB)
    wait(pool, "w", 12)
    put("The kernel ended", pool.end("w"))
    put("A session that exists already", pool.open("a", GiB))
    pool = lab(gpu(0), gpu(1, "L4"))
    pool.send(ev.DeviceAppeared, device=dataclasses.replace(gpu(1, "L4"), memory_total=8 * GiB))
    pool.open("w", 12 * GiB)
    put("It initialised CUDA on a GPU that is too small", bound(pool, "w", "G1"))


def _put(sheet: Sheet, situation: str, refusal: Refusal) -> None:
    sheet.put(situation, f"{refusal.message} {refusal.next_step}".rstrip(), refusal.code)
