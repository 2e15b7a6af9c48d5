# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The pool's texts about groups, shares, budgets, and preemption of running work."""

from __future__ import annotations

import dataclasses
from typing import Callable

from jupyter_gpupool.kernel.waits import sentence
from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.groups import Daily, Group, Portion
from jupyter_gpupool.pool.model import PREEMPT_ALL, Owner, Quota

from ..pool.builders import Lab, all_of
from .pool import GiB, gpu, host_budget_full, lab, others_quota_full, state_too_large, wait
from .sheet import Sheet

CAP = {"groups": {"bio": Group(cap=Portion(bytes=16 * GiB))}}


def run(pool: Lab, name: str, size: int, **fields: object) -> None:
    """Open a session that computes with ``size`` GiB."""
    pool.running(name, size * GiB, **fields)


def capped() -> tuple[Lab, str]:
    pool = lab(**CAP)
    run(pool, "a", 12, owner=Owner("ann", "bio"))
    wait(pool, "w", 8, owner=Owner("ben", "bio"))
    return pool, "w"


def cap_reserved() -> tuple[Lab, str]:
    pool, _ = capped()
    wait(pool, "v", 4, owner=Owner("bob", "bio"))
    return pool, "v"


def stopped() -> tuple[Lab, str]:
    pool = lab(gpu(0), quotas={"ann": Quota(daily=Daily(3600.0, then="stop"))})
    run(pool, "w", 16, owner="ann")
    pool.after(3700)
    pool.suspended("w", ("G0", 16 * GiB))
    return pool, "w"


def stopped_by_day() -> tuple[Lab, str]:
    pool = lab(gpu(0))
    run(pool, "w", 16, priority="batch")
    pool.after(8 * 3600)
    day = {"classes_allowed": frozenset({"notebook"}), "classes_open": {"batch": 20 * 3600.0}}
    settings = dataclasses.replace(pool.pool.settings, **day)
    pool.send(ev.SettingsChanged, settings=settings)
    pool.suspended("w", ("G0", 16 * GiB))
    return pool, "w"


def lower_class() -> tuple[Lab, str]:
    pool = lab(gpu(0), preempt=PREEMPT_ALL)
    run(pool, "w", 16, priority="batch")
    pool.after(60)
    wait(pool, "high", 16)
    pool.suspended("w", ("G0", 16 * GiB))
    return pool, "w"


def turn_over() -> tuple[Lab, str]:
    pool = lab(gpu(0), preempt=PREEMPT_ALL, half_life=3600.0)
    run(pool, "w", 16, owner="ann")
    pool.after(600)
    wait(pool, "other", 16, owner="bob")
    pool.suspended("w", ("G0", 16 * GiB))
    return pool, "w"


WAITS: tuple[tuple[str, str, Callable[[], tuple[Lab, str]]], ...] = (
    ("The group has its cap in use", "cap", capped),
    ("An earlier kernel of the group waits for the cap", "behind-group", cap_reserved),
    ("The budget of today is used up and stops what runs", "budget", stopped),
    ("A schedule closed its class in the middle of a cell", "class-closed", stopped_by_day),
    ("A higher class took its slice in the middle of a cell", "busy", lower_class),
    ("Its turn was over in the middle of a cell", "busy", turn_over),
)


def waits(sheet: Sheet) -> set[str]:
    """Write the reasons for which kernels wait; return the rules of these reasons."""
    met = set()
    for situation, rule, scene in WAITS:
        pool, name = scene()
        told = pool.pool.explain(name)
        assert told.reason is not None, situation
        assert told.reason.rule == rule, f"{situation}: {told.reason.rule}"
        met.add(told.reason.rule)
        sheet.put(situation, sentence(told.text), rule)
    return met


def refusals(sheet: Sheet) -> None:
    """Write the refusals that name a group or a budget."""

    def put(situation: str, actions: list[ev.Action]) -> None:
        found = [a.refusal for a in actions if isinstance(a, (ev.Answer, ev.HoldRefused))]
        (refusal,) = found
        assert refusal is not None
        sheet.put(situation, f"{refusal.message} {refusal.next_step}", refusal.code)

    pool = lab(groups={"bio": Group(cap=Portion(bytes=8 * GiB))})
    actions = pool.open("w", 12 * GiB, owner=Owner("ann", "bio"), rid="r")
    put("More than the cap of its group", actions)
    for whose, group in (("Its user", ""), ("Its group", "bio")):
        daily = Daily(3600.0, then="refuse")
        quotas = {} if group else {"ann": Quota(daily=daily)}
        groups = {"bio": Group(daily=daily)} if group else {}
        pool = lab(gpu(0), quotas=quotas, groups=groups)
        run(pool, "a", 16, owner=Owner("ann", group))
        pool.after(3700)
        pool.end("a")
        pool.open("w", 4 * GiB, owner=Owner("ann", group))
        put(f"{whose} has no GPU-seconds left today", pool.hold("w"))


def why(sheet: Sheet) -> None:
    """Write ``Pool.why`` for kernels that wait, and for kernels that have a slice."""

    def put(situation: str, pool: Lab, name: str) -> None:
        told = pool.pool.why(name)
        sheet.put(situation, "\n".join((*told.lines, *told.standing)))

    groups = {
        "bio": Group(guarantee=Portion(percent=50)),
        "phy": Group(guarantee=Portion(bytes=8 * GiB), weight=3.0),
    }
    pool = lab(groups=groups, preempt=PREEMPT_ALL, half_life=3600.0)
    run(pool, "pia", 8, owner=Owner("pia", "phy"), priority="batch")
    run(pool, "pam", 16, owner=Owner("pam", "phy"))
    run(pool, "mine", 8, owner=Owner("ben"), label="train.ipynb")
    pool.after(60)
    wait(pool, "w", 12, owner=Owner("ben"))
    put("It waits, and some of what it needs is its owner's", pool, "w")
    put("It has a slice for which another one waits", pool, "mine")
    put("It has a slice, and its group is above its guarantee", pool, "pam")
    wait(pool, "b", 16, owner=Owner("bea", "bio"))
    put("What it asks for is guaranteed to its group", pool, "b")
    put("It waits behind a guarantee", pool, "w")
    pool, name = turn_over()
    put("Its turn is over", pool, name)
    pool, name = stopped()
    put("Its budget is used up", pool, name)
    pool = lab(gpu(0), preempt=PREEMPT_ALL)
    run(pool, "a", 4, limit=16 * GiB)
    pool.grow("a", 12 * GiB)
    put("It has grown, and no kernel waits", pool, "a")
    pool, name = state_too_large()
    put("Its GPU has a state that is larger than host memory", pool, name)
    put("Its state is larger than host memory", pool, "a")
    pool, name = host_budget_full()
    put("Host memory has no room for the state in its way", pool, name)
    pool, name = others_quota_full()
    put("The user of the kernel in its way may keep no more suspended state", pool, name)
    pool.open("d", 4 * GiB)
    put("It has no slice and waits for none", pool, "d")


def warnings(sheet: Sheet) -> None:
    """Write the warnings to a kernel that cannot be suspended, and the message about its end."""
    pool = lab(gpu(0, can_suspend=False), preempt=PREEMPT_ALL, unsuspendable="end")
    run(pool, "a", 16, priority="batch")
    pool.after(60)
    wait(pool, "w", 8)
    pool.after(4000)
    for a in all_of(pool.past, ev.Warn):
        sheet.put(f"Stage {a.stage}", a.message)
    for a in all_of(pool.past, ev.EndSession):
        sheet.put("Its end", a.message)
