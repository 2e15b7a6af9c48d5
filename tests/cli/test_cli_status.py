# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``status`` and ``release`` against a broker whose answers each test sets."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from snapshots import GiB, attached, pool, session

from jupyter_gpupool.cli import main
from jupyter_gpupool.cli.status import find_session, style_for
from jupyter_gpupool.errors import RefusedError

ROOT = Path(__file__).parents[2]


def test_status_draws_the_pool(broker, capsys):
    broker.answers["status"] = pool(sessions=[attached("3f2a", "active", 4 * GiB)])
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert "EMULATED" in out
    assert re.search(r"^A  3f2a +ada +in use +4 GiB", out, re.MULTILINE)
    assert "\x1b" not in out, "colour belongs on a terminal only"


def test_status_json_is_exactly_the_snapshot(broker, capsys):
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == broker.answers["status"]


def test_status_without_a_broker_says_how_to_start_one(tmp_path, capsys):
    assert main(["status"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"jupyter gpupool: No GPU pool broker listens at {tmp_path / 's'}. "
        "Open a Pooled GPU kernel, which starts one, or run `jupyter gpupool broker`.\n"
    )


def test_status_names_the_service_manager_of_an_absent_broker(capsys):
    assert main(["status", "--socket", "/run/no-such-pool/broker.sock"]) == 1
    err = capsys.readouterr().err
    assert "/run/no-such-pool/broker.sock. This is the machine's broker. The service manager" in err
    assert "systemctl status gpupool" in err


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("relative", "must be absolute"),
        ("/" + "x" * 120, "Linux allows 107"),
        ("/etc/passwd", "is not a socket"),
        ("/dev/stdin", "is a symbolic link"),
    ],
)
def test_file_in_place_of_the_socket_is_explained(path, words, capsys):
    assert main(["status", "--socket", path]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_status_uses_the_configured_socket_despite_bad_options(
    broker, no_configuration, capsys, monkeypatch
):
    monkeypatch.delenv("GPUPOOL_SOCKET")
    config = no_configuration / "jupyter_server_config.py"
    config.write_text(f"c.GPUPool.socket = {str(broker.path)!r}")
    assert main(["status"]) == 0
    monkeypatch.setenv("GPUPOOL_SOCKET", str(broker.path))
    config.write_text("c.GPUPool.sockt = 1")
    assert main(["status"]) == 0
    assert capsys.readouterr().err.startswith("Warning: c.GPUPool.sockt in ")


def test_reader_that_closes_the_pipe_causes_no_error(broker):
    status = f"{sys.executable} -m jupyter_gpupool.cli status --json"
    command = f"{status} | head -c 1; exit ${{PIPESTATUS[0]}}"
    broker.answers["status"] = pool(sessions=[session(f"s{n}") for n in range(500)])
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "{", "")


# ------------------------------------------------------------------ --watch


class Watcher:
    """Runs ``status --watch`` in its own terminal, and keeps its whole output."""

    def __init__(self, *arguments: str, environ: dict[str, str]) -> None:
        ours, theirs = pty.openpty()
        self.written = bytearray()
        self.more = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jupyter_gpupool.cli", "status", "--watch", *arguments],
            cwd=ROOT, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE,
            env={**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8", **environ},
        )  # fmt: skip
        os.close(theirs)
        self.ours = ours
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self.ours, 65536)
            except OSError:  # EIO: the other side has closed the terminal
                return
            with self.more:
                self.written += chunk
                self.more.notify_all()

    def text(self) -> str:
        return self.written.decode("utf-8", "replace")

    def wait_for(self, text: str) -> None:
        with self.more:
            assert self.more.wait_for(lambda: text in self.text(), timeout=30), self.text()

    def end(self) -> int:
        """Interrupt the program as ^C does, and return its exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(30)

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # no effect if the program has ended
        self.process.wait(30)
        self.reader.join(30)
        os.close(self.ours)
        self.errors = self.process.stderr.read().decode()
        self.process.stderr.close()


def test_watch_redraws_in_place_and_restores_the_terminal(broker):
    broker.snapshots = [
        pool(sessions=[attached("3f2a", "active", 4 * GiB)]),
        pool(sessions=[attached("3f2a", "idle", 4 * GiB, idle_since=993.0)]),
    ]
    with Watcher("--interval", "0.1", environ={"COLUMNS": "90"}) as watcher:
        watcher.wait_for("idle 7 s")
        assert watcher.end() == 0
    text = watcher.text()
    assert watcher.errors == ""
    assert text.startswith("\x1b[?1049h\x1b[?25l"), "the alternate screen, without a cursor"
    assert text.endswith("\x1b[?25h\x1b[?1049l"), "and the first screen again"
    assert "\x1b[2J" not in text, "clearing the whole screen flickers"
    assert text.count("\x1b[H") >= 2
    assert "\x1b[1;36mEMULATED" in text


def test_watch_waits_for_the_brokers_return(broker):
    broker.snapshots = [pool(), None, pool(sessions=[session("b00c")])]
    with Watcher("--interval", "0.1", environ={"NO_COLOR": "1"}) as watcher:
        watcher.wait_for("Trying again ...")
        watcher.wait_for("b00c")
        assert watcher.end() == 0
    assert "\x1b[1m" not in watcher.text(), "no colour with NO_COLOR"


def test_watch_without_a_broker_is_an_error_at_once(tmp_path, capsys):
    assert main(["status", "--watch"]) == 1
    assert "No GPU pool broker listens" in capsys.readouterr().err


def test_watch_json_prints_a_line_per_snapshot(broker, capsys):
    broker.snapshots = [pool(now=1.0), pool(now=2.0), None]
    assert main(["status", "--watch", "--json", "--interval", "0.1"]) == 1
    captured = capsys.readouterr()
    assert [json.loads(line)["now"] for line in captured.out.splitlines()] == [1.0, 2.0]
    assert "closed the connection" in captured.err


def test_colour_and_unicode_depend_on_the_terminal(monkeypatch):
    class Stream:
        encoding = "utf-8"

        def isatty(self):
            return True

    assert style_for(Stream(), {}).colour
    assert not style_for(Stream(), {"NO_COLOR": "1"}).colour
    assert not style_for(Stream(), {"TERM": "dumb"}).colour
    assert style_for(Stream(), {}).unicode
    Stream.encoding = "ANSI_X3.4-1968"
    assert not style_for(Stream(), {}).unicode


# ------------------------------------------------------------------ release

SESSIONS = [
    session("3f2a11", label="9c0d33"),
    session("3f2b22", label="train"),
    session("9c0d33"),
    session("9c0d3344"),
    session("aa01", label="twin"),
    session("bb02", label="twin"),
]


@pytest.mark.parametrize(
    ("name", "found"),
    [("3f2a", "3f2a11"), ("3f2b22", "3f2b22"), ("9c0d33", "9c0d33"), ("kernel-3f2b", "3f2b22")],
)
def test_session_is_found_by_the_first_letters_of_its_id(name, found):
    assert find_session(name, SESSIONS) == found


def test_session_is_found_by_the_name_that_ps_and_status_show():
    assert find_session("train", SESSIONS) == "3f2b22"


LISTED = "`jupyter gpupool status` lists them."


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("3f2", "2 sessions match '3f2': 3f2a11, 3f2b22. Write the id of one of them."),
        ("twin", "2 sessions match 'twin': aa01, bb02. Write the id of one of them."),
        (
            "zz",
            f"No session has the name 'zz', and no session or kernel id begins with it. {LISTED}",
        ),
        (
            "",
            f"No session has the name '', and no session or kernel id begins with it. {LISTED}",
        ),
    ],
)
def test_unknown_or_ambiguous_session_is_refused(name, message):
    with pytest.raises(RefusedError) as caught:
        find_session(name, SESSIONS)
    assert str(caught.value) == message


def test_release_prints_the_note_of_the_broker(broker, capsys):
    broker.answers["status"] = pool(sessions=SESSIONS)
    broker.answers["release"] = {"note": "The slice goes back when the cell ends."}
    assert main(["release", "3f2a"]) == 0
    assert capsys.readouterr().out == "The slice goes back when the cell ends.\n"
    assert broker.requests[-1]["type"] == "release"
    assert broker.requests[-1]["session"] == "3f2a11"


def test_release_of_an_unknown_session_sends_no_request(broker, capsys):
    broker.answers["status"] = pool(sessions=SESSIONS)
    assert main(["release", "nope"]) == 1
    assert "has the name 'nope'" in capsys.readouterr().err
    assert {request["type"] for request in broker.requests} == {"status"}


def test_whole_refusal_of_the_broker_is_printed(broker, capsys):
    broker.answers["status"] = pool(sessions=SESSIONS)
    broker.answers["release"] = {
        "type": "error", "code": "not-yours", "message": "Session 3f2a11 is not yours.",
        "next_step": "Ask an admin.", "details": {},
    }  # fmt: skip
    assert main(["release", "3f2a"]) == 1
    assert capsys.readouterr().err == (
        "jupyter gpupool: Session 3f2a11 is not yours. Ask an admin.\n"
    )
