# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The default sizes of a kernel's request, and the devices that a new kernel sees."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_gpupool.pool.limits import (
    blame_default,
    changed_request,
    default_request,
    fit_unasked,
)
from jupyter_gpupool.pool.model import Device, DeviceView, PoolSettings, Quota, Refusal, Request
from jupyter_gpupool.pool.placement import home_devices

# ---------------------------------------------------------------------- sizes

DEFAULT = Request(memory=40, limit=80)


@pytest.mark.parametrize(
    ("asked", "rules", "request_", "want"),
    [
        ("", {}, DEFAULT, (16, 16)),
        ("", {"max_memory_per_kernel": 8}, DEFAULT, (8, 8)),
        ("memory", {}, DEFAULT, (40, 40)),
        ("limit", {}, DEFAULT, (16, 80)),
        ("", {}, Request(memory=4, limit=12), (4, 12)),
        ("devices", {}, Request(memory=40, limit=80, devices=2), (10, 10)),
        ("devices", {}, Request(memory=40, limit=80, devices=3), (40, 80)),
        ("", {"quotas": {"*": Quota(memory=10)}}, Request(memory=4, limit=80), (4, 10)),
        ("memory", {"quotas": {"*": Quota(memory=10)}}, Request(12, 80), (12, 12)),
    ],
)
def test_pool_reduces_default_sizes_and_keeps_requested_sizes(asked, rules, request_, want):
    settings = PoolSettings(host_memory=1000, **rules)
    found = fit_unasked(request_, asked.split(), settings, "ann", [10, 16])
    assert (found.memory, found.limit) == want


@given(
    memory=st.integers(1, 40),
    more=st.integers(0, 40),
    devices=st.integers(1, 3),
    asked=st.sets(st.sampled_from(["memory", "limit", "devices"])),
    capacities=st.lists(st.integers(0, 30), max_size=4),
)
def test_request_with_reduced_defaults_is_valid(memory, more, devices, asked, capacities):
    request = Request(memory, memory + more, devices)
    found = fit_unasked(request, asked, PoolSettings(), "ann", capacities)
    assert 0 < found.memory <= found.limit
    assert found.memory <= request.memory
    assert found.memory == request.memory or "memory" not in asked
    assert found.limit == request.limit or "limit" not in asked
    assert fit_unasked(found, asked, PoolSettings(), "ann", capacities) == found


def test_a_kernel_that_asks_for_nothing_gets_the_defaults():
    settings = PoolSettings(default_memory=3, default_limit=5, default_priority="batch")
    assert default_request(settings) == Request(3, 5, priority="batch")


@pytest.mark.parametrize(
    ("metered", "rules", "want"),
    [
        (True, {}, (4, 16)),
        (True, {"max_memory_per_kernel": 8}, (4, 8)),
        (True, {"quotas": {"*": Quota(memory=10)}}, (4, 10)),
        (True, {"default_limit": 5}, (4, 5)),
        (False, {}, (4, 4)),
        (False, {"default_limit": 5}, (4, 5)),
    ],
)
def test_default_limit_is_a_whole_device_if_growth_is_metered(metered, rules, want):
    settings = PoolSettings(default_memory=4, **rules)
    request = default_request(settings, [10, 16], metered=metered)
    found = fit_unasked(request, (), settings, "ann", [10, 16])
    assert (found.memory, found.limit) == want


def test_default_limit_for_two_devices_is_the_smaller_capacity():
    settings = PoolSettings(default_memory=4)
    request = changed_request(default_request(settings, [10, 16]), {"devices": 2})
    assert fit_unasked(request, ["devices"], settings, "ann", [10, 16]).limit == 10


@pytest.mark.parametrize(
    ("base", "asked", "want"),
    [
        (Request(4, 4), {"memory": 6}, (6, 6)),
        (Request(4, 9), {"memory": 6}, (6, 9)),
        (Request(4, 9), {"memory": 12}, (12, 12)),
        (Request(4, 4), {"memory": 6, "limit": 7}, (6, 7)),
        (Request(4, 4), {"limit": 7}, (4, 7)),
    ],
    ids=["memory alone", "a limit above it", "more than the limit", "both", "the limit alone"],
)
def test_default_limit_rises_to_the_requested_memory(base, asked, want):
    found = changed_request(base, asked)
    assert (found.memory, found.limit) == want


def test_refusal_of_a_default_size_names_the_option():
    refusal = Refusal("over-host", "4 GiB was asked for; no.", "Ask for less.")
    assert blame_default(refusal, {"memory"}) is refusal
    assert "so it asked for c.GPUPool.default_memory." in blame_default(refusal, ()).message
    other = Refusal("no-device", "There is no GPU.")
    assert blame_default(other, ()) is other


# ---------------------------------------------------------------------- devices


def view(index: int, free: int = 16, *, capacity: int = 16, granted: int = 0, drained: str = ""):
    device = Device(f"G{index}", index, "test", "A", 16)
    return DeviceView(device, capacity, granted, capacity - granted - free, drained)


def home(*views: DeviceView, memory: int = 10, count: int = 1, **fields: Any) -> str:
    """Return the numbers of the chosen devices. ``kernels`` has the count of kernels by device."""
    kernels = {f"G{at}": n for at, n in enumerate(fields.pop("kernels", ()))}
    for name in ("seen", "planned"):
        fields[name] = tuple(f"G{digit}" for digit in fields.get(name, ""))
    found = home_devices(views, kernels, memory=memory, count=count, **fields)
    return "".join(uuid[1:] for uuid in found)


def test_new_kernel_sees_the_device_that_the_fewest_kernels_see():
    assert home(view(0), view(1), view(2), kernels=(2, 1, 1)) == "1"


def test_device_with_room_comes_before_one_with_few_kernels():
    assert home(view(0, free=4), view(1), kernels=(0, 9)) == "1"


def test_large_enough_device_comes_before_a_small_free_one():
    assert home(view(0, free=0), view(1, capacity=8, free=8)) == "0"


def test_equal_devices_are_ordered_by_grants_then_number():
    assert home(view(0, free=10, granted=6), view(1), view(2)) == "1"


def test_drained_device_is_chosen_only_if_it_is_the_only_one():
    assert home(view(0, drained="Xid 79"), view(1, free=0)) == "1"
    assert home(view(0, drained="Xid 79")) == "0"


def test_kernel_sees_as_many_devices_as_it_asks_for():
    assert home(view(0), view(1), view(2), count=2, kernels=(1, 0, 0)) == "12"
    assert home(view(0), count=2) == "0"


def test_planned_devices_come_before_all_others():
    assert home(view(0), view(1), seen="0", planned="1") == "1"


def test_kernel_keeps_a_device_with_room():
    assert home(view(0), view(1), seen="0", kernels=(9, 0)) == "0"


def test_kernel_changes_from_a_full_device_to_one_with_room():
    assert home(view(0, free=4), view(1), seen="0") == "1"
    assert home(view(0, drained="Xid 79"), view(1), seen="0") == "1"
    assert home(view(1), seen="0") == "1", "device 0 has gone"


def test_kernel_keeps_its_device_if_no_device_has_room():
    assert home(view(0, free=4), view(1, free=9), seen="0") == "0"
    assert home(view(0, free=4), view(1), count=2, seen="01") == "01"


def test_only_the_device_without_room_is_replaced():
    assert home(view(0, free=4), view(1), view(2), count=2, seen="01", kernels=(1, 1, 0)) == "12"
    crowded = (1, 5, 0, 0)
    assert home(*map(view, (1, 2, 3)), view(0, free=4), count=2, seen="01", kernels=crowded) == "12"


def test_new_choice_is_made_if_the_number_of_devices_changes():
    assert home(view(0), view(1), count=2, seen="0") == "01"
    assert home(view(0), view(1), count=1, seen="01") == "0"


PLAIN = st.tuples(st.integers(0, 8), st.integers(0, 8), st.sampled_from(["", "", "Xid 79"]))
VIEWS = st.lists(PLAIN, min_size=1, max_size=5).map(
    lambda found: [
        view(at, free, granted=granted, drained=drained)
        for at, (free, granted, drained) in enumerate(found)
    ]
)


@given(
    views=VIEWS,
    counts=st.lists(st.integers(0, 3), min_size=5, max_size=5),
    memory=st.integers(1, 12),
    count=st.integers(1, 4),
    data=st.data(),
)
def test_home_devices_are_stable_and_change_only_to_free_ones(views, counts, memory, count, data):
    uuids = [v.device.uuid for v in views]
    seen = tuple(data.draw(st.lists(st.sampled_from(uuids), unique=True)))
    kernels = dict(zip(uuids, counts, strict=False))

    def choose(seen, devices=views):
        return home_devices(devices, kernels, memory=memory, count=count, seen=seen)

    found = choose(seen)
    assert 0 < len(found) == len(set(found)) <= count
    if len(found) == count:
        assert choose(found) == found, "a second choice changes nothing"
    assert choose(seen, data.draw(st.permutations(views))) == found, "not by the order of the list"
    room = {v.device.uuid for v in views if not v.drained_reason and v.free >= memory}
    if len(seen) == count and found != seen:
        assert set(found) <= room
        assert not set(seen) <= room
        assert set(seen) & room <= set(found), "what has room stays"
