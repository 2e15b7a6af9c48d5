# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Writes the file of texts: headings, situations, and below each situation the text that a user
reads.
"""

from __future__ import annotations

import textwrap


class Sheet:
    """Collects texts under headings."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def heading(self, title: str, about: str = "") -> None:
        """Begin a chapter."""
        self._lines += ["", "", title, "=" * len(title)]
        if about:
            self._lines += ["", *textwrap.wrap(about, 96)]

    def put(self, situation: str, text: str, code: str = "") -> None:
        """Add a situation and its text; ``code`` is the error code or the rule of the text."""
        assert text, f"no text is shown: {situation}"
        mark = f"  [{code}]" if code else ""
        self._lines += ["", f"{situation}{mark}"]
        for line in text.splitlines():
            # Do not wrap a line that has columns. Such a line has two blanks between its words.
            whole = [line] if "  " in line.strip() or len(line) <= 96 else textwrap.wrap(line, 96)
            self._lines += [f"    {part}".rstrip() for part in whole]

    def list(self, texts: list[str]) -> None:
        """Add texts without a situation."""
        for text in texts:
            self._lines += textwrap.wrap(
                text, 100, initial_indent="  - ", subsequent_indent="    ",
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip

    def sub(self, title: str) -> None:
        """Begin a part of a chapter."""
        self._lines += ["", title]

    def text(self) -> str:
        """Return the whole text."""
        return "\n".join(self._lines).lstrip("\n") + "\n"
