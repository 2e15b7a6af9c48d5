# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The sentences in the source: literals of Python, C and TypeScript, with the codes of errors."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Iterator

from jupyter_gpupool.errors import Code

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "jupyter_gpupool"
EMULATOR = ROOT / "emucuda"
LABEXTENSION = ROOT / "labextension"

#: Modules that :func:`python_sentences` leaves out. Users and admins never read the sentences of
#: these modules, or another chapter has them.
INTERNAL = (
    "emucuda/kernels.py",
    "errors.py",
    "guard/_generate.py",
    "pool/invariants.py",
)

#: Functions whose arguments are not texts for people, but patterns or SQL.
_NO_PROSE = ("compile", "match", "search", "sub", "fullmatch", "execute", "executescript")

_SQL = re.compile(r"^\s*(SELECT|CREATE|INSERT|PRAGMA|UPDATE|DELETE|REPLACE)\b|^(\w+, )+\w+$")
_CODE = re.compile(r"^\s*(import |def |from \w+ import |<svg|<div|border-|/\*|static |#!)")
_WORD = re.compile(r"""["'(`“]?[A-Za-z][A-Za-z'’-]*[,.;:?!)"'`”]*""")
_HOLE = re.compile(r"<[^<>]*>|%[-.0-9]*[a-z%]|%[0-9]")


@dataclass(frozen=True)
class Sentence:
    """A text in the source. If it belongs to an error, ``code`` is the error's code."""

    place: str
    line: int
    text: str
    code: str = ""


def is_prose(text: str) -> bool:
    """Return whether a literal is for people: it has at least three words, and is no code."""
    if _SQL.match(text) or _CODE.match(text) or ("\n    " in text and ";" in text):
        return False
    words = [word for word in _HOLE.sub("#", text).split() if _WORD.fullmatch(word)]
    return len(words) >= 3


# --------------------------------------------------------------------------- Python


def python_sentences() -> list[Sentence]:
    """Return the sentences of the Python modules, in their order."""
    found = []
    for path in [*sorted(PACKAGE.rglob("*.py")), *sorted(EMULATOR.glob("*.py"))]:
        place = path.relative_to(PACKAGE if PACKAGE in path.parents else ROOT).as_posix()
        if place not in INTERNAL:
            found += _python(path.read_text(encoding="utf-8"), place)
    return found


def _python(source: str, place: str) -> list[Sentence]:
    tree = ast.parse(source)
    skip = set(_not_shown(tree))
    codes = dict(_coded(tree))
    found = []
    for node in ast.walk(tree):
        code = codes.get(id(node), "")
        if isinstance(node, ast.Call) and code:
            found.append(Sentence(place, node.lineno, f"<{_label(node.args[-1])}>", code))
        elif id(node) not in skip and isinstance(node, (ast.Constant, ast.JoinedStr)):
            text = _template(node)
            if text is not None and (code or is_prose(text)):
                found.append(Sentence(place, node.lineno, text, code))
    return sorted(found, key=lambda s: s.line)


def _not_shown(tree: ast.AST) -> Iterator[int]:
    """Yield the ids of nodes that are no sentences: docstrings, patterns, parts of an f-string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, (ast.Constant, ast.JoinedStr)):
            yield from map(id, ast.walk(node))
        elif isinstance(node, ast.JoinedStr):
            for value in node.values:
                # Skip only the plain parts. An expression in the f-string may have a sentence of
                # its own: f"{'it is left out' if ... else ''}".
                if isinstance(value, ast.Constant):
                    yield id(value)
        elif isinstance(node, ast.Call) and _name(node.func) in _NO_PROSE:
            for argument in node.args:
                yield from map(id, ast.walk(argument))
        elif isinstance(node, ast.arg) and node.annotation is not None:
            yield from map(id, ast.walk(node.annotation))


def _coded(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield two values for each message that has an error code: the id of its node, and the code.

    The message belongs to an error, a refusal or a log line.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        given = [*node.args, *(k.value for k in node.keywords if k.arg == "code")]
        found = [code for argument in given for code in _codes(argument)]
        found = found or [class_codes().get(_name(node.func), "")]
        texts = [a for a in node.args if not list(_codes(a))]
        if found[0] and texts:
            message = next((a for a in texts if _is_literal(a)), None)
            # If no argument is a literal, other code has made the message. In this case, yield the
            # id of the whole call.
            yield id(node if message is None else message), "] [".join(dict.fromkeys(found))


def _is_literal(node: ast.expr) -> bool:
    return isinstance(node, (ast.Constant, ast.JoinedStr)) and " " in (_template(node) or "")


def _codes(node: ast.expr) -> Iterator[str]:
    """Yield the error codes that can be the value of the argument ``node``."""
    if isinstance(node, ast.IfExp):
        yield from _codes(node.body)
        yield from _codes(node.orelse)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        for argument in node.args:
            yield from _codes(argument)
    elif isinstance(node, ast.Attribute) and node.attr in Code.__members__:
        yield Code[node.attr].value


@lru_cache
def class_codes() -> dict[str, str]:
    """Return a dict: the name of each error class that has an error code -> this code."""
    found = {}
    for tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for line in node.body:
                    if isinstance(line, ast.Assign) and _name(line.targets[0]) == "code":
                        found[node.name] = next(_codes(line.value), "")
    return found


def _trees() -> Iterator[ast.Module]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield ast.parse(path.read_text(encoding="utf-8"))


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _template(node: ast.AST) -> str | None:
    """Return the text of a literal, or None if the literal is no text.

    In the text of an f-string, ``<name>`` is in place of each value.
    """
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    assert isinstance(node, ast.JoinedStr)
    parts = []
    for value in node.values:
        if isinstance(value, ast.Constant):
            parts.append(str(value.value))
        else:
            assert isinstance(value, ast.FormattedValue)
            parts.append(f"<{_label(value.value)}>")
    return "".join(parts)


def _label(node: ast.expr) -> str:
    """Return a word for an expression's value: a key in it, or else its last meaningful name."""
    names = [
        n.id if isinstance(n, ast.Name) else n.attr
        for n in ast.walk(node)
        if isinstance(n, (ast.Name, ast.Attribute))
    ]
    dull = ("self", "str", "len", "format_bytes", "format_seconds", "join", "sorted", "s", "x", "d")
    keys = [
        n.slice.value
        for n in ast.walk(node)
        if isinstance(n, ast.Subscript)
        and isinstance(n.slice, ast.Constant)
        and isinstance(n.slice.value, str)
    ]
    told = keys or [name for name in names if name not in dull] or ["value"]
    return told[0].strip("_").lower().replace("_", " ")


# --------------------------------------------------------------------------- C and TypeScript

_C_NOISE = re.compile(r"/\*.*?\*/|//[^\n]*|^\s*#[^\n]*", re.S | re.M)
_C_TEXT = re.compile(r'"((?:[^"\\\n]|\\.)*)"(?:\s*"((?:[^"\\\n]|\\.)*)")*')
_C_PIECE = re.compile(r'"((?:[^"\\\n]|\\.)*)"')


def c_sentences() -> list[Sentence]:
    """Return what the guard and the emulated driver write to a program's standard error."""
    found = []
    # Of the emulated driver's sources, take only these. The texts in its other sources are NVIDIA's
    # descriptions of error codes.
    emulator = [EMULATOR / "src" / name for name in ("faults.c", "machine.c", "spec.c")]
    for path in [*sorted((PACKAGE / "guard" / "src").glob("*.c")), *emulator]:
        source = path.read_text(encoding="utf-8")
        source = _C_NOISE.sub(lambda m: "\n" * m[0].count("\n"), source)
        for match in _C_TEXT.finditer(source):
            text = "".join(_C_PIECE.findall(match[0])).replace("\\n", "").replace('\\"', '"')
            if is_prose(text):
                line = source.count("\n", 0, match.start()) + 1
                found.append(Sentence(f"{path.parents[1].name}/src/{path.name}", line, text))
    return found


_TRANSLATED = re.compile(r"\btrans\.(__|_n|_p)\(")
_TS_TEXT = re.compile(r"""\s*(?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"|`([^`]*)`)\s*,?""")


def typescript_sentences() -> list[Sentence]:
    """Return what the JupyterLab extension shows: every text that can be translated."""
    found = []
    for path in sorted((LABEXTENSION / "src").rglob("*.ts*")):
        if "__tests__" in path.parts:
            continue
        source = path.read_text(encoding="utf-8")
        place = path.relative_to(LABEXTENSION).as_posix()
        for match in _TRANSLATED.finditer(source):
            at, texts = match.end(), []
            for _ in range(2 if match[1] == "_n" else 1):
                text = _TS_TEXT.match(source, at)
                if text is None:
                    break
                texts.append(next(t for t in text.groups() if t is not None))
                at = text.end()
            line = source.count("\n", 0, match.start()) + 1
            found += [Sentence(place, line, text.replace("\\'", "'")) for text in texts]
    schema = json.loads((LABEXTENSION / "schema" / "plugin.json").read_text(encoding="utf-8"))
    return [*found, *_described(schema)]


def _described(value: object) -> Iterator[Sentence]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("title", "description") and isinstance(inner, str):
                yield Sentence("schema/plugin.json", 0, inner)
            else:
                yield from _described(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _described(inner)
