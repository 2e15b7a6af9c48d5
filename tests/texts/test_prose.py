# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What a machine can check of CONTRIBUTING's rules for prose: names, and phrases."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from typing import Iterator

from .collect import FILE

ROOT = Path(__file__).parents[2]

#: The longest name of a test.
LONGEST = 60

#: Phrases that make a reader stop: a clause without a subject, no actor, or an old form.
PHRASES = re.compile(
    r"\b(?:for ever|(?:to|can|cannot|could) be had|there is not|(?:is|are) said|can not|such a one"
    r"|as if it were|[Ww]hoever|[Hh]e (?:is|was|has|had))\b"
)

#: Classes that share a name; a shorter list is better.
SHARED_CLASSES = {"CompilerMissing", "Event", "Slice", "Tick"}

#: Modules that share a name: all but ``build``, ``machine`` and ``model`` have the same subject.
SHARED_MODULES = {"agent", "build", "machine", "maintenance", "model", "provisioner", "text"}

SOURCES = ("jupyter_gpupool", "emucuda", "labextension/src", "benchmarks", "tests")
ENDINGS = (".py", ".c", ".h", ".S", ".ts", ".tsx", ".txt", ".yaml")
PAGES = ("README.md", "CONTRIBUTING.md", "docs", "examples", "benchmarks")


def found(paths: Iterator[Path]) -> list[str]:
    """Return each line with one of the phrases."""
    lines = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if PHRASES.search(line):
                lines.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    return lines


def sources() -> Iterator[Path]:
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            skip = {"node_modules", "lib", "__pycache__", "labextension", "records"}
            own = path.parent == Path(__file__).parent
            other = not skip.isdisjoint(path.relative_to(ROOT / folder).parts)
            if path.suffix in ENDINGS and not own and not other:
                yield path


def pages() -> Iterator[Path]:
    for name in PAGES:
        top = ROOT / name
        yield from [top] if top.is_file() else sorted(top.rglob("*.md"))


def test_pages_have_no_phrase_to_read_twice() -> None:
    # CONTRIBUTING quotes older texts.
    assert [line for line in found(pages()) if not line.startswith("CONTRIBUTING.md:")] == []


def test_texts_have_no_phrase_to_read_twice() -> None:
    assert found(iter([FILE])) == []


def test_sources_have_no_phrase_to_read_twice() -> None:
    assert found(sources()) == []


def test_names_of_tests_are_short() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.name.startswith("test_")
        and len(node.name) > LONGEST
    ]
    assert long == []


def test_names_of_classes_and_modules_have_one_meaning() -> None:
    classes: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    for folder in ("jupyter_gpupool", "emucuda"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            modules[path.stem] += not path.stem.startswith("__")
            body = ast.parse(path.read_text(encoding="utf-8")).body
            classes.update(node.name for node in body if isinstance(node, ast.ClassDef))
    assert {name for name, count in classes.items() if count > 1} <= SHARED_CLASSES
    assert {name for name, count in modules.items() if count > 1} <= SHARED_MODULES
