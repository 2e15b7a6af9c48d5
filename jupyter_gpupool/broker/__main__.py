# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``python -m jupyter_gpupool.broker``."""

from __future__ import annotations

import json
import os
import sys

from ..errors import Code


class _Reader:
    """The process that started this broker. It reads the pipe of ``--ready-fd``."""

    def __init__(self) -> None:
        self._descriptor = -1
        try:
            self._descriptor = int(sys.argv[sys.argv.index("--ready-fd") + 1])
            self._pipe = os.fstat(self._descriptor)
        except (ValueError, IndexError, OSError):
            self._descriptor = -1

    def tell(self, error: Exception) -> None:
        """Report why the start fails.

        So if the caller gets no report, it knows that something outside has killed the broker.
        """
        message = f"An error ended the GPU pool broker: {type(error).__name__}: {error}"[:500]
        found = {"ok": False, "code": Code.START_FAILED, "message": message}
        try:
            # The broker closes the pipe at the end of its start. After that, another file may have
            # the pipe's number.
            if os.path.samestat(os.fstat(self._descriptor), self._pipe):
                os.write(self._descriptor, json.dumps(found).encode() + b"\n")
        except OSError:
            pass


if __name__ == "__main__":
    reader = _Reader()
    try:
        from .app import main

        code = main()
    except Exception as error:
        reader.tell(error)
        raise
    raise SystemExit(code)
