# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Messages about a wrong request: in a kernelspec, over REST, and on the broker's socket."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable

from jupyter_gpupool.broker.request_fields import decode_request
from jupyter_gpupool.endpoint import check_path, check_socket
from jupyter_gpupool.errors import GPUPoolError
from jupyter_gpupool.launcher import check_options
from jupyter_gpupool.provisioner import GPUPoolProvisioner
from jupyter_gpupool.server.handlers import read_changes, read_seconds

from .sheet import Sheet


def kernelspecs(sheet: Sheet) -> None:
    """Write the messages about the options of a kernelspec."""
    for options in ({"memry": "12GiB"}, {"gpu": 1}):
        _put(sheet, json.dumps(options), lambda o=options: check_options(o, "train"))
    _put(sheet, '{"memory": "much"}', lambda: GPUPoolProvisioner(memory="much"))
    _put(sheet, '{"limit": 0.5}', lambda: GPUPoolProvisioner(limit=0.5))


def rest(sheet: Sheet) -> None:
    """Write the messages about the body of a request."""
    bodies: tuple[dict[str, Any], ...] = (
        {}, {"memry": 1}, {"memory": "much"}, {"memory": 1.5}, {"devices": 0}, {"priority": 5},
    )  # fmt: skip
    for body in bodies:
        _put(sheet, f"PATCH sessions/KERNEL {json.dumps(body)}", lambda b=body: read_changes(b))
    for body in ({}, {"seconds": "long"}):
        what = f"POST sessions/KERNEL/keep {json.dumps(body)}"
        _put(sheet, what, lambda b=body: read_seconds(b))


def socket(sheet: Sheet) -> None:
    """Write the messages of a broker about a wrong line, and of a client about a wrong socket."""
    lines = (
        b"hello\n",
        b'{"v": 99, "type": "status"}\n',
        b'{"v": 1, "type": "dance", "id": 1}\n',
        b'{"v": 1, "type": "status", "id": -1}\n',
        b'{"v": 1, "type": "hold", "id": 1, "session": "s"}\n',
        b'{"v": 1, "type": "release", "id": 1, "session": 5}\n',
    )
    for line in lines:
        _put(sheet, line.decode().strip(), lambda x=line: decode_request(x))
    _put(sheet, "A relative path", lambda: check_path(Path("broker.sock")))
    _put(sheet, "A path that is too long", lambda: check_path(Path("/" + "x" * 110)))
    _put(sheet, "No broker", lambda: check_socket(Path("/nowhere/broker.sock")))
    _put(sheet, "A file that is no socket", lambda: check_socket(Path("/dev/null")))


def _put(sheet: Sheet, situation: str, call: Callable[[], object]) -> None:
    try:
        call()
    except GPUPoolError as error:
        sheet.put(situation, str(error), error.code)
    else:
        raise AssertionError(f"accepted: {situation}")
