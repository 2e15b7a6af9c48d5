# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Fixtures: the machine under test, the notebooks on it, and the notes of each test."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.devices.conftest import pytest_pyfunc_call  # noqa: F401 - tests may be coroutines
from tests.e2e.conftest import kernelspec  # noqa: F401 - of those that start notebooks

from .machine import driver_up
from .machine import machine as _machine
from .session import items, stage

#: The name of an environment variable. If it is set to a path, this file gets one line of JSON for
#: each test, with its outcome and notes.
REPORT = "GPUPOOL_GPU_REPORT"

#: The workloads that can also run on an emulated device. The others need NVIDIA's CUDA runtime.
EMULATED = ("cuda-core",)


@pytest.fixture(scope="session")
def machine():
    """This machine with its GPU, or an emulated machine."""
    with _machine() as found, driver_up(found):
        yield found


@pytest.fixture(scope="module")
def pooled(machine, request):
    """Yield a broker, and a notebook for each test of the file. A slice is most of the device."""
    request.getfixturevalue("kernelspec")
    with stage(machine, request) as made:
        made.prepare(items(request), made.most)
        yield made


@pytest.fixture
def notebook(pooled, workload, request):
    """The notebook of this test."""
    found = pooled.take(request.node.name)
    yield found
    pooled.stop(found)


@pytest.fixture
def neighbour(pooled, request):
    """Return the neighbour: a notebook that needs the same device at each of its calls."""
    return pooled.play(pooled.neighbour(request.session.testsfailed))


@pytest.fixture
def note(request):
    """Return ``note(name=value, ...)``: a test reports values with it that it does not assert."""
    facts: dict[str, Any] = request.node.stash.setdefault(_FACTS, {})
    return facts.update


_FACTS = pytest.StashKey[dict]()
_BEGUN = pytest.StashKey[float]()


def workloads(*names: str) -> Any:
    """Parametrise a test by ``workload``; mark the workloads that need a real GPU."""
    return pytest.mark.parametrize(
        "workload",
        [n if n in EMULATED else pytest.param(n, marks=pytest.mark.gpu) for n in names],
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    item.stash[_BEGUN] = time.monotonic()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    path = os.environ.get(REPORT)
    decides = report.when == "call" or report.outcome != "passed"
    if path and decides:
        line = {
            "test": item.nodeid,
            "when": report.when,
            "outcome": report.outcome,
            "seconds": round(time.monotonic() - item.stash.get(_BEGUN, time.monotonic()), 2),
            "facts": item.stash.get(_FACTS, {}),
        }
        if report.outcome == "failed":
            line["failure"] = str(report.longrepr)[-3000:]
        elif report.outcome == "skipped":
            line["reason"] = str(report.longrepr)[-500:]
        with Path(path).open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
    return report
