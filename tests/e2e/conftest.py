# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

from jupyter_gpupool.devices import vendor

from .kit import KERNEL_NAME, Pool

REPORTS = pytest.StashKey[dict]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    item.stash.setdefault(REPORTS, {})[report.when] = report
    return report


@pytest.fixture(scope="session")
def kernelspec():
    """Check that the kernelspec is installed and names the provisioner. Every test needs both."""
    try:
        spec = KernelSpecManager().get_kernel_spec(KERNEL_NAME)
    except NoSuchKernel:
        pytest.fail(f"Jupyter does not find the kernelspec {KERNEL_NAME}: pip install -e .")
    stanza = spec.metadata["kernel_provisioner"]
    assert stanza["provisioner_name"] == "gpupool-provisioner"


@pytest.fixture(scope="session")
def installed(kernelspec):
    """Fail if the machine has a real driver: these tests may not run on such a machine."""
    if vendor.driver_present():
        pytest.fail("The end-to-end tests emulate devices, and this machine has an NVIDIA driver.")


@pytest.fixture(scope="module")
def rested():
    """Return the running pools that earlier tests of this file left for the next test."""
    pools: list[Pool] = []
    yield pools
    for pool in pools:
        pool.end()
        shutil.rmtree(pool.folder, ignore_errors=True)


@pytest.fixture
def pool(installed, rested, monkeypatch, request):
    """Return ``make(machine, **config) -> Pool``, which starts a pool or reuses an idle one.

    After a passed test, the broker must grant no memory to any kernel. If the broker is then as
    good as new, and all other processes of the test have ended, the next test of the file may use
    the pool. Otherwise, the fixture ends the pool: every process must end without SIGKILL.
    """
    made: list[Pool] = []

    def make(machine: str = "2x1638MiB,context=64MiB", **config) -> Pool:
        pool = next((p for p in rested if p.asked == (machine, config)), None)
        if pool is None:
            folder = Path(tempfile.mkdtemp(prefix="gp"))  # a socket needs a short path
            pool = Pool(folder, machine, config)
            made.append(pool)
            pool.take_environment(monkeypatch)
            pool.begin()
        else:
            rested.remove(pool)
            made.append(pool)
            pool.take_environment(monkeypatch)
            pool.again()
        return pool

    yield make
    for pool in made:
        report = request.node.stash.get(REPORTS, {}).get("call")
        passed = report is not None and report.passed
        try:
            pool.stop(check=passed)
            if passed and pool.rests():
                rested.append(pool)
                continue
            pool.end(check=passed)
            if not passed:
                request.node.add_report_section("teardown", "logs of the pool", pool.logs())
        except BaseException:
            request.node.add_report_section("teardown", "logs of the pool", pool.logs())
            raise
        finally:
            if pool not in rested and not os.environ.get("GPUPOOL_E2E_KEEP"):
                shutil.rmtree(pool.folder, ignore_errors=True)
