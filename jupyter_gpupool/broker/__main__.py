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
        """Tell the reader why the start has failed.

        If the reader gets no report at all, it knows that something outside has killed the broker.
        """
        message = f"An error ended the GPU pool broker: {type(error).__name__}: {error}"[:500]
        found = {"ok": False, "code": Code.START_FAILED, "message": message}
        try:
            # After the start, the broker has closed the pipe. Then another file may have the
            # descriptor's number, so check that the descriptor is still the pipe.
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
