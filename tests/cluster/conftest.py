# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
from __future__ import annotations

import pytest

from .world import World


@pytest.fixture
def world():
    world = World()
    world.settle()
    yield world
    world.audit()
