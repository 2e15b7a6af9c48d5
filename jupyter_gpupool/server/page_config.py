# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Tells JupyterLab's pages, before their first request, whether there is a GPU.

JupyterLab and Notebook write ``page_config_data`` of the server's settings into each page, where
``PageConfig.getOption("gpupool")`` is
``{"found": bool, "reason": str, "emulated": bool}`` as JSON.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Mapping, MutableMapping

from .. import emulation

View = dict[str, Any]

_NAME = "gpupool"

_NEXT_STEP = "Run `jupyter gpupool doctor` for details."


def first(config: Mapping[str, Any], environ: Mapping[str, str], socket: Path) -> View:
    """Return the page's data for the time before a broker has answered.

    If ``socket`` exists, the data say that there is a GPU: the broker at this socket has its own
    configuration, and may have devices that this process cannot see. So only that broker can know
    that there is no GPU. Without a socket, the data come from the emulation or the driver.
    ``config`` is the section ``GPUPool`` of the server's configuration. It overrides the
    environment, as in the broker.
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
    if emulation.real_driver_present():
        return _some()
    return _none("No NVIDIA driver was found on this machine.")


def told(view: Mapping[str, Any]) -> View:
    """Return the page's data from a view, that is, from what the broker has reported."""
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
