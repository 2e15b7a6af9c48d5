# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Default sizes on machines that are too small for them."""

from __future__ import annotations

import pytest

from .kit import CAPACITY


def test_default_larger_than_a_device_gives_all_of_it_and_warns(make_broker):
    broker = make_broker(default_memory="4GiB").started
    with broker.client() as client:
        for _ in range(2):
            answer = client.call("open", kernel_id="k", label="", request={})
            assert answer["request"]["memory"] == answer["request"]["limit"] == CAPACITY
    assert broker.log.read_text().count("c.GPUPool.default_memory is 4 GiB and the largest") == 1


def test_default_that_host_memory_cannot_keep_is_refused(make_broker):
    from jupyter_gpupool.errors import RefusedError

    broker = make_broker(host_memory="64MiB").started
    with broker.client() as client, pytest.raises(RefusedError) as caught:
        client.call("open", kernel_id="k", label="", request={})
    assert caught.value.code == "over-host"
    assert "c.GPUPool.default_memory" in str(caught.value)
