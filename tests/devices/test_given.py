# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Which GPUs the variables of a batch system, a container or a user give to the broker."""

from __future__ import annotations

import pytest

from jupyter_gpupool.devices.nvidia.visibility import given

ROWS = [{"index": i, "minor": i, "uuid": f"GPU-{i}{i}{i}{i}aaaa", "mig": False} for i in range(4)]
ALL = [0, 1, 2, 3]


def numbers(environ, rows=ROWS):
    found = given(rows, environ)
    return [row["index"] for row in found.rows], found.limit


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ALL),
        ({"CUDA_VISIBLE_DEVICES": "3"}, [3]),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, [0, 2]),
        ({"CUDA_VISIBLE_DEVICES": "1,9,2"}, [1]),  # the driver ends the list before 9, too
        ({"CUDA_VISIBLE_DEVICES": "GPU-2222"}, [2]),
        ({"CUDA_VISIBLE_DEVICES": "gpu-2222AAAA,GPU-0000"}, [0, 2]),
        ({"SLURM_JOB_GPUS": "1,2"}, [1, 2]),
        ({"SLURM_JOB_GPUS": "1-3"}, [1, 2, 3]),
        ({"SLURM_STEP_GPUS": "2", "SLURM_JOB_GPUS": "1,2"}, [2]),
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_JOB_GPUS": "3"}, [0]),  # Slurm sets both variables
        ({"GPU_DEVICE_ORDINAL": "1"}, [1]),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, ALL),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, ALL),
        ({"NVIDIA_VISIBLE_DEVICES": ""}, ALL),
        ({"NVIDIA_VISIBLE_DEVICES": "1,2"}, [1, 2]),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-1111"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "1,2", "NVIDIA_VISIBLE_DEVICES": "2,3"}, [2]),
    ],
)
def test_broker_gets_only_the_gpus_that_the_variables_name(environ, expected):
    found, limit = numbers(environ)
    assert found == expected
    assert bool(limit) == (expected != ALL)
    assert all(f"{name}=" in limit for name in environ if len(environ) == 1 and limit)


@pytest.mark.parametrize("name", ["SLURM_JOB_GPUS", "NVIDIA_VISIBLE_DEVICES"])
def test_numbers_beyond_the_visible_gpus_exclude_no_gpu(name):
    """A job with cgroups, or a container, sees the machine's GPUs 5 and 7 as its GPUs 0 and 1."""
    assert numbers({name: "5,7"}, ROWS[:2]) == ([0, 1], "")


def test_numbers_of_slurm_are_numbers_of_device_files():
    rows = [{**row, "minor": row["index"] + 4} for row in ROWS]
    assert numbers({"SLURM_JOB_GPUS": "5,6"}, rows)[0] == [1, 2]


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, "gives the broker no GPU"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "gives the broker no GPU"),
        ({"NVIDIA_VISIBLE_DEVICES": "none"}, "gives the broker no GPU"),
        ({"CUDA_VISIBLE_DEVICES": "9"}, "names none of the GPUs of this machine"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-ffff"}, "names none of the GPUs of this machine"),
        ({"SLURM_JOB_GPUS": "8"}, "names none of the GPUs of this machine"),
    ],
)
def test_variable_without_a_gpu_gives_the_broker_no_gpu(environ, words):
    found, limit = numbers(environ)
    assert found == []
    assert words in limit
    assert next(iter(environ)) in limit
