# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``CUDA_VISIBLE_DEVICES`` of this kernel, which notebooks set for the machine of somebody else.

The guard corrects the variable at cuInit, in every language. But Python libraries also read it
themselves, to count devices through NVML (``torch.cuda.device_count``), and child processes get
what ``os.environ`` holds. So an assignment that names a GPU outside the session is corrected as it
is made, by the guard's own rules (``choose`` in ``guard/src/init.c``), and one line says so.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any, Callable, Sequence

from .attach import OURS_VARIABLE

VISIBLE = "CUDA_VISIBLE_DEVICES"


def corrected(text: str, devices: Sequence[str], ours: str) -> str | None:
    """Return what ``text`` means in a session with ``devices``; None if it is right as it is.

    ``ours`` is the pool's own text: whoever names only GPUs of others means "a GPU".
    """
    if text == ours or not devices:
        return None
    home = ours.split(",")
    kept: list[str] = []
    others = False
    for entry in text.split(","):
        place = _place(entry.strip(" "), devices, home)
        if place is None:
            break
        if place < 0:
            others = True
        elif str(place) in kept:
            return None  # a device that is named twice hides all
        else:
            kept.append(str(place))
    if not others:
        return None
    return ",".join(kept) or ours


def _place(entry: str, devices: Sequence[str], home: Sequence[str]) -> int | None:
    """Return the session's number of the device; -1: it has no such; None: the list ends here."""
    if not entry.upper().startswith(("GPU-", "MIG-")):
        number = re.match(r"\s*[+-]?[0-9]+", entry)
        if number is None or int(number[0]) < 0:
            return None
        return int(number[0]) if int(number[0]) < len(devices) else -1
    found = [i for i, uuid in enumerate(devices) if uuid.upper().startswith(entry.upper())]
    if len(found) > 1:
        return None
    same = [i for i, uuid in enumerate(home[: len(devices)]) if uuid.upper() == entry.upper()]
    return (found or same or [-1])[0]


class Visible:
    """Watches assignments to the variable in ``os.environ``.

    Parameters
    ----------
    devices:
        The UUIDs of the devices that the session's processes see, in their order.
    """

    def __init__(self, devices: Callable[[], Sequence[str]]) -> None:
        self._devices = devices
        self._plain: type[Any] | None = None
        self._said: set[str] = set()

    def install(self) -> None:
        """Begin. What is in the variable by now is the pool's, or the guard's business."""
        plain = type(os.environ)
        watcher = self

        class Environ(plain):  # type: ignore[misc, valid-type]
            def __setitem__(self, key: str, value: str) -> None:
                if key == VISIBLE and isinstance(value, str):
                    value = watcher.check(value)
                super().__setitem__(key, value)

            def __delitem__(self, key: str) -> None:
                super().__delitem__(key)
                ours = self.get(OURS_VARIABLE)
                if key == VISIBLE and ours:
                    # Without it libraries count all GPUs of the machine.
                    super().__setitem__(key, ours)

        self._plain = plain
        os.environ.__class__ = Environ

    def uninstall(self) -> None:
        """End."""
        if self._plain is not None:
            os.environ.__class__ = self._plain
            self._plain = None

    def check(self, text: str) -> str:
        """Return what to put into the variable for ``text``; say so if it is something else."""
        ours = os.environ.get(OURS_VARIABLE, "")
        right = corrected(text, self._devices(), ours) if ours else None
        if right is None:
            return text
        if text not in self._said:
            self._said.add(text)
            does = "the kernel's own GPU is used instead" if right == ours else "it is left out"
            print(
                f"GPU pool: {VISIBLE}={text[:64]!r} names a GPU that this kernel does not have; "
                f"{does}. For more GPUs: %gpu devices 2",
                file=sys.stderr,
            )
        return right
