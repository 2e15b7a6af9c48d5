# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter gpupool install-service``: its files, its commands and its refusals."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from dataclasses import replace
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

#: The layout that the example files use.
LAYOUT = Layout(
    Path("/opt/gpupool/bin/python"), (), Path("/run/gpupool/broker.sock"), Path("/var/lib/gpupool")
)


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Return a function that calls the command with fake programs such as ``systemctl``.

    The fake programs only record their arguments.
    """
    programs, machine, calls = tmp_path / "bin", tmp_path / "machine", tmp_path / "calls"
    programs.mkdir()
    machine.mkdir()
    calls.write_text("")
    for name in ("systemctl", "systemd-tmpfiles", "rc-update", "rc-service", "ln", "sv", "rm"):
        program = programs / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {calls}\n[ ! -e {tmp_path}/fail ]\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr(module, "_check_programs", lambda _layout: None)

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
    assert call()[-1] == "systemctl restart gpupool.service"  # an upgrade ends no kernel
    assert call(undo=True) == [
        "systemctl disable --now gpupool.service gpupool.socket",
        "rm -f /run/gpupool/broker.sock", "systemctl daemon-reload",
    ]  # fmt: skip
    assert files_in(call.machine) == set()
    assert call(undo=True) == []


@root_only
@pytest.mark.parametrize("manager", ["openrc", "runit"])
def test_openrc_and_runit_start_and_remove_the_service(call, manager):
    begun = call(manager)
    programs = [call.machine / name for name in files_in(call.machine)]
    assert all(path.stat().st_mode & 0o111 for path in programs)
    assert begun
    assert "rm -f /run/gpupool/broker.sock" in call(manager, undo=True)
    assert files_in(call.machine) == set()


@root_only
@pytest.mark.parametrize("manager", MANAGERS)
def test_failed_installation_can_be_finished_or_undone(call, manager, tmp_path, capsys):
    begun = call(manager)
    shutil.rmtree(call.machine)
    call.fail.touch()
    with pytest.raises(ServiceError):
        call(manager)
    call.fail.unlink()
    again = call(manager)
    if manager != "systemd":  # an upgrade under systemd also enables the units
        assert again[0] == begun[0]
    call.fail.touch()
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    assert "rm -f /run/gpupool/broker.sock" in call(manager, undo=True, config=[broken])
    assert files_in(call.machine) == set()
    assert "This command failed with exit code 1" in capsys.readouterr().out


@root_only
@pytest.mark.parametrize("manager", MANAGERS)
def test_undo_keeps_the_files_while_the_broker_runs(call, manager):
    call(manager)
    before = files_in(call.machine)
    lock = call.machine / "run/gpupool/broker.sock.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ServiceError, match="still runs") as refused:
            call(manager, undo=True)
        assert "No file was removed" in refused.value.next_step
        assert before < files_in(call.machine)
        assert not any(
            f"rm -f {module.MACHINE_SOCKET}" in c for c in call.calls.read_text().splitlines()
        )
    call(manager, undo=True)
    assert files_in(call.machine) == {"run/gpupool/broker.sock.lock"}


@root_only
@pytest.mark.parametrize("manager", MANAGERS)
def test_upgrade_keeps_the_configuration_files(call, manager, tmp_path, capsys):
    config = tmp_path / "it's 100% of it.py"
    config.write_text("")
    call(manager, config=[config])
    before = {path: (call.machine / path).read_text() for path in files_in(call.machine)}
    capsys.readouterr()
    call(manager)
    assert {path: (call.machine / path).read_text() for path in before} == before
    assert capsys.readouterr().out.startswith(f"The service keeps --config {config} of")
    other = tmp_path / "other.py"
    other.write_text("")
    call(manager, config=[other])
    assert "Keep" not in capsys.readouterr().out
    assert not any("100%" in (call.machine / path).read_text() for path in before)


@root_only
def test_installation_does_not_write_through_an_existing_link(call):
    folder = call.machine / "etc/tmpfiles.d"
    folder.mkdir(parents=True)
    (folder / ".gpupool.conf.new").symlink_to(call.machine / "victim")
    call()
    assert not (call.machine / "victim").exists()
    assert (folder / "gpupool.conf").stat().st_mode & 0o777 == 0o644


@root_only
def test_unit_of_a_service_that_hosts_kernels_has_no_limits(call, tmp_path, capsys):
    unit = call.machine / "etc/systemd/system/gpupool.service"
    limits = ("CapabilityBoundingSet=", "ProtectHome=", "SystemCallFilter=", "NoNewPrivileges=")
    call()
    assert all(limit in unit.read_text() for limit in limits)
    assert "KillMode=mixed" in unit.read_text()
    config = tmp_path / "config.json"
    config.write_text('{"GPUPool": {"cluster_identity": "munge"}}')
    capsys.readouterr()
    call(config=[config])
    assert "starts kernels for servers on other machines" in capsys.readouterr().out
    assert not any(limit in unit.read_text() for limit in limits)
    assert "KillMode=process" in unit.read_text()


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
def test_failed_command_is_named_with_its_exit_code(call):
    call.fail.touch()
    with pytest.raises(ServiceError) as failed:
        call()
    assert "exit code 1: systemd-tmpfiles --create" in failed.value.message
    assert "--undo" in failed.value.next_step


def test_installation_into_an_image_runs_no_command(call, tmp_path, capsys):
    assert call(root=tmp_path / "image") == []
    assert "etc/systemd/system/gpupool.socket" in files_in(tmp_path / "image")
    assert "Not run, because of --root: systemctl enable" in capsys.readouterr().out


def test_user_who_is_not_root_is_refused(call, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ServiceError, match="Only root may"):
        call()
    call(dry_run=True)


def refused_programs(layout):
    with pytest.raises(ServiceError) as refused:
        module._check_programs(layout)
    assert "as root, but a user who is not root can change /" in refused.value.message
    return refused.value.message


@root_only
def test_program_that_others_may_change_is_refused(tmp_path, monkeypatch):
    for name in ("mine", "theirs", "bin"):
        (tmp_path / name).mkdir()
    real, link, python = (tmp_path / n for n in ("mine/real", "theirs/link", "bin/python"))
    real.touch()
    link.symlink_to(real)
    python.symlink_to("../theirs/link")
    layout = Layout(python, (), LAYOUT.socket, LAYOUT.state)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "bin")])
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755)
    module._check_programs(layout)
    real.parent.chmod(0o775)  # root's group can write to the folder
    module._check_programs(layout)
    os.chown(link.parent, 65534, -1)  # the path to the program goes through a link in this folder
    assert str(link.parent) in refused_programs(layout)
    os.chown(link.parent, 0, -1)
    real.chmod(0o666)
    assert f"{real} (owner 0, mode 666)" in refused_programs(layout)
    real.chmod(0o755)
    for name in ("config", "loader"):
        (tmp_path / "theirs" / name).touch()
        os.chown(tmp_path / "theirs" / name, 65534, -1)
    config, loader = tmp_path / "theirs/config", tmp_path / "theirs/loader"
    assert str(config) in refused_programs(replace(layout, config=(config,)))
    assert str(loader) in refused_programs(replace(layout, loader=loader))
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "theirs" / "missing")])
    module._check_programs(layout)
    link.parent.chmod(0o1777)  # sticky: users may add files here, but replace only their own
    assert "missing" in refused_programs(layout)


@root_only
def test_socket_of_a_broker_without_a_service_manager_is_refused(call, monkeypatch):
    monkeypatch.setattr(module, "listening_at", lambda _lock: module.MACHINE_SOCKET)
    with pytest.raises(ServiceError) as refused:
        call()
    assert "no service manager started" in refused.value.message
    assert files_in(call.machine) == set()


def test_socket_path_that_kernels_do_not_search_is_refused(call, tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"GPUPool": {"socket": "/run/other/broker.sock"}}')
    with pytest.raises(ServiceError, match="where the kernels of all users look"):
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
def test_example_files_equal_what_the_command_writes(manager):
    for file in MANAGERS[manager].files(LAYOUT):
        example = ROOT / "examples" / "service" / manager / file.path.relative_to("/etc")
        assert example.read_text() == stamped(file.text), example


@analyze
def test_systemd_accepts_the_units_and_rates_them_safe(tmp_path):
    python = tmp_path / "bin of 100% $HOME" / "python"
    python.parent.mkdir()
    shutil.copy("/bin/true", python)
    layout = Layout(python, (tmp_path / "a b.py",), LAYOUT.socket, Path("/srv/my pool"),
                    Path("/bin/true"))  # fmt: skip
    odd = Path("/var/lib/100% of it")
    for one in (
        layout,
        replace(layout, state=odd),
        Layout(python, (), LAYOUT.socket, LAYOUT.state),
    ):
        units = written(tmp_path, "systemd", one)
        done = subprocess.run(
            ["systemd-analyze", "verify", units["gpupool.service"], units["gpupool.socket"]],
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
    # systemd rates the exposure of a unit from 0 (safe) to 100. A unit without any restriction
    # gets 96.
    rated = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=42",
         units["gpupool.service"]], capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert rated.returncode == 0, rated.stdout[-300:]


def test_folder_of_the_journal_may_have_any_name():
    files = MANAGERS["systemd"].files(replace(LAYOUT, state=Path("/var/lib/100% of it")))
    texts = {file.path.name: file.text for file in files}
    assert 'd "/var/lib/100%% of it" 0700 root root -\n' in texts["gpupool.conf"]
    assert '\nStateDirectory="100%% of it"\n' in texts["gpupool.service"]


def test_unit_lets_the_broker_write_temporary_files():
    unit = MANAGERS["systemd"].files(LAYOUT)[-1].text
    assert "\nReadWritePaths=-/tmp -/var/tmp\n" in unit


def test_scripts_run_a_broker_in_a_path_with_special_characters(tmp_path):
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
    # Split the arguments with the shell's eval, as OpenRC does before it calls supervise-daemon.
    done = subprocess.run(
        ["sh", "-c", '. "$1"; eval "set -- $command_args"; "$command" "$@"', "sh", script],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.splitlines() == words
