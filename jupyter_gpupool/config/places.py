# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Finds the line of a configuration file on which a value is written.

The module reads the file's syntax tree and executes no code of the file. If the file computes the
value, the result is the line of the assignment, or of the innermost key that is written in the
file.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Iterator, Mapping, Sequence

#: A place in the file: how many of the names in :func:`line_of` lead to it, and its line.
_DepthAndLine = tuple[int, int | None]


def line_of(path: Path, names: Sequence[str | int]) -> tuple[int, int | None]:
    """Return how far ``names`` lead in the file ``path``, and the line that they lead to.

    ``names`` are the section (``"GPUPool"``), the option, and keys inside its value. The first
    result is the number of names, from the first on, that the file contains. The result is
    (0, None) if the file does not have the section or cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        # Python's parser can read JSON, too: it reads true, false and null as names of variables.
        mode = "eval" if path.suffix == ".json" else "exec"
        tree = ast.parse(text, mode=mode)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return 0, None
    if isinstance(tree, ast.Expression):
        return _descend(tree.body, names, {}, (0, None))
    variables = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    best: _DepthAndLine = (0, None)
    for node in ast.walk(tree):
        for found in _in_statement(node, names, variables):
            # If the file assigns an option twice, the later line counts. Compare the lines, because
            # ast.walk does not visit them in order.
            if found[0] > best[0] or (found[0] == best[0] and (found[1] or 0) > (best[1] or 0)):
                best = found
    return best


def _in_statement(
    node: ast.AST, names: Sequence[str | int], variables: Mapping[str, ast.expr]
) -> Iterator[_DepthAndLine]:
    """Yield the places to which ``names`` lead in an assignment or in a call.

    An example of a call is ``c.GPUPool.quotas.update({})``.
    """
    if isinstance(node, ast.Assign):
        for target in node.targets:
            chain = _chain(target)
            yield from _matched(chain, names, node.value, variables, target.lineno)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        value = node.args[0] if node.args else None
        yield from _matched(_chain(node.func.value), names, value, variables, node.lineno)


def _chain(node: ast.AST) -> list[str | int]:
    """Return ``["c", "GPUPool", "groups", "vision"]`` for ``c.GPUPool.groups["vision"]``."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [*_chain(node.value), node.attr]
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        key = node.slice.value
        return [*_chain(node.value), key if isinstance(key, (str, int)) else repr(key)]
    return []


def _matched(
    chain: Sequence[str | int], names: Sequence[str | int], value: ast.expr | None,
    variables: Mapping[str, ast.expr], line: int,
) -> Iterator[_DepthAndLine]:  # fmt: skip
    written = chain[1:]
    common = min(len(written), len(names))
    if not common or [*written[:common]] != [*names[:common]]:
        return
    if len(written) > len(names) or value is None:
        yield common, line
    else:
        depth, found = _descend(value, names[common:], variables, (0, line))
        yield common + depth, found


def _descend(
    node: ast.expr,
    names: Sequence[str | int],
    variables: Mapping[str, ast.expr],
    here: _DepthAndLine,
) -> _DepthAndLine:
    """Return the place to which ``names`` lead from ``node``, which is at the place ``here``."""
    for _ in range(len(variables) + 1):
        if not isinstance(node, ast.Name) or node.id not in variables:
            break
        node = variables[node.id]
    if not names:
        return here
    depth = here[0] + 1
    if isinstance(node, ast.Dict):
        for key, value in zip(reversed(node.keys), reversed(node.values), strict=True):
            if isinstance(key, ast.Constant) and key.value == names[0]:
                return _descend(value, names[1:], variables, (depth, key.lineno))
    elif isinstance(node, (ast.List, ast.Tuple)) and names[0] in range(len(node.elts)):
        value = node.elts[int(names[0])]
        return _descend(value, names[1:], variables, (depth, value.lineno))
    return here
