# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_gpupool.units import (
    format_bytes,
    format_grant,
    format_range,
    format_seconds,
    format_wait,
    format_waited,
    parse_bytes,
    parse_seconds,
    range_ends,
    typed_bytes,
)

#: The tests of the JupyterLab extension read this file, too.
SIZES = json.loads(
    (Path(__file__).parent.parent / "labextension/src/__tests__/sizes.json").read_text()
)


#: Waits and their texts. The tests of the JupyterLab extension read this file, too.
WAITS = json.loads(
    (Path(__file__).parent.parent / "labextension/src/__tests__/waits.json").read_text()
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12GiB", 12 << 30),
        ("12 gib", 12 << 30),
        ("12G", 12 << 30),
        ("512M", 512 << 20),
        ("1.5GB", 1_500_000_000),
        (".5k", 512),
        ("7B", 7),
        ("1023 B", 1023),
        (4096, 4096),
        ("3B", 3),
    ],
)
def test_common_sizes_are_parsed(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    "text", ["", "GiB", "12 parsecs", "-3GiB", "0", "1e3", "1 2", "0.1B", "9999999TiB"]
)
def test_wrong_size_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="like 12GiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["12", " 12 ", "16777216", "1.5"])
def test_text_without_a_unit_is_refused(text):
    with pytest.raises(ValueError, match=r"has no unit\. Write 12GiB or 512MiB\."):
        parse_bytes(text)


@pytest.mark.parametrize("value", [True, None, 1.5, b"1"])
def test_only_text_and_whole_numbers_are_sizes(value):
    with pytest.raises(ValueError, match="like 12GiB"):
        parse_bytes(value)


@pytest.mark.parametrize(("value", "text"), SIZES["printed"])
def test_sizes_are_printed_as_jupyterlab_prints_them(value, text):
    assert format_bytes(value) == text


@pytest.mark.parametrize(("granted", "guaranteed", "text"), SIZES["granted"])
def test_growth_is_printed_as_jupyterlab_prints_it(granted, guaranteed, text):
    assert format_grant(granted, guaranteed) == text


@pytest.mark.parametrize(("text", "value"), SIZES["read"])
def test_sizes_are_read_as_jupyterlab_reads_them(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", SIZES["refused"])
def test_python_refuses_the_sizes_that_jupyterlab_refuses(text):
    with pytest.raises(ValueError, match="like 12GiB"):
        parse_bytes(text)


@given(st.integers(1, 1 << 52))
def test_needed_size_is_never_rounded_down(value):
    up, down = (format_bytes(value, rounding=way) for way in ("up", "down"))
    assert parse_bytes(down) <= value <= parse_bytes(up) + 1


@pytest.mark.parametrize(
    ("value", "text"), [(12 << 30, "12GiB"), (1536 << 20, "1536MiB"), ((1 << 30) + 1, "1GiB")]
)
def test_whole_sizes_are_written_as_users_type_them(value, text):
    assert typed_bytes(value) == text


@given(st.integers(1, 1 << 50))
def test_a_formatted_size_parses_to_nearly_the_same_value(value):
    assert parse_bytes(format_bytes(value)) == pytest.approx(value, rel=0.06)


@pytest.mark.parametrize(
    ("text", "value"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5 h", 5400), ("1d", 86400)]
)
def test_common_durations_are_parsed(text, value):
    assert parse_seconds(text) == value


@pytest.mark.parametrize("text", ["", "soon", "-1", "0", "10 parsecs"])
def test_wrong_duration_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="10m"):
        parse_seconds(text)


def test_durations_are_shown_in_a_fitting_unit():
    assert [format_seconds(s) for s in (0, 42, 180, 9000)] == ["0 s", "42 s", "3 min", "2.5 h"]
    assert [format_seconds(s) for s in (0.001, 0.5, 0.96)] == ["0.1 s", "0.5 s", "1 s"]


@pytest.mark.parametrize(
    ("seconds", "said"), [(seconds, said) for seconds, said in WAITS["waited"]]
)
def test_wait_without_an_estimate_is_formatted(seconds, said):
    assert format_waited(seconds) == said
    whole = f"waiting for {said}, no estimate yet" if said else "no estimate yet"
    assert format_wait(seconds) == whole
    assert format_wait(seconds, (0.0, -1.0)) == format_wait(seconds), "its time has passed"


@pytest.mark.parametrize(("least", "most", "said"), WAITS["left"])
def test_expected_wait_is_a_rounded_range(least, most, said):
    assert format_range(least, most) == said
    assert format_wait(99.0, (least, most)) == f"{said} left"
    low, high = range_ends(least, most)
    assert low <= max(0.0, least)
    assert high >= most
    assert low < high
