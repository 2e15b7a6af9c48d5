# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""NVIDIA's Python packages: the versions that child processes need, and those that are installed.

Standard library only. As a program it prints what an interpreter has:
``{"python": "3.11.7", "versions": {"cuda-core": "1.2.2", ...}, "problem": ""}``.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import sys
from typing import Mapping

#: What each package must satisfy. cuda.core.checkpoint needs ``CUcheckpointGpuPair``, which
#: cuda-bindings has had since 13.0.2 and no release 12 has; in 13.3.0 the restore call is broken.
RANGES = {
    "cuda-core": ">=1.0",
    "cuda-bindings": ">=13.0.2,!=13.3.0,<14",
    "nvidia-ml-py": ">=12.560",
}

#: The command that makes an environment for them.
INSTALL = "jupyter gpupool install-devices"


def versions() -> dict[str, str]:
    """Return the versions that this interpreter would import; "" for a package that is missing."""
    found = {}
    for name in RANGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def problem(found: Mapping[str, str]) -> str:
    """Return why the packages ``found`` do not serve, in a sentence; "" if they do."""
    missing = [name for name in RANGES if not found.get(name)]
    if missing:
        return f"{' and '.join(missing)} {'are' if missing[1:] else 'is'} not installed."
    wrong = [
        f"{name} is {found[name]} and must be {RANGES[name]}"
        for name in RANGES
        if not _satisfies(found[name], RANGES[name])
    ]
    return f"{'; '.join(wrong)}." if wrong else ""


def _satisfies(version: str, wanted: str) -> bool:
    have = _numbers(version)
    for clause in wanted.split(","):
        operator, text = re.match(r"(>=|<|!=)(.*)", clause).groups()  # type: ignore[union-attr]
        limit = _numbers(text)
        width = max(len(have), len(limit))
        a, b = (numbers + (0,) * (width - len(numbers)) for numbers in (have, limit))
        if not {">=": a >= b, "<": a < b, "!=": a != b}[operator]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release part of a version: 13.0.2.post1 is (13, 0, 2)."""
    return tuple(map(int, re.match(r"\d*(?:\.\d+)*", version)[0].split(".") if version else ()))  # type: ignore[index]


def main() -> None:
    """Print what this interpreter has."""
    found = versions()
    report = {"python": platform.python_version(), "versions": found, "problem": problem(found)}
    print(json.dumps({**report, "executable": sys.executable}))


if __name__ == "__main__":
    main()
