# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Out parameters: their value before a call, and how the record shows their value after it."""

from __future__ import annotations

import ctypes
from typing import Any

#: The value of an out parameter before a call. Another value after the call shows a write.
UNTOUCHED = 77


def said(out: Any) -> Any:
    """Return the value of an out parameter for the record; a fixed word replaces an address."""
    if out.value == UNTOUCHED:
        return "untouched"
    if isinstance(out, ctypes.c_void_p):
        return "address" if out.value else "NULL"
    if isinstance(out, ctypes.c_char_p):
        return None if out.value is None else out.value.decode()
    return out.value
