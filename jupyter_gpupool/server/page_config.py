# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Tells JupyterLab's pages, before their first request, whether there is a GPU.

JupyterLab and Notebook write the server's setting ``page_config_data`` into each page. In the page,
``PageConfig.getOption("gpupool")`` returns ``{"found": bool, "reason": str, "emulated": bool}`` as
JSON.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Mapping, MutableMapping

from .. import emulation
from ..devices import vendor

View = dict[str, Any]

_NAME = "gpupool"

_NEXT_STEP = "Run `jupyter gpupool doctor` for details."


def first(config: Mapping[str, Any], environ: Mapping[str, str], socket: Path) -> View:
    """Return the page's data for the time before a broker has answered.

    The broker at ``socket`` has its own configuration, and may have devices that this process
    cannot see. So if ``socket`` exists, the data say that a GPU was found, until the broker
    answers. If it does not exist, the data depend on the emulation and on the driver of this
    machine. ``config`` is the section ``GPUPool`` of the server's configuration. It overrides the
    environment, as it does in the broker.
    """
    # Unlike Path.exists, os.path.exists raises no error if the folder is unreadable.
    if os.path.exists(socket):
        return _some()
    machine = config["emulate"] if "emulate" in config else environ.get("GPUPOOL_EMULATE", "")
    if machine:
        try:
            emulation.check(str(machine))
        except emulation.EmulatorError as error:
            return _none(str(error))
        return _some(emulated=True)
    if vendor.driver_present():
        return _some()
    return _none(f"No {vendor.NAME} driver was found on this machine.")


def told(view: Mapping[str, Any]) -> View:
    """Return the page's data from ``view``, which the broker has reported."""
    if view["devices"]:
        return _some(emulated=bool(view["emulated"]))
    return _none(view.get("problem") or "The GPU pool of this machine has no GPU.")


def show(settings: MutableMapping[str, Any], found: View) -> None:
    """Write ``found`` into every page that the server sends from now on."""
    settings.setdefault("page_config_data", {})[_NAME] = found


def _some(*, emulated: bool = False) -> View:
    return {"found": True, "reason": "", "emulated": emulated}


def _none(reason: str) -> View:
    return {"found": False, "reason": f"{reason} {_NEXT_STEP}", "emulated": False}
