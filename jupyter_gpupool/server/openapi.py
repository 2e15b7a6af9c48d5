# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Returns the OpenAPI document of the REST interface, as this server serves it.

The document also decides how the server treats the fields of a session. Other users see the fields
of the schema ``OtherSession``. In the schema ``Session``, two keys mark fields: ``x-grows`` and
``x-time``; comments there say what they mean.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml

from .. import __version__

FILE = Path(__file__).with_name("openapi.yaml")


@lru_cache(maxsize=1)
def load() -> dict[str, Any]:
    """Read the document once. The server does this before it serves, because it may take 0.3 s."""
    # CSafeLoader uses libyaml and is ten times as fast as SafeLoader, but not every PyYAML has
    # CSafeLoader.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found: dict[str, Any] = yaml.load(FILE.read_text(encoding="utf-8"), Loader=loader)
    return found


def document(base_url: str) -> dict[str, Any]:
    """Return the document for a server at ``base_url``."""
    found = load()
    return {
        **found,
        "info": {**found["info"], "version": __version__},
        "servers": [{"url": f"{base_url.rstrip('/')}/gpupool/api"}],
    }


@lru_cache(maxsize=1)
def fields_of_others() -> tuple[str, ...]:
    """Return the fields of a session that other users may see."""
    return tuple(_schema("OtherSession"))


@lru_cache(maxsize=2)
def marked(key: Literal["x-grows", "x-time"]) -> frozenset[str]:
    """Return the fields of a session that the document marks with ``key``."""
    return frozenset(name for name, field in _schema("Session").items() if field.get(key))


def _schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = load()["components"]["schemas"][name]["properties"]
    return found
