# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The pool only decides: it has no clock, no I/O and no random numbers. Its modules form layers."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import jupyter_gpupool.pool
from benchmarks.pool_trace import story

FOLDER = Path(jupyter_gpupool.pool.__file__).parent
FILES = sorted(FOLDER.glob("*.py"))
FORBIDDEN = {
    "asyncio",
    "datetime",
    "logging",
    "multiprocessing",
    "os",
    "pathlib",
    "random",
    "secrets",
    "socket",
    "subprocess",
    "threading",
    "time",
    "tornado",
    "traitlets",
    "uuid",
}

#: A module may import only modules that come before it in this list. An import that only type
#: checkers need must obey this rule, too.
ORDER = [
    "residence",
    "evidence",
    "groups",
    "model",
    "metering",
    "timeslice",
    "attribution",
    "events",
    "ledgers",
    "session",
    "facts",
    "selfcheck",
    "limits",
    "placement",
    "guarantees",
    "shares",
    "draft",
    "running",
    "preemption",
    "victims",
    "reach",
    "schedule",
    "recheck",
    "transitions",
    "unsuspendable",
    "estimate",
    "words",
    "session_view",
    "news",
    "explain",
    "requests",
    "offers",
    "why",
    "recall",
    "updates",
    "machine",
]


def names(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
    return found


def test_order_lists_every_module():
    assert {f.stem for f in FILES} == {*ORDER, "__init__"}


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_module_has_no_clock_io_or_random_numbers(file):
    tree = ast.parse(file.read_text())
    used = names(tree)
    assert not used & FORBIDDEN
    assert used <= set(sys.stdlib_module_names)
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & {"open", "print", "input", "eval", "exec", "__import__"}


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_a_module_imports_only_from_lower_layers(file):
    if file.stem == "__init__":
        return
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level == 2:
            assert node.module in ("errors", "states", "units")
        elif node.level == 1:
            below = ORDER[: ORDER.index(file.stem)]
            modules = [node.module] if node.module else [alias.name for alias in node.names]
            assert set(modules) <= set(below), f"{file.stem} imports {modules}"


def test_no_module_is_too_long():
    lengths = {f.stem: len(f.read_text().splitlines()) for f in FILES}
    assert {name: n for name, n in lengths.items() if n > 600} == {}


def test_hold_that_gets_a_free_slice_runs_little_code():
    """The event HoldTaken makes few function calls, in few files.

    A reader who follows these calls must not often change from one file to another.
    """
    found = story()["HoldTaken"]
    assert found["calls"] <= 80
    assert found["files"] <= 9
    assert found["changes_of_file"] <= 30
