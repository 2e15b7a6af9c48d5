# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Types of the fields of a request: what each accepts, with its range, and how it is read.

Every value that a client sends passes through one of these, so nothing behind the decoder meets a
number, a text or a nesting that it does not expect.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Mapping, Protocol


class OutOfRange(ValueError):
    """A number of the right type that makes no sense."""


class Field(Protocol):
    """What a field accepts; ``about`` says it to people."""

    @property
    def about(self) -> str: ...

    def read(self, value: Any) -> Any:
        """Return ``value`` as it is to be used; raise ``ValueError`` with what is wrong."""


@dataclass(frozen=True, slots=True)
class Text:
    """Text of at most ``most`` characters; half a surrogate pair becomes a question mark."""

    most: int = 200
    null: bool = False

    @property
    def about(self) -> str:
        return "text or null" if self.null else "text"

    def read(self, value: Any) -> Any:
        if value is None and self.null:
            return None
        if not isinstance(value, str):
            raise ValueError("has the wrong type")
        if len(value) > self.most:
            raise ValueError(f"has {len(value)} characters; at most {self.most} are allowed")
        return value if value.isascii() else value.encode("utf-8", "replace").decode()


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number; by default any that 64 bits hold."""

    least: int = -(1 << 63)
    most: int = (1 << 63) - 1
    null: bool = False

    @property
    def about(self) -> str:
        return "whole number or null" if self.null else "whole number"

    def read(self, value: Any) -> Any:
        if value is None and self.null:
            return None
        if type(value) is not int:
            raise ValueError("has the wrong type")
        if not self.least <= value <= self.most:
            raise OutOfRange(f"must be from {self.least} to {self.most}")
        return value


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number, whole or not."""

    @property
    def about(self) -> str:
        return "number"

    def read(self, value: Any) -> Any:
        if type(value) not in (int, float):
            raise ValueError("has the wrong type")
        if isinstance(value, float) and not math.isfinite(value):
            raise OutOfRange("must be a finite number")
        if abs(value) >= 1 << 63:
            raise OutOfRange("is too large")
        return value


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    null: bool = False

    @property
    def about(self) -> str:
        return "true or false or null" if self.null else "true or false"

    def read(self, value: Any) -> Any:
        if not (isinstance(value, bool) or (value is None and self.null)):
            raise ValueError("has the wrong type")
        return value


@dataclass(frozen=True, slots=True)
class Scalar:
    """Text, a number, true, false or null: whoever uses it says what is wrong with it."""

    @property
    def about(self) -> str:
        return "text, number or null"

    def read(self, value: Any) -> Any:
        if isinstance(value, str):
            return Text().read(value)
        if value is None or isinstance(value, bool):
            return value
        return Number().read(value)


@dataclass(frozen=True, slots=True)
class Object:
    """An object; only the fields named here are kept."""

    fields: Mapping[str, Field]

    @property
    def about(self) -> str:
        return "object"

    def read(self, value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError("has the wrong type")
        found = {}
        for name, kind in self.fields.items():
            if name in value:
                try:
                    found[name] = kind.read(value[name])
                except ValueError as error:
                    raise ValueError(f"has a field {name!r} that {error}") from None
        return found


@dataclass(frozen=True, slots=True)
class Items:
    """A list of at most ``most`` values of one type."""

    of: Field
    most: int

    @property
    def about(self) -> str:
        return "list"

    def read(self, value: Any) -> Any:
        if not isinstance(value, list):
            raise ValueError("has the wrong type")
        if len(value) > self.most:
            raise ValueError(f"has {len(value)} entries; at most {self.most} are allowed")
        try:
            return [self.of.read(entry) for entry in value]
        except ValueError as error:
            raise ValueError(f"has an entry that {error}") from None


@dataclass(frozen=True, slots=True)
class Hold:
    """A hold that an agent says it has: its name, or an object with ``id`` and ``kind``."""

    about: str = "hold"
    inner: Object = field(
        default_factory=lambda: Object({"id": Text(), "hold": Text(), "kind": Text()})
    )

    def read(self, value: Any) -> Any:
        return Text().read(value) if isinstance(value, str) else self.inner.read(value)
