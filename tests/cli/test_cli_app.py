# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Usage, help and exit codes of the commands, and the arguments that each command passes on."""

from __future__ import annotations

import sys
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType

import pytest
from traitlets.config.loader import PyFileConfigLoader

from jupyter_gpupool import __version__
from jupyter_gpupool.cli import main
from jupyter_gpupool.cli.commands import COMMANDS, subcommands
from jupyter_gpupool.cli.configtext import commented_config, options
from jupyter_gpupool.config import GPUPool, check_config, load_settings, load_timetable
from jupyter_gpupool.errors import DriverError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND."),
        (["stauts"], "there is no command 'stauts'. Did you mean 'status'?"),
        (["zzz"], "there is no command 'zzz'."),
        (["--bogus", "status"], "unrecognized arguments: --bogus."),
    ],
)
def test_wrong_usage_is_explained(arguments, message, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"jupyter gpupool: {message} See `jupyter gpupool --help`.\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["status", "--interval", "0"], "'0' is not a number of seconds from 0.1 to 3600"),
        (["status", "--interval", "soon"], "'soon' is not a number of seconds"),
        (["release"], "the following arguments are required: SESSION"),
        (
            ["install-service", "--manager", "systmd"],
            "--manager takes systemd, openrc, runit, not 'systmd'. Did you mean 'systemd'?",
        ),
        (["cluster", "stat"], "ORDER takes status, drain, resume, "),
        (["wrap", "x", "--user", "--prefix", "y"], "not allowed with argument"),
    ],
)
def test_wrong_usage_of_a_command_is_explained(arguments, words, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"jupyter gpupool {arguments[0]}: ")
    assert words in error
    assert error.endswith(f"See `jupyter gpupool {arguments[0]} --help`.\n")
    assert error.count("\n") == 1


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for command in COMMANDS:
        assert f" {command}" in out
    assert set(subcommands()) == set(COMMANDS)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "broker"])
def test_every_command_has_help(command, capsys):
    assert main([command, "--help"]) == 0
    codes = "the code of" if command in ("run", "wait") else "0 done"
    assert f"Exit codes: {codes}" in capsys.readouterr().out


def test_version_option_prints_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def replace_module(monkeypatch, name: str, **functions) -> None:
    module = ModuleType(name)
    for key, value in functions.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


def test_broker_command_passes_its_options_to_the_broker(monkeypatch):
    seen = []
    replace_module(monkeypatch, "jupyter_gpupool.broker.app", main=lambda a: seen.append(a) or 7)
    assert main(["broker", "--help", "--GPUPool.emulate=2x16GiB"]) == 7
    assert seen == [["--help", "--GPUPool.emulate=2x16GiB"]]


def test_demo_command_passes_its_options_to_the_demo(monkeypatch):
    seen = []
    replace_module(
        monkeypatch,
        "jupyter_gpupool.demo",
        run_demo=lambda **k: seen.append(k) or 1,
        run_lab=lambda **k: seen.append(k),
    )
    assert main(["demo", "--emulate", "1x1GiB", "--svg", "x.svg"]) == 1
    assert main(["demo", "--lab"]) == 0
    assert seen == [{"emulate": "1x1GiB", "svg": "x.svg"}, {"emulate": ""}]


def test_error_of_the_pool_is_one_sentence(monkeypatch, capsys):
    def fail(**_):
        raise DriverError("The driver said no.", next_step="Ask it again.")

    replace_module(monkeypatch, "jupyter_gpupool.demo", run_demo=fail, run_lab=fail)
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == "jupyter gpupool: The driver said no. Ask it again.\n"


def test_interrupt_shows_no_traceback(monkeypatch, capsys):
    def interrupt(**_):
        raise KeyboardInterrupt

    replace_module(monkeypatch, "jupyter_gpupool.demo", run_demo=interrupt, run_lab=interrupt)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "\n"


# ------------------------------------------------------------------ generate-config


def load(text: str, folder: Path):
    path = folder / "generated.py"
    path.write_text(text)
    return PyFileConfigLoader(path.name, path=str(folder)).load_config()


def test_generated_configuration_file_sets_no_option(tmp_path, capsys):
    assert main(["generate-config"]) == 0
    config = load(capsys.readouterr().out, tmp_path)
    assert "GPUPool" not in config


def test_every_example_in_the_generated_file_is_valid(tmp_path):
    text = commented_config().replace("\n# c.GPUPool", "\nc.GPUPool")
    config = load(text, tmp_path)
    check_config(config)
    assert set(config["GPUPool"]) == set(GPUPool.class_traits(config=True))
    assert {name for name, _ in options()} == set(GPUPool.class_traits(config=True))


def test_example_of_day_and_night_can_be_loaded():
    path = Path(__file__).parents[2] / "examples/day_and_night.py"
    times = load_timetable([path])
    at = [datetime(2026, 11, day, 22, tzinfo=timezone.utc).timestamp() for day in (23, 27, 28)]
    caps = [times.under(times.rules(now)).pool.groups["students"].cap.percent for now in at]
    assert caps == [90, 100, 100]
    assert times.base.pool.groups["students"].cap.percent == 50
    noon = datetime(2026, 11, 27, 11, tzinfo=timezone.utc).timestamp()
    assert times.rules(noon) == ()
    # The two schedules leave no gap between Friday evening and Monday morning.
    assert [names for at, names in walk(times, noon, 3)] == [
        ("weekend",), ("weekend, the whole day",), (),
    ]  # fmt: skip


def walk(times, now, steps):
    """Yield the time of each of the next changes, and the schedules in force after the change."""
    for _ in range(steps):
        now, rules = times.next_change(now)
        yield now, times.names(rules)


def test_example_configuration_can_be_loaded(monkeypatch):
    path = Path(__file__).parents[2] / "examples/jupyter_server_config.py"
    settings = load_settings([path])
    assert settings.files == (path,)
    assert settings.notes == ()
    assert settings.pool.quotas["ada"].leases == 4
    assert settings.foreign_processes == "report"
    assert settings.attach == GPUPool().attach
