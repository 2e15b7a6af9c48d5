# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Offers of a smaller size: a waiting session that accepts the offer starts at once."""

from __future__ import annotations

import copy
import dataclasses
import random

import pytest

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.groups import Group, Portion
from jupyter_gpupool.pool.model import GiB, Owner, Quota

from .builders import device, got
from .world import World

MiB = 1 << 20


def offered(lab, name):
    return lab.pool.why(name).starts_with


def test_waiting_session_is_offered_what_is_free(make):
    lab = make(device(0))
    lab.running("a", 11)
    lab.open("w", 8)
    lab.hold("w")
    assert offered(lab, "w") == 5
    assert "With 5 B instead of 8 B, it would start now." in lab.pool.why("w").lines
    got(lab.change("w", 5), ev.Attach, session="w")


def test_offer_needs_a_waiting_session_and_free_memory(make):
    lab = make(device(0))
    lab.running("a", 16)
    lab.open("w", 8)
    assert offered(lab, "w") is None
    lab.hold("w")
    assert offered(lab, "w") is None
    assert offered(lab, "a") is None


def test_offer_takes_no_bytes_that_the_head_reserves(make):
    lab = make(device(0))
    lab.running("a", 11)
    lab.open("head", 16)
    lab.hold("head")
    lab.open("w", 8)
    lab.hold("w")
    assert offered(lab, "w") is None, "it would delay the head"
    assert offered(lab, "head") == 5


def test_offer_counts_every_device_of_the_request(make):
    lab = make(device(0), device(1))
    lab.running("a", 12)
    lab.open("w", 16, devices=2)
    lab.hold("w")
    assert offered(lab, "w") == 4
    assert "With 4 B on each GPU instead of 16 B, it would start now." in lab.pool.why("w").lines


def test_offer_stays_within_quota_and_cap(make):
    lab = make(device(0), quotas={"ann": Quota(memory=12)})
    lab.running("a", 9, owner="ann")
    lab.open("w", 7, owner="ann")
    lab.hold("w")
    assert offered(lab, "w") == 3
    groups = {"lab": Group(cap=Portion(bytes=10))}
    lab = make(device(0), groups=groups)
    lab.running("a", 8, owner=Owner("ann", "lab"))
    lab.open("w", 6, owner=Owner("bob", "lab"))
    lab.hold("w")
    assert offered(lab, "w") == 2


@pytest.mark.parametrize(
    ("taken", "size"),
    [
        (12 * GiB + 700 * MiB, 3 * GiB),
        (15 * GiB + 400 * MiB, 512 * MiB),
        (15 * GiB + 700 * MiB, None),  # 320 MiB is left, too little for a context
    ],
)
def test_offer_is_a_round_size_that_fits_a_context(make, taken, size):
    big = device(0, 16 * GiB, context_bytes=400 * MiB)
    lab = make(big, host_memory=100 * GiB)
    lab.running("a", taken)
    lab.open("w", 8 * GiB)
    lab.hold("w")
    assert offered(lab, "w") == size


@pytest.mark.parametrize(("state", "size"), [(6, 8), (7, 8), (8, None)])
def test_offer_has_room_for_the_state_and_its_headroom(make, state, size):
    lab = make(device(0))
    lab.parked("w", state, 10)
    lab.running("a", 8)
    lab.hold("w")
    assert offered(lab, "w") == size


@pytest.mark.parametrize("seed", [0, 2, 3, 5])
def test_session_that_accepts_an_offer_attaches_at_once(seed):
    one = World(random.Random(seed), shares=bool(seed % 2), deep=False)
    made = 0
    while one.events < 500:
        one.step()
        for s in one.pool.records():
            size = one.pool.why(s.id).starts_with if s.state == "queued" else None
            if size is None:
                continue
            made += 1
            asked = s.request
            limit = size if asked.limit == asked.memory else max(size, asked.limit)
            other = dataclasses.replace(asked, memory=size, limit=limit)
            trial = copy.deepcopy(one.pool)
            event = ev.RequestChanged(now=one.now, session=s.id, request=other, rid="offer")
            got(trial.handle(event), ev.Attach, session=s.id)
    assert made > 20, "the events must make offers"
