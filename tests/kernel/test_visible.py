# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""How the agent corrects a value that a notebook gives to CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import os

import pytest

from jupyter_gpupool.kernel.frameworks import Visible, corrected

HOME = "GPU-aaaa,GPU-abbb"
DEVICES = ("GPU-1111", "GPU-2222")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HOME, None),
        ("0", None),
        ("1,0", None),
        ("", None),
        ("-1", None),
        ("0,-1,7", None),
        ("rubbish", None),
        ("0,0", None),
        ("0,0,7", None),
        ("GPU-2", None),
        ("gpu-1111", None),
        ("GPU-", None),  # two names begin with this text
        ("GPU-abbb", None),
        ("1st", None),
        ("2", HOME),
        ("2,3", HOME),
        ("GPU-ffff", HOME),
        ("MIG-GPU-ffff/1/0", HOME),
        ("7,rubbish", HOME),
        ("0,7", "0"),
        ("7,1", "1"),
        ("GPU-2222,GPU-ffff", "1"),
    ],
)
def test_gpus_outside_the_slice_are_replaced_or_left_out(text, expected):
    assert corrected(text, DEVICES, HOME) == expected


@pytest.fixture
def environ(monkeypatch):
    monkeypatch.setenv("GPUPOOL_VISIBLE", HOME)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", HOME)
    visible = Visible(lambda: DEVICES)
    visible.install()
    yield os.environ
    visible.uninstall()


def test_wrong_assignments_are_corrected_with_one_message(environ, capsys):
    environ["CUDA_VISIBLE_DEVICES"] = "5"
    assert environ["CUDA_VISIBLE_DEVICES"] == HOME
    environ.update({"CUDA_VISIBLE_DEVICES": "5"})
    assert os.getenv("CUDA_VISIBLE_DEVICES") == HOME
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "CUDA_VISIBLE_DEVICES='5' names a GPU that this kernel does not have" in said


def test_valid_choice_of_the_user_stays_without_a_message(environ, capsys):
    for text in ("1", "", "-1", "1,0"):
        environ["CUDA_VISIBLE_DEVICES"] = text
        assert environ["CUDA_VISIBLE_DEVICES"] == text
    assert capsys.readouterr().err == ""


def test_deleted_variable_gets_the_pools_value_again(environ):
    environ["CUDA_VISIBLE_DEVICES"] = "1"
    assert environ.pop("CUDA_VISIBLE_DEVICES") == "1"
    assert environ["CUDA_VISIBLE_DEVICES"] == HOME


def test_other_variables_and_type_errors_stay_the_same(environ):
    environ["GPUPOOL_TEST_OTHER"] = "5"
    assert environ.pop("GPUPOOL_TEST_OTHER") == "5"
    with pytest.raises(TypeError):
        environ["CUDA_VISIBLE_DEVICES"] = 1
