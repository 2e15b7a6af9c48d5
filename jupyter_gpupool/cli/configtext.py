# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The options of the pool as text: a commented configuration file, and a page of the docs."""

from __future__ import annotations

import textwrap
from typing import Any, Iterator

from ..config import GPUPool

_HEAD = """\
# Configuration of the GPU pool. Put these lines into jupyter_server_config.py, in one of the
# folders that `jupyter --paths` lists under "config", or in /etc/jupyter for the whole machine.
# Every line shows an example; take away the '# ' before c.GPUPool to use it.
# `jupyter gpupool check-config` checks the file. A running broker reads the file on SIGHUP.

c = get_config()  # noqa: F821
"""


def options() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the description of every option, in the order of their definition."""
    order = list(vars(GPUPool))
    traits = GPUPool.class_traits(config=True)
    for name in sorted(traits, key=order.index):
        yield name, traits[name].metadata


def commented_config() -> str:
    """Return a configuration file in which every option is present as a comment."""
    blocks = [_HEAD]
    for name, option in options():
        text = "\n".join(textwrap.wrap(option["what"], 94))
        text += f"\nUnit: {option['unit']}\nDefault: {option['default']}"
        blocks.append(textwrap.indent(text, "## ") + f"\n# {_shown(name, option)}\n")
    return "\n".join(blocks)


def markdown_reference() -> str:
    """Return the options as Markdown for the documentation, each under its own heading."""
    blocks = []
    for name, option in options():
        blocks.append(
            f"## `c.GPUPool.{name}`\n\n{option['what']}\n\n"
            f"- Unit: {_code(option['unit'])}\n- Default: {_code(option['default'])}\n\n"
            f"```python\n{_shown(name, option)}\n```\n"
        )
    return "\n".join(blocks)


def _shown(name: str, option: dict[str, Any]) -> str:
    example = str(option["example"])
    assert example.startswith(f"c.GPUPool.{name}")
    return example


def _code(text: str) -> str:
    """Return ``text`` for Markdown: a value as code, other text with stars and braces escaped."""
    value, space, rest = text.partition(" (")
    if value[:1] in "'[{" and " or " not in value:
        return f"`{value}`" + (f" ({rest}" if space else "")
    return text.replace("*", r"\*").replace("{", r"\{")
