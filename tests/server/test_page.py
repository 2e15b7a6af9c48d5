# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The data in a JupyterLab page say, before its first request, whether the machine has a GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from jupyter_gpupool import emulation
from jupyter_gpupool.server import page_config as page

SOME = {"found": True, "reason": "", "emulated": False}
EMULATED = {**SOME, "emulated": True}
NOBODY = Path("/nowhere/broker.sock")


@pytest.fixture
def bare(monkeypatch):
    """A machine without a driver."""
    monkeypatch.setattr(page.vendor, "driver_present", lambda: False)


def test_page_assumes_a_gpu_if_there_is_a_driver(monkeypatch):
    monkeypatch.setattr(page.vendor, "driver_present", lambda: True)
    assert page.first({}, {}, NOBODY) == SOME


def test_page_without_a_driver_says_what_to_do(bare):
    assert page.first({}, {}, NOBODY) == {
        "found": False,
        "reason": (
            "No NVIDIA driver was found on this machine. Run `jupyter gpupool doctor` for details."
        ),
        "emulated": False,
    }


def test_page_finds_an_emulated_gpu(bare):
    assert page.first({"emulate": "2x16GiB"}, {}, NOBODY) == EMULATED
    assert page.first({}, {"GPUPOOL_EMULATE": "1x1GiB"}, NOBODY) == EMULATED
    # If the option is given, it has priority over the variable, even if the option is empty. The
    # broker has the same rule.
    assert not page.first({"emulate": ""}, {"GPUPOOL_EMULATE": "1x1GiB"}, NOBODY)["found"]


def test_page_shows_why_a_machine_cannot_be_emulated(bare, monkeypatch):
    wrong = page.first({"emulate": "two GPUs"}, {}, NOBODY)
    assert not wrong["found"]
    assert "'two GPUs' is not an emulated machine" in wrong["reason"]

    def not_built():
        raise emulation.EmulatorNotBuilt("Not compiled.")

    monkeypatch.setattr(emulation, "library_dir", not_built)
    assert page.first({"emulate": "2x16GiB"}, {}, NOBODY)["reason"].startswith("Not compiled. ")


def test_page_assumes_a_gpu_if_the_socket_exists(bare, tmp_path):
    socket = tmp_path / "broker.sock"
    assert not page.first({"emulate": ""}, {}, socket)["found"]
    socket.touch()
    assert page.first({"emulate": ""}, {}, socket) == SOME


def test_answer_of_the_broker_replaces_the_first_guess():
    one = {"devices": [{"uuid": "GPU-0"}], "problem": "", "emulated": False}
    assert page.told(one) == SOME
    assert page.told({**one, "emulated": True}) == EMULATED
    none = page.told({"devices": [], "problem": "The driver is too old."})
    assert none["reason"] == "The driver is too old. Run `jupyter gpupool doctor` for details."
    assert page.told({"devices": [], "problem": ""})["reason"].startswith("The GPU pool ")


def test_other_settings_of_a_page_do_not_change():
    settings = {"page_config_data": {"appName": "JupyterLab"}}
    page.show(settings, SOME)
    assert settings["page_config_data"] == {"appName": "JupyterLab", "gpupool": SOME}
    page.show(bare := {}, SOME)
    assert bare == {"page_config_data": {"gpupool": SOME}}


def test_page_of_jupyterlab_knows_whether_there_is_a_gpu(start):
    def lab():
        text = server.request("GET", "/lab").text
        (found,) = re.findall(
            r'<script id="jupyter-config-data" type="application/json">(.*?)</script>', text, re.S
        )
        return json.loads(found)["gpupool"]

    server = start(f"--GPUPool.socket={NOBODY}")
    assert lab() == page.first({}, {}, NOBODY)
    server = start()
    assert lab() == SOME, "a broker may listen at this socket"
    assert server.api("/pool")["devices"]
    assert lab() == EMULATED, "the broker has reported emulated devices"
    configured = start("--GPUPool.emulate=2x16GiB", f"--GPUPool.socket={NOBODY}")
    text = configured.request("GET", "/lab").text
    assert '"gpupool": {"emulated": true, "found": true, "reason": ""}' in text
