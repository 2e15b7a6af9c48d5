# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Functions that make parts of sentences."""

from __future__ import annotations

import pytest

from jupyter_gpupool.text import did_you_mean, nearest, one_of

COMMANDS = ("status", "release", "wrap")


@pytest.mark.parametrize(
    ("wrong", "options", "expected"),
    [
        ("stauts", {}, "Did you mean 'status'?"),
        ("stauts", {"shown": "%gpu {}"}, "Did you mean %gpu status?"),
        ("stauts", {"then": "See --help."}, "Did you mean 'status'? See --help."),
        ("xyz", {"then": "See --help."}, "See --help."),
        ("xyz", {}, ""),
        ("", {}, ""),
    ],
)
def test_the_nearest_known_name_is_offered(wrong, options, expected):
    assert did_you_mean(wrong, COMMANDS, **options) == expected


def test_only_similar_names_are_offered():
    assert nearest("stats", COMMANDS, likeness=0.8) == "status"
    assert nearest("state", COMMANDS, likeness=0.95) == ""


def test_alternatives_are_joined_with_or():
    assert one_of(["a"]) == "'a'"
    assert one_of(["a", "b"]) == "'a' or 'b'"
    assert one_of(["a", "b", "c"]) == "'a', 'b' or 'c'"
