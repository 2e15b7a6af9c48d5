# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A broker uses only the GPUs that its user's variables, such as ``CUDA_VISIBLE_DEVICES``, name."""

from __future__ import annotations

import pytest

from jupyter_gpupool.errors import RefusedError

from . import kit


def test_broker_tests_and_grants_only_the_given_gpu(make_broker):
    broker = make_broker(attach="cell")
    answer = broker.start(env={**kit.environment(broker.folder), "CUDA_VISIBLE_DEVICES": "1"})
    assert answer["ok"], answer
    status = broker.status()
    (device,) = status["devices"]
    assert device["index"] == 1
    assert device["can_suspend"]
    assert status["limited"] == "CUDA_VISIBLE_DEVICES='1' limits the pool to GPU 1."
    assert status["limited"] in broker.tail()
    assert broker.tail().count("tier ") == 1
    with broker.client() as client:
        found = client.call("open", kernel_id="k")["env"]["CUDA_VISIBLE_DEVICES"]
        assert found == device["uuid"]
        with pytest.raises(RefusedError):
            client.call("open", kernel_id="two", request={"devices": 2})


def test_unknown_gpu_in_a_variable_is_a_readable_error(make_broker):
    broker = make_broker(attach="cell")
    answer = broker.start(env={**kit.environment(broker.folder), "SLURM_JOB_GPUS": "5"})
    assert answer["ok"], answer
    status = broker.status()
    assert status["devices"] == []
    assert status["problem"].startswith("SLURM_JOB_GPUS='5' names none of the GPUs")
    with broker.client() as client, pytest.raises(RefusedError) as error:
        client.call("open", kernel_id="k")
    assert "SLURM_JOB_GPUS='5'" in error.value.message


def test_configuration_restricts_the_given_gpus(make_broker):
    broker = make_broker(attach="cell", devices=["0"])
    env = {**kit.environment(broker.folder), "CUDA_VISIBLE_DEVICES": "1"}
    answer = broker.start(env=env)
    assert not answer["ok"]
    assert "c.GPUPool.devices names '0'" in answer["message"]
    assert "CUDA_VISIBLE_DEVICES='1' limits the pool to GPU 1" in answer["message"]


def test_broker_started_in_a_kernel_ignores_the_pools_variable(make_broker):
    broker = make_broker(attach="cell")
    env = {
        **kit.environment(broker.folder),
        "CUDA_VISIBLE_DEVICES": "GPU-of-the-session",
        "GPUPOOL_HIDDEN": "0",
    }
    assert broker.start(env=env)["ok"]
    assert [d["index"] for d in broker.status()["devices"]] == [0]
