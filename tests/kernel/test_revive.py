# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Tests of a kernel whose broker is away: how long the kernel waits, and what it shows."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_gpupool import startfailures, startrecord
from jupyter_gpupool.endpoint import START_TIMEOUT
from jupyter_gpupool.errors import BrokerUnavailable
from jupyter_gpupool.kernel.advice import explain
from jupyter_gpupool.kernel.link import SessionLink
from jupyter_gpupool.kernel.revive import GRACE, Reviver
from jupyter_gpupool.startfailures import ATTEMPTS
from jupyter_gpupool.starting import only_one
from jupyter_gpupool.startrecord import COPY_VARIABLE, REVIVE_VARIABLE

AWAY = BrokerUnavailable("No GPU pool broker listens.", code="no-broker")


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "b.sock"


@pytest.fixture
def started(tmp_path: Path) -> Path:
    """Return the path of a file. Each call of the start command adds a line to this file."""
    return tmp_path / "started"


def reviver(socket: Path, started: Path) -> Reviver:
    return Reviver(socket, {REVIVE_VARIABLE: f"echo called >> {started}"})


def test_kernel_starts_a_dead_broker_once_and_waits_for_it(socket: Path, started: Path) -> None:
    startrecord.write_record(socket, ["/bin/true"], {})
    one = reviver(socket, started)
    for _ in range(3):  # the link calls away() after each failed attempt to connect
        assert one.away(AWAY) is AWAY
    assert started.read_text() == "called\n"
    assert one.expected
    assert one.patience == START_TIMEOUT
    assert one.describe() == "The GPU pool's broker ended; it is being started again."


def test_start_is_still_expected_during_the_next_check(
    socket: Path, started: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one thread checks the files in ``away``, a cell's thread may read ``patience``."""
    startrecord.write_record(socket, ["/bin/true"], {})
    one = reviver(socket, started)
    one.away(AWAY)
    seen = []

    def being_started(_: Path) -> bool:
        seen.append((one.expected, one.patience))
        return False

    monkeypatch.setattr("jupyter_gpupool.startrecord.being_started", being_started)
    one.away(AWAY)
    assert seen == [(True, START_TIMEOUT)]


def test_failed_starts_do_not_count_for_the_next_broker(socket: Path, started: Path) -> None:
    startrecord.write_record(socket, ["/bin/true"], {})
    startfailures.note_failure(socket, startfailures.Failures(), "It failed.", "", final=True)
    one = reviver(socket, started)
    one.away(AWAY)
    assert one.patience == 0.0
    one.came_back()
    assert one.patience == GRACE


def test_message_about_a_dying_broker_names_its_log(socket: Path, started: Path) -> None:
    startrecord.write_record(socket, ["/bin/true"], {})
    for _ in range(startfailures.MANY_STARTS):
        startfailures.note_start(socket, startfailures.read_failures(socket))
    one = reviver(socket, started)
    one.away(AWAY)
    assert "already restarted 3 times in the last 10 minutes" in one.describe()
    assert f"its log: {socket.with_suffix('.log')}" in one.describe()


def test_broker_that_ended_in_an_orderly_way_is_not_started(socket: Path, started: Path) -> None:
    one = reviver(socket, started)
    assert one.away(AWAY) is AWAY
    assert not started.exists()
    assert not one.expected
    assert one.patience == GRACE
    assert str(socket) in one.describe()


def test_copy_of_the_start_record_is_enough_to_start_a_broker(socket: Path, started: Path) -> None:
    copy = socket.with_name("copy.json")
    one = Reviver(socket, {REVIVE_VARIABLE: f"echo called >> {started}", COPY_VARIABLE: str(copy)})
    one.away(AWAY)
    assert not one.expected
    copy.write_text("{}")
    one.away(AWAY)
    assert one.expected
    assert started.read_text() == "called\n"


def test_no_broker_is_started_if_the_command_is_not_set(socket: Path) -> None:
    startrecord.write_record(socket, ["/bin/true"], {})
    one = Reviver(socket, {})
    one.away(AWAY)
    assert not one.expected


def test_kernel_waits_for_a_start_by_another_process(socket: Path, started: Path) -> None:
    one = reviver(socket, started)
    with only_one(socket, time.monotonic() + 5):
        one.away(AWAY)
        assert one.expected
        assert one.patience == START_TIMEOUT
    assert not started.exists()
    one.away(AWAY)
    assert not one.expected


def test_failed_start_is_reported_at_once(socket: Path, started: Path) -> None:
    startrecord.write_record(socket, ["/bin/true"], {})
    known = startfailures.read_failures(socket)
    for _ in range(ATTEMPTS):
        known = startfailures.note_failure(socket, known, "No such machine.", "See its log: /x.log")
    one = reviver(socket, started)
    told = one.away(AWAY)
    assert "cannot be started again: No such machine." in told.message
    assert "/x.log" in told.next_step
    assert one.patience == 0.0
    assert not started.exists()


def test_failed_call_names_a_start_that_has_just_failed(socket: Path) -> None:
    """The guard refuses a call at once, before the link's next attempt to connect."""
    link = SessionLink(socket, "s1", "token")
    link.down = AWAY
    guard: Any = SimpleNamespace(on=True, figures=lambda: None)
    refused = "CUDA_ERROR_SYSTEM_NOT_READY"
    assert "No GPU pool broker listens." in explain(link, guard, None, "CUDAError", refused)
    startfailures.note_failure(
        socket, startfailures.Failures(), "No such machine.", "See its log: /x.log", final=True
    )
    line = explain(link, guard, None, "CUDAError", refused)
    assert "cannot be started again: No such machine." in line
    assert "/x.log" in line


@pytest.mark.parametrize(
    "text", ["", "{", "null", "[" * 50_000, '{"count": 1e400}', '{"due": "soon"}', '{"starts": 1}']
)
def test_unreadable_record_of_failed_starts_is_no_reason(socket: Path, text: str) -> None:
    startfailures.note_failure(socket, startfailures.Failures(), "x", "y", final=True)
    startfailures.failures_path(socket).write_text(text)
    link = SessionLink(socket, "s1", "token")
    assert "has not answered yet" in link.unavailable().message


def test_kernel_only_waits_for_the_machines_broker(started: Path) -> None:
    one = reviver(Path("/run/gpupool/broker.sock"), started)
    # systemd owns this socket and accepts connections for the broker. So an attempt to connect
    # succeeds even while no broker runs.
    assert (one.expected, one.patience) == (True, START_TIMEOUT)
    assert one.away(AWAY) is AWAY
    one.came_back()
    assert not started.exists()
    assert (one.expected, one.patience) == (True, START_TIMEOUT)
    assert "service manager" in one.describe()
