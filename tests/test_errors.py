# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Error codes: one list has all codes, and no other code is in use."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from jupyter_gpupool.errors import Code, GPUPoolError, RefusedError
from jupyter_gpupool.protocol import error_message, raise_for

PACKAGE = Path(__file__).parent.parent / "jupyter_gpupool"
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "errors.py")


def texts(node: ast.AST | None) -> list[str]:
    """Return the texts that the expression ``node`` can have as its value.

    A literal has one text. A list has the texts of its items, a condition the texts of its
    branches, and ``or`` the texts of its operands.
    """
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.IfExp):
        return [*texts(node.body), *texts(node.orelse)]
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return [text for item in node.elts for text in texts(item)]
    if isinstance(node, ast.BoolOp):
        return [text for item in node.values for text in texts(item)]
    return []


def free_codes(tree: ast.AST) -> list[str]:
    """Return the literal texts that ``tree`` uses as error codes, in place of members of Code."""
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found += [t for k in node.keywords if k.arg == "code" for t in texts(k.value)]
            if isinstance(node.func, ast.Name) and node.func.id == "Refusal" and node.args:
                found += texts(node.args[0])
        elif isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "code":
                    found += texts(line.value)
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Attribute) and side.attr == "code" for side in sides):
                found += [t for side in sides for t in texts(side)]
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "code":
                    found += texts(value)
    return found


def test_every_error_code_is_from_the_list():
    # The test ignores texts in capital letters. These are codes of the driver, for example
    # CUDA_ERROR_NOT_READY.
    found = {
        str(path.relative_to(PACKAGE)): codes
        for path in SOURCES
        if (codes := [*filter(str.islower, free_codes(ast.parse(path.read_text())))])
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        'RefusedError("No.", code="no")',
        'RefusedError("No.", code="no" if late else Code.BUSY)',
        'Refusal("no", "No.")',
        'error.code in ("no", other)',
        'answer = {"code": "no"}',
        'class E(GPUPoolError):\n    code = "no"',
    ],
)
def test_literal_text_used_as_an_error_code_is_found(source):
    assert free_codes(ast.parse(source)) == ["no"]


def test_every_code_is_used():
    product = "".join(path.read_text() for path in [*SOURCES, PACKAGE / "errors.py"])
    used = set(re.findall(r"\bCode\.([A-Z_]+)\b", product))
    assert used == set(Code.__members__)


@pytest.mark.parametrize("code", Code, ids=str)
def test_code_has_a_name_a_status_and_a_sentence(code):
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", code)
    assert code.status in (400, 403, 404, 409, 502, 503)
    assert re.fullmatch(r"[A-Z].*[^.]\.", code.about)
    assert len(code.about) <= 80


def test_codes_are_plain_strings_in_text_and_json():
    assert f"{Code.BUSY}" == str(Code.BUSY) == Code.BUSY == "busy"
    assert json.dumps({"code": Code.BUSY}) == '{"code": "busy"}'


def test_code_stays_the_same_when_it_is_sent():
    sent = RefusedError("No.", code=Code.OVER_QUOTA)
    with pytest.raises(RefusedError) as caught:
        raise_for(json.loads(json.dumps(error_message(sent, 1))))
    assert caught.value.code is Code.OVER_QUOTA


@pytest.mark.parametrize("word", ["of-next-year", "", None, 7])
def test_unknown_code_becomes_the_general_code(word):
    assert Code.of(word, Code.REFUSED) is Code.REFUSED
    assert GPUPoolError("Oh.").code is Code.ERROR
