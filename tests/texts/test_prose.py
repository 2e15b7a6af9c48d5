# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The rules for prose in CONTRIBUTING that a machine can check: names and phrases."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from typing import Iterator

from .collect import FILE

ROOT = Path(__file__).parents[2]

#: The name of a test has at most this many characters.
LONGEST = 60

#: Phrases that make a reader stop: a clause without a subject, a sentence without an actor, or an
#: old form.
PHRASES = re.compile(
    r"\b(?:for ever|(?:to|can|cannot|could) be had|there is not|(?:is|are) said|can not|such a one"
    r"|as if it were|[Ww]hoever|[Hh]e (?:is|was|has|had))\b"
)

#: Names that more than one class or type may have, because all of them mean the same.
SHARED_CLASSES = {
    "Action": "what a pure machine decides: the pool, the ledger",
    "CompilerMissing": "of the two packages that compile C",
    "Event": "what a pure machine is told",
    "Slice": "a part of a device; the kernel may not import the pool",
    "Snapshot": "the broker's status as it came over the wire",
    "Tick": "the event that time has passed",
    "View": "a snapshot as a server shows it",
}

#: Names that more than one module or package may have, because all of them have the same subject.
SHARED_MODULES = {
    "agent": "a kernel's agent, and the messages from it",
    "build": "compiles the C sources of its package",
    "guard": "the guard, and the messages from it",
    "maintenance": "pause and drain: what the broker does, and the commands",
    "messages": "the messages of brokers, and those of a ledger",
    "model": "frozen values of a part",
    "provisioner": "the provisioner, and the messages from it",
}

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
            modules[path.parent.name if path.stem == "__init__" else path.stem] += (
                path.stem != "__main__"
            )
            classes.update(types_of(ast.parse(path.read_text(encoding="utf-8"))))
    assert {name for name, count in classes.items() if count > 1} == SHARED_CLASSES.keys()
    assert {name for name, count in modules.items() if count > 1} == SHARED_MODULES.keys()


def types_of(tree: ast.Module) -> set[str]:
    """Return the names of a module's classes and types, without the underscore of private names."""
    found = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name.strip("_")[:1].isupper() and not name.isupper():
                found.add(name)
    return {name.strip("_") for name in found}
