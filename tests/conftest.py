# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Settings and options for all tests."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from . import longruns

with contextlib.suppress(ImportError):  # the environment of `make gpu` has no Hypothesis
    from hypothesis import HealthCheck, settings

    # Other processes on the machine can make an example slow. A slow example is no error, so
    # switch off Hypothesis's deadline of 200 ms and its check for slow draws.
    settings.register_profile(
        "no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("no clock")

HERE = Path(__file__).parent

#: A process that searches this folder first imports third-party packages faster. The folder's
#: README.md explains how.
LIGHT = HERE / "light"

#: Seconds that each file takes while other workers run. Only the order of the values matters: the
#: file with the largest value runs first.
COSTS = {
    "e2e/test_broker_returns": 95,
    "e2e/test_hard_use": 81,
    "broker/test_maintenance": 77,
    "e2e/test_lifecycle": 67,
    "programs/test_run": 64,
    "broker/test_broker_temperaments": 62,
    "guard/test_gate": 57,
    "kernel/test_agent_outages": 47,
    "devices/test_failures": 45,
    "pool/test_shares": 45,
    "devices/test_device_quirks": 44,
    "broker/test_pages": 40,
    "broker/test_landing": 38,
    "e2e/test_lazy_edges": 38,
    "broker/test_guarded": 37,
    "emulator/test_suspend_calls": 37,
    "broker/test_preemption": 36,
    "broker/test_neighbours": 34,
    "broker/test_restart": 31,
    "gpu/test_runner": 31,
    "e2e/test_temperaments": 30,
    "gpu/test_driver": 30,
    "server/test_access": 30,
    "e2e/test_preempted_cells": 29,
    "guard/test_wait": 29,
    "cluster/test_brokers": 28,
    "cluster/test_remote": 27,
    "cluster/test_seconds": 12,
    "emulator/test_records": 27,
    "kernel/test_agent_lazy": 27,
    "broker/test_faults": 26,
    "e2e/test_chaos": 26,
    "e2e/test_lazy": 25,
    "guard/test_window": 25,
    "pool/test_random": 25,
    "guard/test_stress": 24,
    "broker/test_logout": 23,
    "docs/test_docs": 23,
    "kernel/test_agent_magic": 23,
    "e2e/test_policy": 22,
    "broker/test_host_memory": 21,
    "broker/test_revive": 21,
    "emulator/test_device_memory": 21,
    "texts/test_texts": 21,
    "broker/test_autostart": 19,
    "broker/test_host_numbers": 18,
    "guard/test_later": 18,
    "broker/test_lies": 17,
    "broker/test_page_life": 17,
    "e2e/test_languages": 17,
    "emulator/test_injected_faults": 17,
    "pool/test_residency": 17,
    "programs/test_inscript": 16,
    "broker/test_beyond": 15,
    "broker/test_metrics": 15,
    "programs/test_detached": 15,
    "containers/test_containers": 15,
    "pool/test_running": 14,
    "broker/test_calendar": 13,
    "broker/test_setaside": 13,
    "broker/test_usage": 13,
    "e2e/test_environments": 13,
    "e2e/test_plain_clients": 13,
    "guard/test_real_drivers": 13,
    "kernel/test_agent_real_broker": 13,
    "pool/test_offers": 13,
    "pool/test_queries": 13,
    "pool/test_reach": 13,
    "broker/test_journal_file": 12,
    "cli/test_cli_real_broker": 12,
    "config/test_calendar": 12,
    "e2e/test_demo": 12,
    "emulator/test_quirks": 12,
    "provisioner/test_jupyter_server": 12,
}


#: The folders and files of ``make quick``: the pool, units and contracts. They start no broker
#: and no kernel. Together they take less than a minute on two cores, so a slow file does not
#: belong here.
QUICK = {
    "pool", "cluster/test_courier", "cluster/test_ledger", "cluster/test_views", "config",
    "kubernetes/test_manifests", "containers/test_start", "containers/test_examples",
    "test_architecture", "test_client", "devices/test_driver_present",
    "test_endpoint",
    "test_errors", "test_longruns", "test_local_machine", "test_marks", "test_protocol",
    "test_startrecord", "test_text", "texts", "test_threads", "test_timeline", "test_units",
    "docs/test_docs", "guard/test_headers",
    "cli/test_cli_app", "cli/test_cli_kernels", "cli/test_cli_picture", "cli/test_cli_status",
    "broker/test_connection", "broker/test_dispatch", "broker/test_history",
    "broker/test_journal", "broker/test_listener", "broker/test_loglimit",
    "broker/test_metrics_figures", "broker/test_monitor", "broker/test_pace",
    "devices/test_given", "devices/test_guard_install", "devices/test_pure",
    "emulator/test_machine_text", "guard/test_table", "kernel/test_magic_display",
    "kernel/test_revive", "kernel/test_visible", "server/test_documented", "server/test_history",
    "server/test_metrics", "server/test_views", "server/test_watch",
}  # fmt: skip

#: With this key, pytest's configuration keeps the names of the collected tests that have the mark
#: ``long``. The names have the form of the names in docs/long-tests.md.
LONG = pytest.StashKey[set[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--note-long", action="store_true", help="write the runs of long tests into their table"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make sure that tests can interrupt their child processes.

    A shell starts a background process with SIGINT ignored, and all children of the process inherit
    this setting. So if SIGINT is ignored, install a handler: with a handler in pytest, Linux resets
    SIGINT to the default when a child executes a program.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # The tests start hundreds of processes. If Python writes no bytecode, each process compiles all
    # modules that it imports. This takes a third of the time of a broker's start.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # If pytest cannot write bytecode, it rewrites the assertions of each module in each run.
    sys.dont_write_bytecode = False
    # With PYTHONPATH, the child processes of the tests search LIGHT first. This process does not,
    # because it has already started. So code below hides rfc3987_syntax from this process. LIGHT
    # hides it from the children.
    paths = [str(LIGHT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    # Each garbage collection visits the objects of all tests. With Python's default thresholds, the
    # collections take a tenth of the time of tests that start no process. The price of fewer
    # collections: a leak may show only in a later test.
    gc.set_threshold(50_000, 20, 100)
    # Without this variable, numpy's OpenBLAS starts a thread per core in each process. Each thread
    # spins for a while.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.modules.setdefault("rfc3987_syntax", None)
    # All workers of a run share the processes that fork brokers and kernels (broker/forks.py).
    if getattr(config.option, "numprocesses", 0) and "TESTS_FORKS" not in os.environ:
        os.environ["TESTS_FORKS"] = folder = tempfile.mkdtemp(prefix="gpupool-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    # By default, xdist begins with the file that has the most tests, even if another file is
    # slower.
    config.option.loadscopereorder = False


def pytest_collection_finish() -> None:
    """Exclude the collected tests, which stay until the end, from later garbage collections.

    When pytest ends, it makes ten full collections. They would take half a second in each worker.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # runs before the options -m and -k remove items
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the longest files first, so that at the end no worker still runs a long file."""
    items.sort(key=lambda item: -COSTS.get("/".join(item.path.with_suffix("").parts[-2:]), 0))
    for item in items:
        name = item.path.relative_to(HERE).with_suffix("")
        if not QUICK.isdisjoint({str(name), name.parts[0]}):
            item.add_marker("quick")
    long = (item for item in items if item.get_closest_marker("long"))
    config.stash[LONG] = {longruns.name_of(item.nodeid) for item in long}


def pytest_report_teststatus(report) -> tuple[str, str, str] | None:
    """Name a failed test in the progress line.

    The report of the test comes only after all tests, perhaps minutes later.
    """
    if not report.failed:
        return None
    kind = "failed" if report.when == "call" else "error"
    return kind, f"\n{kind}: {report.nodeid}\n", kind.upper()


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Write the results of ``make test-long`` into the table."""
    if not config.getoption("--note-long"):
        return
    found: dict[str, tuple[float, bool]] = {}
    for kind in ("passed", "failed", "error"):
        for report in terminalreporter.getreports(kind):
            if "long" in report.keywords:
                name = longruns.name_of(report.nodeid)
                seconds, passed = found.get(name, (0.0, True))
                found[name] = seconds + report.duration, passed and report.passed
    longruns.note(found)


@pytest.fixture
def quick_compiler(tmp_path_factory) -> str:
    """Return the path of a fake C compiler that writes an empty library at once.

    Tests use this compiler to check when the product compiles a library.
    """
    path = tmp_path_factory.mktemp("compiler") / "cc"
    path.write_text(
        "#!/bin/sh\n"
        'case " $* " in *" -E "*) exec cc "$@";; esac\n'  # the guard's build needs the preprocessor
        'while [ $# -gt 1 ]; do [ "$1" = -o ] && : > "$2"; shift; done\n'
    )
    path.chmod(0o755)
    return str(path)
