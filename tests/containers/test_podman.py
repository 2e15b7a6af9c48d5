# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Kernels in Podman's containers, from images with different Pythons and C libraries."""

from __future__ import annotations

import os
import shutil

import pytest

from .kit import running
from .podman import PodmanBox, images, sweep
from .test_containers import (  # noqa: F401  - the same tests, with the fixtures of this module
    test_container_cannot_reach_another_users_session,
    test_container_in_a_user_namespace_is_served,
    test_container_without_memory_for_a_suspend_keeps_its_slice,
    test_containers_with_one_user_id_share_gpus,
    test_doctor_says_what_a_container_lacks,
    test_user_is_not_served_after_the_folder_is_removed,
)

#: Maps each image that is too old to the line that its kernel writes to the log.
TOO_OLD = {
    "bullseye": "Pooled GPU kernels need Python 3.10 or newer, and this image has 3.9",
}

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the machine's broker"),
    pytest.mark.skipif(
        not (images() and shutil.which("podman")),
        reason="run make test-containers, which installs Podman and makes images",
    ),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def site():
    sweep()
    with running(max_sessions_per_user=3) as found:
        yield found.started


def of_image(name):
    """Return a class of containers that use this image."""
    return type("ImageBox", (PodmanBox,), {"image": name})


@pytest.fixture(params=[name for name in images() if name not in TOO_OLD])
def machine(site, request):
    """The machine, without containers and users. Each test runs once with each image."""
    site.kind = of_image(request.param)
    yield site
    site.clear()


@pytest.mark.parametrize("image", [name for name in images() if name in TOO_OLD])
def test_kernel_of_an_old_image_runs_without_a_gpu_and_says_why(site, image):
    site.kind = of_image(image)
    site.user("ada")
    kernel = site.box("ada").kernel()
    assert kernel.run("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])") == "-1"
    assert f"GPU pool: this kernel runs without a GPU: {TOO_OLD[image]}." in kernel.said()
    site.clear()
