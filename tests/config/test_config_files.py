# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""How configuration files are found, read and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from traitlets.config import Config

from jupyter_gpupool.config import check_config, load_settings, loading
from jupyter_gpupool.errors import ConfigError

GiB = 1 << 30


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Make configuration folders for a user and for the system, and hide the real folders."""
    user, system = tmp_path / "user", tmp_path / "system"
    user.mkdir()
    system.mkdir()
    monkeypatch.setattr(loading, "jupyter_config_path", lambda: [str(user), str(system)])
    monkeypatch.delenv("GPUPOOL_EMULATE", raising=False)
    return user, system


def write(folder: Path, text: str | dict, name: str = "jupyter_server_config") -> Path:
    path = folder / (f"{name}.json" if isinstance(text, dict) else f"{name}.py")
    path.write_text(json.dumps(text) if isinstance(text, dict) else text)
    return path


def refusal(*args, **kwargs) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_settings(*args, **kwargs)
    return caught.value


def test_options_have_their_defaults_without_files(folders):
    settings = load_settings()
    assert settings.files == ()
    assert settings.notes == ()
    assert settings.attach == "lazy"
    assert (settings.pool.default_memory, settings.pool.default_limit) == (4 * GiB, None)


def test_files_are_read_in_jupyters_order(folders):
    user, system = folders
    low = write(system, "c.GPUPool.idle_timeout = 1; c.GPUPool.max_wait = 1; c.GPUPool.linger = 1")
    base = write(user, "c.GPUPool.linger = 2; c.GPUPool.sample_interval = 2", "jupyter_config")
    mid = write(user, "c.GPUPool.idle_timeout = 3; c.GPUPool.lock_timeout = 3")
    top = write(user, {"GPUPool": {"lock_timeout": "4s"}})
    settings = load_settings()
    assert settings.files == (low, base, mid, top)
    pool = settings.pool
    assert (pool.max_wait, pool.idle_timeout) == (1, 3)
    assert (settings.linger, settings.sample_interval, settings.lock_timeout) == (2, 2, 4)


def test_command_line_wins_over_explicit_files(folders, tmp_path):
    user, _ = folders
    write(user, "c.GPUPool.idle_timeout = 1; c.GPUPool.linger = 1; c.GPUPool.max_wait = 1")
    more = write(tmp_path, "c.GPUPool.idle_timeout = 2; c.GPUPool.linger = 2", "more")
    settings = load_settings([more], Config({"GPUPool": {"idle_timeout": 3}, "Other": {"x": 1}}))
    assert (settings.pool.max_wait, settings.linger, settings.pool.idle_timeout) == (1, 2, 3)


def test_changes_to_one_dict_in_several_files_are_combined(folders):
    user, system = folders
    write(system, "c.GPUPool.admins.append('ada'); c.GPUPool.quotas.update({'*': {'leases': 1}})")
    write(user, "c.GPUPool.admins.append('bob'); c.GPUPool.quotas.update({'bob': {'leases': 2}})")
    settings = load_settings()
    assert settings.admins == ("ada", "bob")
    assert {name: quota.leases for name, quota in settings.pool.quotas.items()} == {
        "*": 1,
        "bob": 2,
    }


def test_the_working_directory_is_not_searched(folders, tmp_path, monkeypatch):
    notebooks = tmp_path / "notebooks"
    notebooks.mkdir()
    write(notebooks, "c.GPUPool.idle_timeout = 1")
    monkeypatch.chdir(notebooks)
    assert load_settings().files == ()


def test_sections_of_other_applications_are_ignored(folders):
    user, _ = folders
    write(user, "c.ServerApp.prot = 1; c.GPUPoolProvisioner.x = 1; c.GPUPool.linger = 1")
    assert load_settings().linger == 1


def test_unknown_option_is_refused_with_the_nearest_name(folders):
    path = write(folders[0], "c.GPUPool.idle_timout = 60")
    assert str(refusal()) == (
        f"c.GPUPool.idle_timout in {path}, line 1: there is no such option. Did you mean "
        "'idle_timeout'? `jupyter gpupool generate-config` lists all."
    )


def test_unknown_option_without_a_similar_name_is_refused(folders):
    path = write(folders[0], "c.GPUPool.zzz = 60")
    assert str(refusal()) == (
        f"c.GPUPool.zzz in {path}, line 1: there is no such option. "
        "`jupyter gpupool generate-config` lists all."
    )


def test_sections_of_other_programs_are_not_called_misspelt(folders):
    fine = "c.GPUPoolProvisioner.memory = '1GiB'; c.ServerApp.port = 1; c.Spawner.pool = 2\n"
    path = write(folders[0], fine)
    load_settings()
    path.write_text(fine + "c.GPUPoolProvisoner.memory = '1GiB'")
    assert str(refusal()) == (
        f"c.GPUPoolProvisoner in {path}, line 2 is not the name of the pool's provisioner. "
        "Write c.GPUPoolProvisioner."
    )


@pytest.mark.parametrize(
    "section", ["GpuPool", "GPUpool", "GPU_Pool", "GPUPol", "GPUPooll", "GPUPools"]
)
def test_a_misspelt_section_is_refused(folders, section):
    path = write(folders[0], f"c.{section}.idle_timeout = 60")
    assert str(refusal()) == (
        f"c.{section} in {path}, line 1 is not the name of the pool. Write c.GPUPool."
    )


def test_refusal_names_the_command_line_as_the_origin(folders):
    error = refusal(None, Config({"GPUPool": {"atach": "cell"}}))
    assert str(error).startswith("c.GPUPool.atach in the command line: there is no such option.")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_module", "ModuleNotFoundError, line 1: No module named 'no_such_module'."),
        ("1 / 0", "ZeroDivisionError, line 1: division by zero."),
        ("c.GPUPool. = 1", "SyntaxError, line 1: invalid syntax"),
    ],
)
def test_error_in_a_file_names_the_file(folders, text, message):
    path = write(folders[0], text)
    error = refusal()
    assert error.message.startswith(f"The configuration file {path} cannot be read: {message}")
    assert error.code == "config"


def test_error_in_a_file_names_the_line(folders):
    path = write(folders[0], "def f():\n    return {}['no']\n\nf()\n")
    text = f"The configuration file {path} cannot be read: KeyError, line 2: 'no'."
    assert refusal().message.startswith(text)


@pytest.mark.parametrize("text", ["default_memory = 4", "quotas = {'*': {'memory': 4}}"])
def test_a_size_without_a_unit_is_refused_if_it_is_tiny(folders, text):
    write(folders[0], f"c.GPUPool.{text}")
    assert "4 means 4 bytes. Write a unit, such as '4GiB'." in str(refusal())


def test_file_that_calls_exit_does_not_end_the_program(folders):
    path = write(folders[0], "raise SystemExit(3)")
    assert str(refusal()) == (
        f"The configuration file {path} ended the program with SystemExit(3). Remove the call "
        "that ends the program, such as sys.exit()."
    )


def test_file_with_invalid_json_is_refused(folders):
    (folders[0] / "jupyter_server_config.json").write_text('{"GPUPool": {,}}')
    assert "cannot be read: JSONDecodeError" in str(refusal())


def test_an_explicit_file_must_exist(folders, tmp_path):
    missing = tmp_path / "missing.py"
    assert str(refusal([missing])) == (f"There is no configuration file {missing}. Check the path.")


def test_wrong_option_without_an_origin_is_refused():
    with pytest.raises(ConfigError, match=r"^c\.GPUPool\.attach: 'x' is not allowed"):
        check_config(Config({"GPUPool": {"attach": "x"}}))
