# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Traits that take a number or text with a unit, and the size of this machine's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from traitlets import TraitError, TraitType

from ..units import parse_bytes, parse_seconds


class _Quantity(TraitType[Any, Any]):
    """A trait that takes a number or text with a unit.

    ``zero`` says whether 0 is legal, ``least`` what must not be gone below.
    """

    what = ""
    nothing: float = 0.0

    def __init__(
        self, default: Any, *, zero: bool = False, least: float = 0, **kwargs: Any
    ) -> None:
        self.zero = zero
        self.least = least
        super().__init__(default, **kwargs)

    def from_string(self, s: str) -> Any:
        """Return what ``--GPUPool.name=s`` means."""
        return None if self.allow_none and s == "None" else s

    def read(self, value: Any) -> float:
        raise NotImplementedError

    def validate(self, obj: Any, value: Any) -> Any:  # noqa: ARG002 (traitlets' contract)
        """Return ``value`` as a plain number, or say what is wrong with it."""
        if not isinstance(value, (int, float, str)) or isinstance(value, bool):
            raise TraitError(f"{value!r} is not {self.what}")
        if self.zero and str(value).strip() in ("0", "0.0"):
            return self.nothing
        try:
            found = self.read(value)
        except ValueError as error:
            raise TraitError(str(error)) from None
        if found < self.least:
            raise TraitError(f"{value!r} is below {self.least:g}, which is the least.")
        return found


class Size(_Quantity):
    """Bytes: an int, or text such as ``"12GiB"``."""

    nothing = 0
    what = "a size. Write a number of bytes, or text like '12GiB'."

    def read(self, value: Any) -> int:
        if isinstance(value, float):
            raise ValueError(f"{value!r} is not a whole number of bytes.")
        return parse_bytes(value)


class Seconds(_Quantity):
    """Seconds: a number, or text such as ``"10m"``."""

    what = "a duration. Write a number of seconds, or text like '10m'."

    def read(self, value: Any) -> float:
        return parse_seconds(value)


class Share(_Quantity):
    """A part of a whole: a number between 0 and 1, or text such as ``"10%"``."""

    what = "a share. Write a number like 0.1, or text like '10%'."

    def read(self, value: Any) -> float:
        text = str(value).strip()
        try:
            found = float(text[:-1]) / 100 if text.endswith("%") else float(text)
        except ValueError:
            found = 0.0
        if not 0 < found < 1:
            raise ValueError(f"{value!r} is not a share above 0 and below 1. Write 0.1 or '10%'.")
        return found


def memory_total(root: Path = Path("/")) -> int:
    """Return the bytes of host memory that this process can ever use.

    ``MemTotal`` of ``/proc/meminfo`` (proc(5)), bounded by ``memory.max`` of every control group
    (v2) that this process is in, or by ``memory.limit_in_bytes`` (v1).
    """
    total = 0
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    limits = [total]
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        groups = []
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if not controllers:
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        folder = base / path.lstrip("/")
        for place in (folder, *folder.parents):
            try:
                limits.append(int((place / name).read_text()))
            except (OSError, ValueError):
                pass  # no limit here: "max", the root group, or a path outside this namespace
            if place == base:
                break
    return min(limits)
