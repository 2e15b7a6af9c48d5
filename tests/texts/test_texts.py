# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The file ``all.txt`` has all texts of the product, and no other texts."""

from __future__ import annotations

import difflib
from typing import get_args

import pytest

from jupyter_gpupool.errors import Code
from jupyter_gpupool.pool import model

from . import collect
from .sheet import Sheet

#: The command that writes the file again.
HOW = "Read the difference; then run: python -m tests.texts"


@pytest.fixture(scope="module")
def text() -> str:
    return collect.everything()


def test_file_has_the_texts_of_the_product(text: str) -> None:
    committed = collect.FILE.read_text(encoding="utf-8").splitlines()
    lines = list(difflib.unified_diff(committed, text.splitlines(), "all.txt", "now", lineterm=""))
    shown = "\n".join(lines[:60])
    assert not lines, f"{HOW}\n{shown}"


def test_every_error_code_is_in_the_file(text: str) -> None:
    assert [code.value for code in Code if f"[{code}]" not in text] == []


def test_every_rule_of_a_wait_is_in_the_file() -> None:
    assert collect.scenes(Sheet()) == set(get_args(model.Rule))
