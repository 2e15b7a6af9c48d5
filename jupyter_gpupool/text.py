# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Parts of sentences for many messages. Standard library only (kernels use it)."""

from __future__ import annotations

from typing import Iterable

#: A known name is suggested only if its similarity (:mod:`difflib`'s ratio) is at least this.
LIKENESS = 0.5


def nearest(wrong: str, known: Iterable[str], *, likeness: float = LIKENESS) -> str:
    """Return the known name that is most similar to ``wrong``; "" if none is similar."""
    # At the top of the module, this import would slow down each kernel's start.
    from difflib import get_close_matches

    found = get_close_matches(wrong, list(known), n=1, cutoff=likeness)
    return found[0] if found else ""


def did_you_mean(
    wrong: str,
    known: Iterable[str],
    *,
    shown: str = "'{}'",
    then: str = "",
    likeness: float = LIKENESS,
) -> str:
    """Return ``"Did you mean 'right'?"``, or "" if no known name is similar to ``wrong``.

    ``shown`` is the format of the name in the question, such as ``"%gpu {}"``. The sentence
    ``then`` follows the question. If no name is similar, ``then`` is the whole result.
    """
    right = nearest(wrong, known, likeness=likeness)
    question = f"Did you mean {shown.format(right)}?" if right else ""
    return f"{question} {then}".strip()


def one_of(names: Iterable[str]) -> str:
    """Return ``"'a', 'b' or 'c'"``."""
    quoted = [repr(name) for name in names]
    return " or ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)


def sentence(reason: str) -> str:
    """Return ``reason`` with a capital letter (unless it begins with a name) and a full stop."""
    text = reason.strip()
    first = text.split(" ", 1)[0]
    if first.rstrip(",;:").isalpha():
        text = text[0].upper() + text[1:]
    return text if not text or text.endswith((".", "!", "?")) else f"{text}."
