# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The pool offers a largest size: its rules accept a request of this size, but no larger one."""

from __future__ import annotations

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from jupyter_gpupool.pool.limits import most_memory, never
from jupyter_gpupool.pool.model import MiB, Owner, PoolSettings, Quota, Request

SIZES = st.integers(0, 40 * MiB)
QUOTAS = st.builds(
    Quota,
    memory=st.none() | SIZES,
    devices=st.none() | st.integers(0, 4),
    leases=st.none() | st.integers(0, 2),
    suspended=st.none() | SIZES,
)


@given(
    devices=st.integers(1, 4),
    capacities=st.lists(st.integers(1, 40 * MiB), max_size=4),
    kernel=st.none() | SIZES,
    host=SIZES,
    quotas=st.dictionaries(st.sampled_from(("me", "*", "you")), QUOTAS),
    suspends=st.booleans(),
)
def test_offered_maximum_is_the_largest_accepted_request(
    devices, capacities, kernel, host, quotas, suspends
):
    settings = PoolSettings(max_memory_per_kernel=kernel, host_memory=host, quotas=quotas)
    capacities.sort(reverse=True)

    def refusal(memory):
        request = Request(memory=memory, limit=memory, devices=devices)
        return never(request, Owner("me"), settings, capacities, suspends=suspends)

    most = most_memory(devices, Owner("me"), settings, capacities, suspends=suspends)
    event("no size" if most is None else "a size")
    if most is not None:
        assert refusal(most) is None
    for more in (1, MiB):
        refused = refusal((most or 0) + more)
        assert refused is not None
        assert refused.code.startswith(("over-", "too-many-devices", "no-device"))


@pytest.mark.parametrize(
    ("devices", "rules", "most"),
    [
        (1, {}, 40),
        (2, {}, 30),
        (3, {}, None),
        (2, {"quotas": {"*": Quota(memory=25)}}, 12),
        (1, {"max_memory_per_kernel": 7}, 7),
        (2, {"host_memory": 50}, 25),
        (2, {"quotas": {"me": Quota(suspended=9), "*": Quota(memory=1)}}, 4),
        (2, {"quotas": {"*": Quota(devices=1)}}, None),
        (1, {"quotas": {"*": Quota(leases=0)}}, None),
    ],
)
def test_offered_maximum_follows_the_tightest_rule(devices, rules, most):
    settings = PoolSettings(**rules)
    assert most_memory(devices, Owner("me"), settings, [40, 30], suspends=True) == most


def test_host_memory_is_no_limit_if_devices_cannot_suspend():
    settings = PoolSettings(host_memory=5, quotas={"*": Quota(suspended=5)})
    assert most_memory(1, Owner("me"), settings, [40], suspends=False) == 40
