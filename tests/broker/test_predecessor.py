# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A dead broker is started again with its journal, at the socket that its kernels know."""

from __future__ import annotations

import json
import logging
import os
import shutil

import pytest

from jupyter_gpupool import startfailures, startrecord
from jupyter_gpupool.broker.pages.control import SHARED_MEMORY, folder_name
from jupyter_gpupool.errors import BrokerUnavailable
from jupyter_gpupool.guard import page as layout
from jupyter_gpupool.starting import ensure_broker

from . import kit
from .guardkit import Guarded, GuardedBroker
from .kit import Kernel, wait_until
from .test_autostart import clean, settings, status, with_pid  # noqa: F401 (a fixture)


class At(kit.Broker):
    """A broker that the package started at ``socket``."""

    def __init__(self, folder, socket):
        super().__init__(folder)
        self.socket = socket
        self.log = socket.with_suffix(".log")


pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture
def orphaned(clean, monkeypatch):  # noqa: F811
    """Yield a killed broker and its kernel with a slice. The test has another runtime folder."""
    broker = At(clean, ensure_broker(settings(clean, idle_timeout=77)))
    one = Kernel(broker, "one")
    one.attach()
    with_pid(status(broker.socket)["pid"])
    (clean / "cron").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(clean / "cron"))
    yield broker, one
    one.close()
    kit.remove(SHARED_MEMORY / folder_name(broker.socket))


def test_broker_is_started_at_the_socket_that_its_kernels_know(orphaned, clean, caplog):  # noqa: F811
    broker, one = orphaned
    with caplog.at_level(logging.WARNING):
        assert ensure_broker(settings(clean)) == broker.socket
    assert broker.status()["settings"]["idle_timeout"] == 77
    wait_until(lambda: one.link()["greeted"], "the agent's hello")
    assert one.state() in ("active", "idle")
    text = caplog.text
    assert f"depends on a GPU pool broker at {broker.socket}, which has ended" in text
    assert not (clean / "cron" / "gpupool" / "broker.sock").exists()


def test_ended_broker_is_started_with_the_callers_configuration(
    orphaned,
    clean,  # noqa: F811
):
    broker, one = orphaned
    startrecord.remove_record(broker.socket)
    assert ensure_broker(settings(clean, idle_timeout=88)) == broker.socket
    assert broker.status()["settings"]["idle_timeout"] == 88
    wait_until(lambda: one.link()["greeted"], "the agent's hello")
    assert one.state() in ("active", "idle")


def test_broker_takes_over_sessions_of_an_unusable_socket(orphaned, clean, caplog):  # noqa: F811
    broker, one = orphaned
    shutil.rmtree(broker.socket.parent)
    broker.socket.parent.write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        path = ensure_broker(settings(clean))
    assert path == clean / "cron" / "gpupool" / "broker.sock"
    assert [s["id"] for s in status(path)["sessions"]] == [one.session]
    assert "Restart each of these kernels" in caplog.text


def test_broker_starts_anywhere_once_the_kernels_have_ended(orphaned, clean):  # noqa: F811
    _, one = orphaned
    one.kill()
    path = ensure_broker(settings(clean))
    assert path == clean / "cron" / "gpupool" / "broker.sock"
    assert status(path)["sessions"] == []


def test_broker_started_elsewhere_names_socket_and_processes(make_broker, folder):
    """The new broker's socket is in another folder of the same user. The journal is the same."""
    broker = make_broker()
    (folder / "gpupool").mkdir()
    broker.socket = folder / "gpupool" / "broker.sock"
    home = broker.started.socket
    one = Kernel(broker, "one")
    broker.kill()
    (folder / "x" / "gpupool").mkdir(parents=True)
    broker.socket = folder / "x" / "gpupool" / "broker.sock"
    answer = broker.start()
    assert (answer["ok"], answer["code"]) == (False, "sessions-elsewhere")
    assert answer["socket"] == str(home)
    assert str(one.process.pid) in answer["message"]
    assert f"--socket {home}" in answer["next_step"]
    assert "--take-over" in answer["next_step"]
    broker.socket = home
    assert broker.started
    wait_until(lambda: one.link()["greeted"], "the agent's hello")
    one.close()


# ---------------------------------------------------------------------- another journal


def test_other_state_dir_is_refused_while_kernels_live(clean):  # noqa: F811
    broker = At(clean, ensure_broker(settings(clean)))
    one = Kernel(broker, "one")
    one.attach()
    with_pid(status(broker.socket)["pid"])
    record = startrecord.record_path(broker.socket)
    old = json.loads(record.read_text())
    assert old["journal"] == str(clean / "state" / old["journal"].rpartition("/")[2])
    # The record of the broker names a program that does not exist. So a server tries to start a
    # broker with its own configuration, which has another state_dir.
    record.write_text(json.dumps({**old, "command": ["/no/such/python", "-m", "x"]}))
    with pytest.raises(BrokerUnavailable) as caught:
        ensure_broker(settings(clean, state_dir=str(clean / "other")))
    assert caught.value.code == "journal-elsewhere"
    assert str(one.process.pid) in caught.value.message
    assert str(clean / "state") in caught.value.next_step
    assert not [*(clean / "other").glob("*.sqlite")]
    # The broker starts with the old state_dir. After its kernels have ended, it also starts with
    # another state_dir.
    ensure_broker(settings(clean))
    assert one.state() in ("active", "idle")
    with_pid(status(broker.socket)["pid"])
    one.kill()
    startfailures.failures_path(broker.socket).unlink(missing_ok=True)
    record.write_text(json.dumps({**old, "command": ["/no/such/python", "-m", "x"]}))
    ensure_broker(settings(clean, state_dir=str(clean / "other")))
    assert broker.status()["sessions"] == []
    one.close()


# ---------------------------------------------------------------------- pages elsewhere


@pytest.fixture
def moved(folder):
    """Yield a killed broker, its kernel, and the kernel's page, which is in another folder."""
    broker = GuardedBroker(folder).started
    one = Guarded(broker, "one", memory=kit.BIG, launch=False)
    older = SHARED_MEMORY / f"gpupool-{os.geteuid()}-{'0' * 12}"
    page = older / one.path.name
    one.env["GPUPOOL_PAGE"] = str(page)
    one.launch(agent=False)
    one.slot(one.process.pid)
    broker.kill()
    kit.remove(older)
    one.path.parent.rename(older)
    yield broker, one, page
    print(broker.tail())
    one.close()
    broker.close()
    kit.remove(older)


def test_page_is_found_in_the_folder_of_an_older_version(moved):
    broker, one, page = moved
    assert broker.started
    assert one.gate() == layout.CLOSED
    one.lease()
    assert one.granted()
    assert page.exists()
    assert not one.path.exists()
    assert "unguarded" not in broker.tail(1 << 20)
    page.unlink()
    wait_until(lambda: os.path.lexists(page), "the page to be put back where it was")


def test_missing_page_is_reported_in_the_log(moved):
    broker, one, page = moved
    assert broker.started
    one.lease()
    broker.kill()
    kit.remove(page.parent)
    one.map.close()  # the map keeps the file open
    assert broker.started
    assert (
        f"The page of session {one.session} was deleted, and no process has it open"
        in broker.tail()
    )
    assert f"Session {one.session} goes on unguarded: no page at {page}" in broker.tail()
