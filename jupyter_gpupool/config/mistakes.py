# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Mistakes in the configuration. Each says what is wrong, where it is, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Iterable, Sequence

from ..errors import ConfigError
from .places import line_of

#: The largest number of mistakes that one message lists.
MOST = 8

#: A key of a dict, or an index of a list, inside the value of an option.
OptionKey = str | int


@dataclass(frozen=True)
class Fault:
    """One mistake.

    ``option`` is the name after ``c.GPUPool.``, or "" if the mistake is not in an option; ``keys``
    lead from the option's value to the place of the mistake.
    """

    message: str
    next_step: str = ""
    option: str = ""
    keys: tuple[OptionKey, ...] = ()
    #: Where the value comes from: a file, or a text such as "the command line"; "" if unknown.
    origin: str = ""
    line: int | None = None

    @property
    def place(self) -> str:
        """Return where the mistake is: ``c.GPUPool.quotas['ada'] in FILE, line 3``."""
        name = f"c.GPUPool.{self.option}" if self.option else ""
        name += "".join(f"[{key!r}]" for key in self.keys)
        line = f", line {self.line}" if self.line else ""
        return f"{name} in {self.origin}{line}" if self.origin else name

    @property
    def text(self) -> str:
        """Return the place and the message."""
        return f"{self.place}: {self.message}" if self.option else self.message

    def __str__(self) -> str:
        return f"{self.text} {self.next_step}".rstrip()

    def inside(self, *keys: OptionKey) -> Fault:
        """Return the fault with ``keys`` in front of its own keys.

        The fault was found in a part of a value. ``keys`` lead from the whole value to this part.
        """
        return replace(self, keys=(*keys, *self.keys))

    def at(self, origins: Sequence[str]) -> Fault:
        """Return the fault with its file and line.

        The function searches each file in ``origins`` for the fault's option and keys, and takes
        the file that contains the most of them. If several files contain equally many, it takes the
        last of these files. If no file contains any, it takes the last of ``origins``.
        """
        if self.origin or not origins:
            return self
        best: tuple[int, str, int | None] = (0, origins[-1], None)
        for origin in origins:
            path = Path(origin)
            if path.is_absolute():
                depth, line = line_of(path, ("GPUPool", self.option, *self.keys))
                if line is not None and depth >= best[0]:
                    best = depth, origin, line
        return replace(self, origin=best[1], line=best[2])


class WrongValue(ValueError):
    """The value of an option has mistakes. The caller adds the option's name to them."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = (*faults,)
        super().__init__(" ".join(map(str, self.faults)))


class WrongConfiguration(ConfigError):
    """The configuration has mistakes; ``faults`` contains all of them."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = (*faults,)
        if len(faults) == 1:
            super().__init__(faults[0].text, next_step=faults[0].next_step)
            return
        lines = [f"The configuration has {len(faults)} mistakes."]
        lines += [f"- {fault}" for fault in faults[:MOST]]
        if len(faults) > MOST:
            lines.append(f"- {len(faults) - MOST} more: `jupyter gpupool check-config` lists them.")
        super().__init__("\n".join(lines))
