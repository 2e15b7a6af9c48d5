# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Settings and options for all tests."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from . import longruns

with contextlib.suppress(ImportError):  # `make gpu` has no Hypothesis and needs none
    from hypothesis import HealthCheck, settings

    # Another process on the machine makes an example slow, not wrong: Hypothesis's deadline of
    # 200 ms and its check for slow draws fail tests whose properties hold.
    settings.register_profile(
        "no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("no clock")

HERE = Path(__file__).parent

#: Makes other packages' share of a process's start small; README.md there says how.
LIGHT = HERE / "light"

#: Seconds that a file takes beside other workers. Only the order counts, see below.
COSTS = {
    "e2e/test_hard_use": 231,
    "e2e/test_broker_returns": 230,
    "guard/test_stress": 228,
    "broker/test_restart": 217,
    "broker/test_broker_temperaments": 217,
    "server/test_access": 173,
    "broker/test_landing": 166,
    "e2e/test_lifecycle": 163,
    "broker/test_pages": 155,
    "broker/test_maintenance": 152,
    "broker/test_guarded": 152,
    "broker/test_revive": 149,
    "e2e/test_lazy_edges": 149,
    "broker/test_faults": 149,
    "broker/test_logout": 135,
    "e2e/test_policy": 116,
    "e2e/test_lazy": 107,
    "e2e/test_chaos": 103,
    "kernel/test_agent_lazy": 99,
    "provisioner/test_jupyter_server": 96,
    "kernel/test_agent_outages": 96,
    "e2e/test_temperaments": 87,
    "broker/test_autostart": 86,
    "broker/test_setaside": 82,
    "broker/test_page_life": 80,
    "broker/test_preemption": 80,
    "devices/test_device_quirks": 80,
    "broker/test_ending": 73,
    "broker/test_predecessor": 70,
    "kernel/test_agent_magic": 69,
    "broker/test_neighbours": 65,
    "broker/test_host_numbers": 64,
    "pool/test_random": 61,
    "broker/test_host_memory": 61,
    "broker/test_groups": 60,
    "e2e/test_preempted_cells": 60,
    "devices/test_failures": 60,
    "broker/test_lies": 53,
    "programs/test_run": 50,
    "gpu/test_driver": 49,
    "kernel/test_agent_real_broker": 49,
    "e2e/test_languages": 44,
    "broker/test_journal_file": 43,
    "kernel/test_cells": 43,
    "broker/test_life": 41,
    "emulator/test_device_memory": 40,
    "broker/test_calendar": 40,
    "e2e/test_notebooks": 39,
    "broker/test_metrics": 36,
    "broker/test_status": 35,
    "e2e/test_environments": 34,
    "devices/test_service": 35,
    "broker/test_leftovers": 33,
    "e2e/test_plain_clients": 32,
    "emulator/test_injected_faults": 31,
    "provisioner/test_jupyter_clients": 30,
    "broker/test_beyond": 30,
    "programs/test_detached": 30,
    "programs/test_inscript": 30,
    "e2e/test_soak": 29,
    "server/test_events": 25,
    "e2e/test_visible": 25,
    "e2e/test_turns_of_people": 25,
    "guard/test_window": 25,
    "broker/test_orphans": 24,
    "broker/test_turns": 23,
    "emulator/test_nvidia_clients": 22,
    "provisioner/test_launcher": 21,
    "programs/test_terminal": 20,
    "programs/test_services": 15,
    "devices/test_guard_frame": 15,
    "broker/test_members": 12,
}


#: The folders and files of ``make quick``: the pool, units and contracts. They start no broker
#: and no kernel. All take less than a minute on two cores: a slow file does not belong here.
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

#: Key in pytest's configuration: the collected tests marked ``long``, as the table names them.
LONG = pytest.StashKey[set[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--note-long", action="store_true", help="write the runs of long tests into their table"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let children be interrupted.

    A shell starts background processes with SIGINT ignored. Children inherit that, and Python then
    leaves it ignored. An exec resets a handler of our own to the default.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # The tests start hundreds of processes. Where the packages are read-only, each process compiles
    # all modules that it imports, which is a third of a broker's start.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False  # pytest rewrites the assertions of each module otherwise
    # The same for children of the tests, and for this process, which has already started.
    paths = [str(LIGHT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    # numpy's library starts a thread per core that spins for a while, in each process.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    # xdist would begin with the file that has the most tests, which need not be the slowest.
    config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)  # before the options -m and -k take items away
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the longest files first, so that no worker has one left when the others are done."""
    items.sort(key=lambda item: -COSTS.get("/".join(item.path.with_suffix("").parts[-2:]), 0))
    for item in items:
        name = item.path.relative_to(HERE).with_suffix("")
        if not QUICK.isdisjoint({str(name), name.parts[0]}):
            item.add_marker("quick")
    long = (item for item in items if item.get_closest_marker("long"))
    config.stash[LONG] = {longruns.name_of(item.nodeid) for item in long}


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
    """A C compiler for tests of what is compiled when: it writes an empty library at once."""
    path = tmp_path_factory.mktemp("compiler") / "cc"
    path.write_text(
        "#!/bin/sh\n"
        'case " $* " in *" -E "*) exec cc "$@";; esac\n'  # the guard's sources ask the preprocessor
        'while [ $# -gt 1 ]; do [ "$1" = -o ] && : > "$2"; shift; done\n'
    )
    path.chmod(0o755)
    return str(path)
