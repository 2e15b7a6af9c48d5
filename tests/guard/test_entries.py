# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The guard's list of entry points against what NVIDIA's own libraries export and give out."""

import re
from pathlib import Path

import pytest

from jupyter_gpupool.guard import build
from tests.emulator import nodevice, parity

ENTRIES = {
    symbol: None if since == "-" else int(since)
    for symbol, since in re.findall(
        r"^(cu\w+) +(\d+|-) ", (Path(build.__file__).parent / "entries.txt").read_text(), re.M
    )
}


def _since(record):
    """Return the version from which on each function is given out for its name."""
    found = {}
    for name in record["procaddr"]:
        for flags in (nodevice.PER_THREAD, nodevice.DEFAULT):
            for change in nodevice.entry(record["procaddr"], name, flags).split():
                since, _, form = change.partition(":")
                found[form.replace("~", name)] = int(since)
    return found


@pytest.mark.parametrize("record", parity.records(), ids=lambda record: record["driver"])
def test_versions_are_those_of_the_driver(record):
    found = _since(record)
    assert len(found) > 580
    known = {symbol: since for symbol, since in ENTRIES.items() if since is not None}
    assert {symbol: known.get(symbol) for symbol in found} == found


@pytest.mark.parametrize("record", parity.records(), ids=lambda record: record["driver"])
def test_every_function_that_the_driver_gives_out_is_listed(record):
    """The rest is exported, but in no header, and no answer of cuGetProcAddress."""
    unlisted = {"cuEGLApiInit", "cuMemGetAttribute", "cuMemGetAttribute_v2"}
    assert nodevice.functions(record) - ENTRIES.keys() == unlisted == {*record["never_given"]}
