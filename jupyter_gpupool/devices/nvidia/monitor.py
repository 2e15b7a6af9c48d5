# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The monitor, all that NVML is for: ``child.py MODULE <parent pid>``.

A thread of its own waits for Xid errors and sends ``{"event": "lost", "uuid", "reason"}``.
"""

from __future__ import annotations

import threading
from dataclasses import asdict
from typing import Any

from ...errors import DriverError
from ..serve import Handler, claim_stdout, die_with_parent, emit, serve
from .nvml import Nvml


def main() -> None:
    """Serve until stdin ends."""
    die_with_parent()
    out = claim_stdout()
    try:
        nvml = Nvml()
    except DriverError as error:
        emit(out, {"event": "ready", "problem": str(error)})
        return
    emit(out, {"event": "ready", "problem": ""})

    def discover() -> dict[str, Any]:
        driver, cuda = nvml.versions()
        devices, problems = nvml.discover()
        return {"driver": driver, "cuda": cuda, "devices": devices, "problems": problems}

    def watch(uuids: list[str], lost: dict[str, str], places: dict[str, int]) -> dict[str, Any]:
        nvml.places = places
        for uuid, reason in lost.items():
            nvml.mark_lost(uuid, reason)

        def run() -> None:
            for uuid, reason in nvml.losses(uuids):
                nvml.mark_lost(uuid, reason)
                emit(out, {"event": "lost", "uuid": uuid, "reason": reason})

        threading.Thread(target=run, name="gpupool-xid", daemon=True).start()
        return {}

    def sample(uuids: list[str]) -> dict[str, Any]:
        return {"samples": [asdict(row) for row in nvml.sample(uuids)]}

    handlers: dict[str, Handler] = {"discover": discover, "watch": watch, "sample": sample}
    serve(out, handlers)


if __name__ == "__main__":
    main()
