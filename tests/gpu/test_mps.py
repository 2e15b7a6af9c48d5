# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A client of NVIDIA's multi-process service (MPS). According to reports, no driver suspends it."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from jupyter_gpupool.devices.nvidia.service import DeviceService

from .machine import MiB
from .target import target
from .workloads import expected

CONTROL = "nvidia-cuda-mps-control"


@pytest.fixture
def daemon(machine, tmp_path):
    """Run an MPS control daemon for this test alone; yield the variables for its clients."""
    if shutil.which(CONTROL) is None:
        pytest.skip(f"{CONTROL} is not installed")
    mine = {}
    for name in ("PIPE", "LOG"):
        folder = tmp_path / name.lower()
        folder.mkdir()
        mine[f"CUDA_MPS_{name}_DIRECTORY"] = str(folder)
    env = {**machine.env, **mine}
    subprocess.run([CONTROL, "-d"], env=env, check=True, timeout=30)
    try:
        yield mine
    finally:
        subprocess.run([CONTROL], input="quit -t 5\n", text=True, env=env, check=False, timeout=30)


@pytest.mark.gpu
async def test_mps_client_cannot_be_suspended_and_continues(machine, daemon, note):
    """The emulated driver has no multi-process service."""
    service = DeviceService(env=machine.env)
    try:
        devices = await service.start()
        async with target("cuda-core", {**machine.env, **daemon}) as process:
            await process.do("put", "a", 64 * MiB, 3)
            outcome = await service.suspend(process.root, [devices[0].uuid], session="mps")
            note(status=outcome.status, message=outcome.message)
            assert outcome.status == "pinned", outcome
            await process.do("steps", "a", 2, 5)
            assert await process.do("digest", "a") == expected(64 * MiB, 3, 10)
    finally:
        await service.close()
