# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Tests of ``guard.h``: its headings, and whether it declares what the entry points call.

The tests only read the sources, so they need no compiler.
"""

import re
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "jupyter_gpupool" / "guard" / "src"

COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
#: A heading of guard.h. It names the files that define what the section declares.
HEADING = re.compile(r"^/\* ---- (.*?)\*/$", re.DOTALL | re.MULTILINE)
#: The beginning of a function that other files can call, up to its closing bracket.
FUNCTION = r"^(?!static\b|typedef\b)[A-Za-z_][\w *]*?\b(\w+)\([^;{}]*\)"


def declared(text):
    """Return the functions and variables that a part of a header declares."""
    text = COMMENT.sub("", text)
    names = re.findall(FUNCTION + ";", text, re.MULTILINE)
    for variables in re.findall(r"^extern ([^;()]*);", text, re.MULTILINE):
        names += re.findall(r"(\w+)(?:\[[^]]*\])?(?:,|$)", variables)
    return names


@pytest.fixture(scope="module")
def header():
    return (SOURCES / "guard.h").read_text()


@pytest.fixture(scope="module")
def sources():
    """Return the text of each C file without its comments, by the file's name."""
    return {path.name: COMMENT.sub("", path.read_text()) for path in SOURCES.glob("*.c")}


@pytest.fixture(scope="module")
def defining(sources):
    """Return a function that returns the names of the files that define a name."""
    functions = {
        file: set(re.findall(FUNCTION + r"\s*\{", text, re.MULTILINE))
        for file, text in sources.items()
    }

    def files(name):
        variable = re.compile(
            rf"^(?!static\b|extern\b)\w[^;()\n]*[ *]{name}\s*[\[=,;]", re.MULTILINE
        )
        return {f for f in sources if name in functions[f] or variable.search(sources[f])}

    return files


def test_declarations_stand_under_the_defining_file(header, defining):
    before, *parts = HEADING.split(header)
    assert not declared(before)
    wrong = []
    for heading, text in zip(parts[::2], parts[1::2], strict=True):
        named = set(re.findall(r"\w+\.c\b", heading))
        found = {name: defining(name) for name in declared(text)}
        wrong += [
            f"{name}: defined in {sorted(files)}, declared under {' '.join(heading.split())!r}"
            for name, files in found.items()
            if len(files) != 1 or not files <= named
        ]
        unused = named - set().union(*found.values())
        wrong += [f"{file}: defines nothing of {heading!r}" for file in sorted(unused)]
    assert not wrong, "\n".join(wrong)


def test_guard_h_declares_what_entry_points_call(header):
    entries = COMMENT.sub("", (SOURCES / "entries.S").read_text())
    called = set(re.findall(r"\bcall (guard_\w+)$", entries, re.MULTILINE))
    for kind in re.findall(r"^ +SLOW (\w+)$", entries, re.MULTILINE):
        called.add(f"guard_slow_{kind}")
    assert {"guard_slow_gate", "guard_enter_entry"} <= called
    assert called <= set(declared(header))
