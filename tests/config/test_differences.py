# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The message to a server whose configuration differs from the configuration of its broker."""

from __future__ import annotations

import json

import pytest
from traitlets.config import Config
from traitlets.config.loader import KVArgParseConfigLoader

from jupyter_gpupool.config import load_settings
from jupyter_gpupool.config.differences import differences, not_logged, notice, shown


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path))
    monkeypatch.delenv("JUPYTER_NO_CONFIG", raising=False)
    monkeypatch.delenv("GPUPOOL_EMULATE", raising=False)
    return tmp_path


def status(settings, *, private=True, machine_wide=False):
    told = {
        "config": shown(settings, private=private), "pid": 77,
        "broker": {"machine_wide": machine_wide},
    }  # fmt: skip
    return json.loads(json.dumps(told))


def settings(**options):
    return load_settings(overrides=Config({"GPUPool": options}))


def test_equal_values_in_another_notation_are_no_difference(folder):
    quotas = {"*": {"memory": 1 << 20}}
    broker = status(settings(default_memory="2GiB", idle_timeout=600, quotas=quotas))
    loader = KVArgParseConfigLoader(
        argv=["--GPUPool.default_memory=2048MiB", "--GPUPool.idle_timeout=10min"]
    )
    section = dict(loader.load_config()["GPUPool"]) | {"quotas": {"*": {"memory": 1 << 20}}}
    assert notice(section, broker) == ""


def test_message_has_the_values_and_origins_of_both_sides(folder):
    (folder / "jupyter_server_config.json").write_text(
        json.dumps({"GPUPool": {"idle_timeout": 900}})
    )
    broker = status(load_settings())
    text = notice({"idle_timeout": 5}, broker)
    path = folder / "jupyter_server_config.json"
    assert f"c.GPUPool.idle_timeout is 900 s (from {path}), not 5 s (from the command line)" in text
    assert "process 77" in text
    assert "SIGHUP" in text


def test_message_names_an_option_that_only_the_broker_sets(folder):
    text = notice(None, status(settings(emulate="2x1GiB")))
    assert "emulate is '2x1GiB' (from the command line), not '' (from the default)" in text


def test_variable_that_sets_an_option_is_named_as_origin(folder, monkeypatch):
    monkeypatch.setenv("GPUPOOL_EMULATE", "1x1GiB")
    assert load_settings().origins["emulate"] == "$GPUPOOL_EMULATE"
    broker = status(load_settings())
    assert notice(None, broker) == ""
    monkeypatch.delenv("GPUPOOL_EMULATE")
    assert "from $GPUPOOL_EMULATE" in notice(None, broker)


def test_machine_wide_broker_hides_users_and_refers_to_the_admin(folder):
    broker = settings(quotas={"ada": {"memory": "5MiB"}}, admins=["bob"], idle_timeout=5)
    told = status(broker, private=False, machine_wide=True)
    assert "ada" not in json.dumps(told)
    assert "bob" not in json.dumps(told)
    assert notice(None, told) == ""  # no notice about options that only the service's own files set
    text = notice({"idle_timeout": 7}, told)
    assert "idle_timeout is 5 s (from the command line), not 7 s" in text
    assert "quotas" not in text
    assert "ask your admin" in text
    assert {d.option for d in differences(settings(), status(broker)["config"])} == {
        "quotas", "admins", "idle_timeout",
    }  # fmt: skip


def test_option_from_a_server_keeps_its_file_as_origin(folder):
    path = folder / "jupyter_server_config.json"
    path.write_text(json.dumps({"GPUPool": {"idle_timeout": 900}}))
    handed = load_settings(overrides=Config({"GPUPool": {"idle_timeout": 900, "linger": 5}}))
    assert handed.origins == {"idle_timeout": str(path), "linger": "the command line"}


def test_no_notice_if_the_broker_reports_no_configuration(folder):
    assert notice({"idle_timeout": 5}, {}) == ""


def test_mistake_in_the_servers_own_configuration_is_named(folder):
    text = notice({"idle_timeoutt": 5}, status(settings()))
    assert "idle_timeoutt" in text
    assert "the pool does not use this configuration" in text


def test_difference_is_logged_once():
    assert not_logged("one difference")
    assert not not_logged("one difference")
    assert not_logged("another difference")
    assert not not_logged("")
