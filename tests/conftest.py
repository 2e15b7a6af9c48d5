# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What holds for all tests."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from . import longruns

with contextlib.suppress(ImportError):  # `make gpu` has no Hypothesis, and no test that needs it
    from hypothesis import HealthCheck, settings

    # Another process on the machine makes an example slow, not wrong: Hypothesis's deadline of
    # 200 ms and its check for slow draws fail tests whose properties hold.
    settings.register_profile(
        "no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("no clock")

HERE = Path(__file__).parent

#: Makes other packages' share of a process's start small, see its README.md.
LIGHT = HERE / "light"

#: Seconds that a file takes, with other workers beside it. Only their order counts: see below.
COSTS = {
    "broker/test_groups": 60,
    "broker/test_calendar": 40,
    "e2e/test_hard_use": 200,
    "e2e/test_broker_returns": 200,
    "broker/test_restart": 170,
    "broker/test_landing": 170,
    "broker/test_broker_temperaments": 160,
    "e2e/test_lifecycle": 140,
    "broker/test_neighbours": 140,
    "e2e/test_lazy": 120,
    "e2e/test_lazy_edges": 120,
    "e2e/test_temperaments": 110,
    "e2e/test_chaos": 90,
    "broker/test_guarded": 90,
    "server/test_access": 90,
    "broker/test_preemption": 80,
    "devices/test_device_quirks": 68,
    "broker/test_logout": 67,
    "broker/test_faults": 60,
    "broker/test_predecessor": 58,
    "e2e/test_preempted_cells": 60,
    "e2e/test_languages": 56,
    "broker/test_setaside": 54,
    "broker/test_page_life": 53,
    "devices/test_failures": 50,
    "programs/test_run": 50,
    "e2e/test_soak": 49,
    "e2e/test_policy": 46,
    "programs/test_detached": 30,
    "programs/test_inscript": 30,
    "devices/test_service": 27,
    "guard/test_window": 25,
    "e2e/test_notebooks": 25,
    "programs/test_terminal": 20,
    "broker/test_pages": 18,
    "broker/test_autostart": 18,
    "broker/test_ending": 18,
    "broker/test_revive": 18,
    "guard/test_stress": 18,
    "kernel/test_agent_magic": 18,
    "kernel/test_agent_lazy": 18,
    "pool/test_random": 18,
    "provisioner/test_jupyter_server": 18,
    "broker/test_journal_file": 15,
    "e2e/test_install": 15,
    "kernel/test_agent_outages": 15,
    "kernel/test_agent_real_broker": 15,
    "kernel/test_cells": 15,
    "provisioner/test_launcher": 15,
    "programs/test_services": 15,
    "broker/test_members": 12,
    "server/test_documented": 15,
    "e2e/test_turns_of_people": 12,
    "e2e/test_environments": 12,
    "e2e/test_plain_clients": 12,
    "e2e/test_visible": 12,
    "broker/test_life": 12,
    "devices/test_chaos": 12,
    "provisioner/test_jupyter_clients": 12,
    "server/test_events": 12,
    "server/test_rest": 12,
    "e2e/test_two_servers": 10,
    "e2e/test_nested": 10,
    "broker/test_given": 10,
    "gpu/test_driver": 10,
    "gpu/test_guard": 10,
    "gpu/test_guard_edges": 10,
    "gpu/test_kills": 10,
    "gpu/test_limits": 10,
    "gpu/test_notebook": 10,
}


#: What ``make quick`` runs, folders and files: the pool, units and contracts. None of them starts a
#: broker or a kernel. Within a minute on two cores: a file that takes long stays out.
QUICK = {
    "pool", "config", "test_architecture", "test_client", "test_emulation", "test_endpoint",
    "test_errors", "test_longruns", "test_local_machine", "test_protocol", "test_startrecord",
    "test_text", "texts", "test_timeline", "test_units", "docs/test_docs",
    "cli/test_cli_app", "cli/test_cli_kernels", "cli/test_cli_picture", "cli/test_cli_status",
    "broker/test_connection", "broker/test_dispatch", "broker/test_history",
    "broker/test_journal", "broker/test_listener", "broker/test_loglimit",
    "broker/test_metrics_figures", "broker/test_monitor", "broker/test_pace",
    "devices/test_given", "devices/test_guard_install", "devices/test_pure",
    "emulator/test_machine_text", "guard/test_table", "kernel/test_magic_display",
    "kernel/test_revive", "kernel/test_visible", "server/test_documented", "server/test_history",
    "server/test_metrics", "server/test_views", "server/test_watch",
}  # fmt: skip

#: Of the configuration: the tests marked ``long`` that were collected, as the table names them.
LONG = pytest.StashKey[set[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--note-long", action="store_true", help="write the runs of long tests into their table"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let children be interrupted.

    A shell starts what runs in the background with SIGINT ignored, children inherit that, and
    Python then leaves it ignored. A handler of our own is reset to the default by exec.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Hundreds of processes of ours are started: each compiles what it imports where nothing may
    # be written, and that is a third of a broker's start.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False  # pytest rewrites the assertions of each module otherwise
    # The same for children of the tests and for this process, which has started already.
    paths = [str(LIGHT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    # xdist would begin with the file that has most tests, which says nothing of its time.
    config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)  # before the options -m and -k take items away
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes longest first: at the end no worker has a long file left when others are done."""
    items.sort(key=lambda item: -COSTS.get("/".join(item.path.with_suffix("").parts[-2:]), 0))
    for item in items:
        name = item.path.relative_to(HERE).with_suffix("")
        if not QUICK.isdisjoint({str(name), name.parts[0]}):
            item.add_marker("quick")
    long = (item for item in items if item.get_closest_marker("long"))
    config.stash[LONG] = {longruns.name_of(item.nodeid) for item in long}


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Note what ``make test-long`` ran."""
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
