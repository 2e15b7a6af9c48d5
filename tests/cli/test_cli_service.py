# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter gpupool install-service``: its files, its commands, and what it refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from jupyter_gpupool.cli import install_service as module
from jupyter_gpupool.cli.install_service import ServiceError, install_service
from jupyter_gpupool.cli.service_files import MANAGERS, Layout, is_unchanged, stamped

ROOT = Path(__file__).parents[2]
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root may install a service")
analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)

#: What the examples say.
LAYOUT = Layout(
    Path("/opt/gpupool/bin/python"), (), Path("/run/gpupool/broker.sock"), Path("/var/lib/gpupool")
)


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Call the command on a machine whose programs only note how they were called."""
    programs, machine, calls = tmp_path / "bin", tmp_path / "machine", tmp_path / "calls"
    programs.mkdir()
    machine.mkdir()
    calls.write_text("")
    for name in ("systemctl", "systemd-tmpfiles", "rc-update", "rc-service", "ln", "sv", "rm"):
        program = programs / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {calls}\n[ ! -e {tmp_path}/fail ]\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr(module, "_check_program", lambda _python: None)

    def run(manager="systemd", **options):
        calls.write_text("")
        values = {"root": None, "config": [], "undo": False, "dry_run": False, **options}
        assert install_service(manager=manager, machine=machine, **values) == 0
        return calls.read_text().splitlines()

    run.machine, run.calls, run.fail = machine, calls, tmp_path / "fail"
    return run


def files_in(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


@root_only
@pytest.mark.parametrize("manager", MANAGERS)
def test_dry_run_shows_all_and_changes_nothing(call, capsys, manager):
    assert call(manager, dry_run=True) == []
    assert files_in(call.machine) == set()
    shown = capsys.readouterr().out
    for file in MANAGERS[manager].files(LAYOUT):
        assert f"Write {call.machine}{file.path}" in shown
    assert "-m jupyter_gpupool.broker --socket /run/gpupool/broker.sock" in shown
    assert shown.endswith("Nothing was changed.\n")


@root_only
def test_install_upgrade_and_undo_run_the_commands_of_systemd(call):
    tmpfiles = "systemd-tmpfiles --create /etc/tmpfiles.d/gpupool.conf"
    assert call() == [
        tmpfiles, "systemctl daemon-reload", "systemctl enable --now gpupool.socket gpupool.service"
    ]  # fmt: skip
    assert files_in(call.machine) == {
        "etc/tmpfiles.d/gpupool.conf", "etc/systemd/system/gpupool.socket",
        "etc/systemd/system/gpupool.service",
    }  # fmt: skip
    assert call()[-1] == "systemctl restart gpupool.service"  # an upgrade; no kernel ends
    assert call(undo=True) == [
        "systemctl disable --now gpupool.service gpupool.socket", "systemctl daemon-reload"
    ]  # fmt: skip
    assert files_in(call.machine) == set()
    assert call(undo=True) == []


@root_only
@pytest.mark.parametrize("manager", ["openrc", "runit"])
def test_other_managers_begin_and_end_the_service(call, manager):
    begun = call(manager)
    programs = [call.machine / name for name in files_in(call.machine)]
    assert all(path.stat().st_mode & 0o111 for path in programs)
    assert begun
    assert call(manager, undo=True)
    assert files_in(call.machine) == set()


@root_only
def test_file_that_an_admin_changed_stays_as_it_is(call):
    call()
    unit = call.machine / "etc/systemd/system/gpupool.service"
    mine = unit.read_text().replace("RestartSec=1", "RestartSec=7")
    unit.write_text(mine)
    for undo in (False, True):
        with pytest.raises(ServiceError) as refused:
            call(undo=undo)
        assert str(unit) in refused.value.message
        assert "drop-in" in refused.value.next_step
        assert unit.read_text() == mine
        assert call.calls.read_text() == ""


@root_only
def test_command_that_fails_is_named_with_what_it_said(call):
    call.fail.touch()
    with pytest.raises(ServiceError) as failed:
        call()
    assert "exit code 1: systemd-tmpfiles --create" in failed.value.message
    assert "--undo" in failed.value.next_step


def test_image_gets_the_files_and_no_command_runs(call, tmp_path, capsys):
    assert call(root=tmp_path / "image") == []
    assert "etc/systemd/system/gpupool.socket" in files_in(tmp_path / "image")
    assert "Not run here: systemctl enable" in capsys.readouterr().out


def test_user_who_is_not_root_is_refused(call, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ServiceError, match="Only root may"):
        call()
    call(dry_run=True)


@root_only
def test_environment_that_others_may_write_is_refused(tmp_path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.touch()
    for change in (lambda: os.chown(python, 65534, -1), lambda: python.parent.chmod(0o777)):
        change()
        with pytest.raises(ServiceError) as refused:
            module._check_program(python)
        assert "a user who is not root may change it" in refused.value.message
        os.chown(python, 0, -1)


@root_only
def test_socket_of_a_broker_that_is_no_service_is_refused(call, monkeypatch):
    monkeypatch.setattr(module, "listening_at", lambda _lock: module.MACHINE_SOCKET)
    with pytest.raises(ServiceError) as refused:
        call()
    assert "no service manager started" in refused.value.message
    assert files_in(call.machine) == set()


def test_socket_elsewhere_in_the_configuration_is_refused(call, tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"GPUPool": {"socket": "/run/other/broker.sock"}}')
    with pytest.raises(ServiceError, match="every user's kernels look"):
        call(config=[config], dry_run=True)


@pytest.mark.parametrize("text", ["#!/bin/sh\nexec true\n", "[Unit]\nDescription=x\n"])
def test_checksum_shows_any_change(text):
    written = stamped(text)
    assert is_unchanged(written)
    assert written.startswith("#")
    assert not is_unchanged(text)
    assert not is_unchanged(written + "\n")
    assert not is_unchanged(written.replace("x", "y"))


def written(folder, manager, layout):
    found = {}
    for file in MANAGERS[manager].files(layout):
        path = folder / "-".join(file.path.parts[3:]) if manager == "runit" else None
        path = path or folder / file.path.name
        path.write_text(stamped(file.text))
        found[path.name] = path
    return found


@pytest.mark.parametrize("manager", MANAGERS)
def test_examples_are_what_the_command_writes(manager):
    for file in MANAGERS[manager].files(LAYOUT):
        example = ROOT / "examples" / "service" / manager / file.path.relative_to("/etc")
        assert example.read_text() == stamped(file.text), example


@analyze
def test_systemd_accepts_the_units_and_rates_them_ok(tmp_path):
    python = tmp_path / "bin of 100% $HOME" / "python"
    python.parent.mkdir()
    shutil.copy("/bin/true", python)
    layout = Layout(python, (tmp_path / "a b.py",), LAYOUT.socket, Path("/srv/pool"), "/bin/true")
    for one in (layout, Layout(python, (), LAYOUT.socket, LAYOUT.state)):
        units = written(tmp_path, "systemd", one)
        done = subprocess.run(
            ["systemd-analyze", "verify", units["gpupool.service"], units["gpupool.socket"]],
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
    # Out of 100, less is safer; a unit without any restriction has 96.
    rated = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=42",
         units["gpupool.service"]], capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert rated.returncode == 0, rated.stdout[-300:]


def test_scripts_run_the_broker_whatever_is_in_its_path(tmp_path):
    python = tmp_path / "it's 100% $HOME" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    layout = Layout(
        python, (tmp_path / "a b.py",), tmp_path / "run of it" / "broker.sock", tmp_path / "state"
    )
    words = layout.command[1:]
    script = written(tmp_path, "runit", layout)["gpupool-run"]
    done = subprocess.run(["sh", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == words
    assert layout.socket.parent.is_dir()
    assert layout.state.stat().st_mode & 0o777 == 0o700
    script = written(tmp_path, "openrc", layout)["gpupool"]
    # supervise-daemon gets the words through the shell's eval, as in OpenRC's own script.
    done = subprocess.run(
        ["sh", "-c", '. "$1"; eval "set -- $command_args"; "$command" "$@"', "sh", script],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.splitlines() == words
