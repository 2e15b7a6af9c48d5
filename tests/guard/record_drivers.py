# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Write down what NVIDIA's driver libraries export, and what cuGetProcAddress gives for each name.

Needs the libraries, no GPU. See jupyter_gpupool/guard/README.md for the command.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENTRIES = HERE.parents[1] / "jupyter_gpupool" / "guard" / "entries.txt"

#: Beyond the versions that any of them knows.
VERSIONS = range(1000, 15000, 10)
SUFFIX = re.compile(r"(_v\d+)?(_ptds|_ptsz)?$")
FOUND, NOT_FOUND, TOO_NEW = range(3)

HEAD = """\
# What NVIDIA's libraries answered: made by tests/guard/record_drivers.py.
#
# driver LETTER VERSION CUDA   the libraries, of Debian's non-free packages libcuda1, libnvidia-ml1
# LETTERS NAME SINCE[:FORM]... [/ SINCE[:FORM]...]
#     what cuGetProcAddress gives in the drivers of these letters, from which version; after the
#     slash for per-thread streams, where that is something else. FORM: what is added to the name
# export LETTERS NAME...       functions that they export and cuGetProcAddress never gives
# nvml LETTERS NAME...         functions of NVML
"""


def exports(path: Path) -> list[str]:
    """Return the functions that a library exports."""
    command = ["nm", "-D", "--defined-only", str(path)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")
    return [line.split()[2].split("@")[0] for line in lines if " T " in line]


def ask(folder: Path) -> dict[str, object]:
    """Return what the libraries of a folder say. To be called in a process of its own."""
    path = folder / "libcuda.so.1"
    library = ctypes.CDLL(str(path))
    names = exports(path)
    symbol = {ctypes.cast(getattr(library, n), ctypes.c_void_p).value: n for n in names}
    assert len(symbol) == len(names)
    known = {line.split()[0] for line in ENTRIES.read_text().splitlines() if line[:2] == "cu"}
    bases = sorted({SUFFIX.sub("", name) for name in known.union(names)})
    cuda = ctypes.c_int()
    assert library.cuDriverGetVersion(ctypes.byref(cuda)) == 0

    def get(name: str, version: int, flags: int) -> str | None:
        out, status = ctypes.c_void_p(77), ctypes.c_int(77)
        head = (name.encode(), ctypes.byref(out), version, ctypes.c_uint64(flags))
        five = (library.cuGetProcAddress_v2(*head, ctypes.byref(status)), out.value)
        out.value = 77
        four = (library.cuGetProcAddress(*head), out.value)
        if status.value == FOUND:
            assert five == four == (0, five[1]), name
            return symbol[five[1]]
        assert (five, four) == ((0, None), (500, 77)), name
        assert status.value in (NOT_FOUND, TOO_NEW), name
        return "-" if status.value == NOT_FOUND else None

    answers = {}
    for base in bases:
        said = []
        for flags in range(3):
            found = [(version, get(base, version, flags)) for version in VERSIONS]
            steps = [next(group) for _, group in itertools.groupby(found, lambda item: item[1])]
            if steps != [(VERSIONS[0], "-")]:
                # A name that is known is too new for the first version, and then always found.
                assert steps[0][1] is None, steps
                assert all(form for _, form in steps[1:]), steps
                assert "-" not in dict(steps).values(), steps
            said.append(steps[1:])
        assert said[0] == said[1], base
        if said[0] or said[2]:
            answers[base] = [said[0], said[2]]
    return {
        "driver": path.resolve().name.removeprefix("libcuda.so."),
        "cuda": cuda.value,
        "answers": answers,
        "exports": names,
        "nvml": exports(folder / "libnvidia-ml.so.1"),
    }


def by_letters(lists: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return what is in each list, by the letters of the lists that it is in."""
    found: dict[str, list[str]] = {}
    for name in sorted(set().union(*lists.values())):
        found.setdefault("".join(k for k, v in lists.items() if name in v), []).append(name)
    return found


def text(said: list[dict]) -> str:
    """Return the record."""
    letters = "abcdefgh"[: len(said)]
    of = dict(zip(letters, said, strict=True))
    lines = [f"driver {k} {v['driver']} {v['cuda']}" for k, v in of.items()]
    forms: dict[str, list[str]] = {}
    for letter, one in of.items():
        forms[letter] = []
        for base, (plain, per_thread) in one["answers"].items():
            shown = [
                [f"{since}:{form.removeprefix(base)}".rstrip(":") for since, form in steps]
                for steps in (plain, per_thread)
            ]
            parts = shown[0] if shown[0] == shown[1] else [*shown[0], "/", *shown[1]]
            forms[letter].append(" ".join([base, *parts]))
    together = [(line, k) for k, listed in by_letters(forms).items() for line in listed]
    lines += [f"{k} {line}" for line, k in sorted(together)]
    for word, lists in (
        ("export", {k: sorted(set(v["exports"]) - _given(v)) for k, v in of.items()}),
        ("nvml", {k: v["nvml"] for k, v in of.items()}),
    ):
        lines += [f"{word} {k} {' '.join(names)}" for k, names in by_letters(lists).items()]
    return HEAD + "\n".join(lines) + "\n"


def _given(said: dict) -> set[str]:
    return {form for pair in said["answers"].values() for steps in pair for _, form in steps}


def read(path: Path) -> list[dict]:
    """Return what :func:`ask` returned for each driver, from the record."""
    drivers: dict[str, dict] = {}
    for line in path.read_text(encoding="ascii").splitlines():
        words = line.split()
        if line.startswith("#"):
            continue
        if words[0] == "driver":
            one = {"driver": words[2], "cuda": int(words[3]), "answers": {}, "exports": []}
            drivers[words[1]] = {**one, "nvml": []}
            continue
        if words[0] in ("export", "nvml"):
            for letter in words[1]:
                drivers[letter]["exports" if words[0] == "export" else "nvml"] += words[2:]
            continue
        base, *steps = words[1:]
        plain = steps[: steps.index("/")] if "/" in steps else steps
        sides = [plain, steps[len(plain) + 1 :] if plain != steps else plain]
        pair = [[_step(base, step) for step in side] for side in sides]
        for letter in words[0]:
            drivers[letter]["answers"][base] = pair
    for one in drivers.values():
        one["exports"] = sorted(_given(one).union(one["exports"]))
    return list(drivers.values())


def _step(base: str, step: str) -> tuple[int, str]:
    since, _, form = step.partition(":")
    return int(since), form if form.startswith("cu") else base + form


def main(folders: list[str]) -> None:
    """Print the record of the libraries in some folders."""
    if folders[0] == "--one":
        print(json.dumps(ask(Path(folders[1]))))
        return
    said = []
    for folder in folders:  # a process for each: they have one SONAME
        command = [sys.executable, __file__, "--one", folder]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        said.append(json.loads(done.stdout))
    print(text(said), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
