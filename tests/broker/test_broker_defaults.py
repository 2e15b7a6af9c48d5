# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What a kernel gets that does not ask, on a machine the defaults do not fit."""

from __future__ import annotations

import pytest

from jupyter_gpupool.broker.requests import blame_default, fit_unasked
from jupyter_gpupool.pool.model import PoolSettings, Quota, Refusal, Request

from .kit import CAPACITY

DEFAULT = Request(memory=40, limit=80)


@pytest.mark.parametrize(
    ("fields", "rules", "request_", "want"),
    [
        ({}, {}, DEFAULT, (16, 16)),
        ({}, {"max_memory_per_kernel": 8}, DEFAULT, (8, 8)),
        ({"memory": 40}, {}, DEFAULT, (40, 40)),
        ({"limit": 80}, {}, DEFAULT, (16, 80)),
        ({}, {}, Request(memory=4, limit=12), (4, 12)),
        ({"devices": 2}, {}, Request(memory=40, limit=80, devices=2), (10, 10)),
        ({"devices": 3}, {}, Request(memory=40, limit=80, devices=3), (40, 80)),
        ({}, {"quotas": {"*": Quota(memory=10)}}, Request(memory=4, limit=80), (4, 10)),
        ({"memory": 12}, {"quotas": {"*": Quota(memory=10)}}, Request(12, 80), (12, 12)),
    ],
)
def test_only_what_nobody_asked_for_is_cut(fields, rules, request_, want):
    settings = PoolSettings(host_memory=1000, **rules)
    found = fit_unasked(request_, fields, settings, "ann", [10, 16])
    assert (found.memory, found.limit) == want


def test_a_refused_default_names_the_option_unless_somebody_asked():
    refusal = Refusal("over-host", "4 GiB was asked for; no.", "Ask for less.")
    assert blame_default(refusal, {"memory": 4}) is refusal
    assert "it is c.GPUPool.default_memory." in blame_default(refusal, {}).message
    other = Refusal("no-device", "There is no GPU.")
    assert blame_default(other, {}) is other


def test_a_default_larger_than_a_device_gives_a_whole_one_and_warns_once(make_broker):
    broker = make_broker(default_memory="4GiB").started
    with broker.client() as client:
        for _ in range(2):
            answer = client.call("open", kernel_id="k", label="", request={})
            assert answer["request"]["memory"] == answer["request"]["limit"] == CAPACITY
    assert broker.log.read_text().count("c.GPUPool.default_memory is 4 GiB and the largest") == 1


def test_a_default_that_the_host_can_not_keep_is_refused_by_its_name(make_broker):
    from jupyter_gpupool.errors import RefusedError

    broker = make_broker(host_memory="64MiB").started
    with broker.client() as client, pytest.raises(RefusedError) as caught:
        client.call("open", kernel_id="k", label="", request={})
    assert caught.value.code == "over-host"
    assert "c.GPUPool.default_memory" in str(caught.value)
