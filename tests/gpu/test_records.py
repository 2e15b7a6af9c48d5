# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Answers of the machine's driver without a device, compared with the emulated driver's answers.

The records of ``tests/driver_records`` come from drivers that answer without a GPU, and from
drivers of GPU machines. On a GPU machine, these tests ask its driver the same questions. They leave
out the questions that need a device, and the questions that need a machine without a device. They
note the answers for another record. A difference is an error of the emulation, or has one of the
reasons in ``tests/emulator/parity.py``.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.driver_records import procaddr, process
from tests.emulated import build, library_dir
from tests.emulator import parity

SECTIONS = (
    "arguments", "calls", "cuda_errors", "nvml_arguments", "nvml_calls", "nvml_errors", "procaddr",
)  # fmt: skip


def _record(env: dict[str, str], *options: str) -> dict[str, Any]:
    done = process.run("--anywhere", *options, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found(machine):
    """The record of the machine's driver.

    If the driver is the emulated one, the record is short and only shows that the recorder works.
    """
    return _record(machine.env, *([] if machine.real else ["--quick"]))


@pytest.fixture(scope="module")
def emulated(machine):
    """The record of the emulated driver, without a device."""
    build.compile()
    return _record(machine.env, str(library_dir()))


@pytest.fixture(scope="module")
def differences(found, emulated):
    return [
        difference
        for difference in parity.differences(found, emulated)
        if not any(reason.covers(difference) for reason in parity.REASONS)
    ]


def test_driver_is_recorded(machine, found, note):
    note(record=found if machine.real else found["cuda"])
    assert found["cuda"] >= 12000
    assert found["cuda_errors"]["2"] == ["CUDA_ERROR_OUT_OF_MEMORY", "out of memory"]
    assert found["procaddr_older_form_differs"] == []
    text = procaddr.entry(found["procaddr"], "cuMemAlloc", procaddr.DEFAULT)
    assert procaddr.forms_at(text, "cuMemAlloc", 12000) == "cuMemAlloc_v2"


@pytest.mark.gpu
@pytest.mark.parametrize("section", SECTIONS)
def test_emulated_driver_answers_like_this_driver(section, differences, note):
    here = [str(d) for d in differences if d.section.partition(":")[0] == section]
    note(differences=here)
    assert here == []
