# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Out parameters: what they hold before a question, and how that is written after it."""

from __future__ import annotations

import ctypes
from typing import Any

#: What an out parameter holds before a question, to see whether it is written.
UNTOUCHED = 77


def said(out: Any) -> Any:
    """Return what an out parameter holds, an address as just that."""
    if out.value == UNTOUCHED:
        return "untouched"
    if isinstance(out, ctypes.c_void_p):
        return "address" if out.value else "NULL"
    if isinstance(out, ctypes.c_char_p):
        return None if out.value is None else out.value.decode()
    return out.value
