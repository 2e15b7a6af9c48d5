# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from jupyter_gpupool.pool import machine, schedule
from jupyter_gpupool.pool.facts import Facts
from jupyter_gpupool.pool.schedule import Plan

from .builders import Lab
from .checks import check_pool


@pytest.fixture(scope="session", autouse=True)
def skipped_passes_would_be_empty() -> Iterator[None]:
    """Whenever ``plan`` skips the full pass, check that a full pass makes the same plan."""

    def checked(facts: Facts, before: Plan, relieve: Iterable[str] = ()) -> Plan:
        found = schedule.plan(facts, before, relieve)
        if not found.order:
            assert found == schedule._Pass(facts, before).run(relieve)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "plan", checked)
        yield


@pytest.fixture
def lab() -> Iterator[Lab]:
    """A lab with two devices of 16 bytes and much host memory.

    At the end of the test, the fixture checks all accounts.
    """
    lab = Lab()
    yield lab
    check_pool(lab.pool, lab.now)


@pytest.fixture
def make() -> Iterator[type[Lab]]:
    """A class that makes labs with other devices or settings.

    At the end of the test, the fixture checks all accounts of each lab.
    """
    made: list[Lab] = []

    class Made(Lab):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    yield Made
    for each in made:
        check_pool(each.pool, each.now)
