# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Compares the driver of a GPU machine with the emulated driver, without the use of a device.

The tests ask both drivers the questions of ``tests/driver_records`` that need neither a device nor
a machine without a device. A difference must have one of the reasons in
``tests/emulator/parity.py``. Otherwise it is an error of the emulation. The tests also note the
answers, from which a new record can be made.
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
    """Return the record of the machine's driver.

    On an emulated machine, the record is short. It only shows that the recorder works.
    """
    return _record(machine.env, *([] if machine.real else ["--quick"]))


@pytest.fixture(scope="module")
def emulated(machine):
    """Return the record of the emulated driver, made without an emulated device."""
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
