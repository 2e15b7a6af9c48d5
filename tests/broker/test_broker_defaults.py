# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Default sizes that are too large for the machine."""

from __future__ import annotations

import pytest

from .kit import CAPACITY, MiB


def test_too_large_default_gives_a_whole_device_and_warns(make_broker):
    broker = make_broker(default_memory="4GiB").started
    with broker.client() as client:
        for _ in range(2):
            answer = client.call("open", kernel_id="k", label="", request={})
            assert answer["request"]["memory"] == answer["request"]["limit"] == CAPACITY
    assert broker.log.read_text().count("c.GPUPool.default_memory is 4 GiB, but the largest") == 1


@pytest.mark.parametrize(
    ("asked", "want"),
    [
        ({}, (100 * MiB, CAPACITY)),
        ({"memory": 150 * MiB}, (150 * MiB, CAPACITY)),
        ({"memory": 150 * MiB, "limit": 150 * MiB}, (150 * MiB, 150 * MiB)),
    ],
    ids=["nothing", "memory", "both"],
)
def test_kernel_without_a_limit_may_grow_to_the_whole_device(make_broker, asked, want):
    broker = make_broker(default_memory="100MiB", default_limit=None).started
    with broker.client() as client:
        answer = client.call("open", kernel_id="k", label="", request=asked)
    assert (answer["request"]["memory"], answer["request"]["limit"]) == want


def test_slice_cannot_grow_without_the_guard(make_broker):
    """Only the guard can measure how far a slice has grown, and take back grown memory in use."""
    broker = make_broker(default_memory="100MiB", default_limit=None, allow_unguarded=True).started
    with broker.client() as client:
        answer = client.call("open", kernel_id="k", label="", request={}, guarded=False)
    assert answer["request"]["memory"] == answer["request"]["limit"] == 100 * MiB


def test_default_larger_than_host_memory_is_refused(make_broker):
    from jupyter_gpupool.errors import RefusedError

    broker = make_broker(host_memory="64MiB").started
    with broker.client() as client, pytest.raises(RefusedError) as caught:
        client.call("open", kernel_id="k", label="", request={})
    assert caught.value.code == "over-host"
    assert "c.GPUPool.default_memory" in str(caught.value)
