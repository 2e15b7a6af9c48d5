# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Names and texts of the error codes."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterable
from typing import Any

from .outs import said

#: The recorded error codes.
CODES = range(1001)


def cuda_errors(path: str, codes: Iterable[int]) -> dict[str, list[Any]]:
    """Return the name and the text of each CUDA error code, by code."""
    library = ctypes.CDLL(path)
    table = {}
    for code in codes:
        answers = []
        for call in (library.cuGetErrorName, library.cuGetErrorString):
            text = ctypes.c_char_p()
            result = call(code, ctypes.byref(text))
            answers.append(said(text) if result == 0 or text.value else result)
        table[str(code)] = answers
    return table


def nvml_errors(path: str, codes: Iterable[int]) -> dict[str, str]:
    """Return the text of each NVML error code, by code."""
    library = ctypes.CDLL(path)
    library.nvmlErrorString.restype = ctypes.c_char_p
    return {str(code): library.nvmlErrorString(code).decode() for code in codes}


def without_commonest(table: dict[str, Any]) -> dict[str, Any]:
    """Return the table without the entries of the most common answer.

    One entry "others" with this answer replaces them.
    """
    answers = [json.dumps(answer) for answer in table.values()]
    common = json.loads(max(set(answers), key=answers.count))
    return {"others": common} | {c: answer for c, answer in table.items() if answer != common}
