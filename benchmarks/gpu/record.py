# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The file of outcomes: one JSON line for the machine, and one for each item that has ended.

``make gpu`` appends an outcome as soon as the item ends, so an interrupted run loses no outcome.
All outcomes are in one file, because one file is easy to copy from a borrowed machine.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import machine_facts

ROOT = Path(__file__).parents[2]

#: Packages whose versions belong to the record, beside the packages of ``benchmarks.common``.
PACKAGES = ("torch", "triton", "cupy-cuda13x", "jax", "numba-cuda", "numpy", "pytest")


def gpu() -> dict[str, Any]:
    """Return name, driver and memory (bytes) of the first device, as NVML reports them.

    Raises
    ------
    pynvml.NVMLError
        If there is no driver, or no device.
    """
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return {
            "name": pynvml.nvmlDeviceGetName(handle),
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "cuda": pynvml.nvmlSystemGetCudaDriverVersion_v2(),
            "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            "devices": pynvml.nvmlDeviceGetCount(),
        }
    finally:
        pynvml.nvmlShutdown()


def source() -> str:
    """Return a short hash of the code under test. Equal hashes mean the same code."""
    found = hashlib.sha256()
    for folder in ("jupyter_gpupool", "tests/gpu", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".c", ".h", ".S", ".txt"):
                found.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:12]


class Record:
    """The file of outcomes of one machine."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def at(cls, folder: Path, device: dict[str, Any], *, again: bool = False) -> Record:
        """Return the newest record of this kind of machine in ``folder``, or begin a new one.

        With ``again``, always begin a new record.
        """
        short = re.sub(r"[^a-z0-9]+", "", device["name"].lower().replace("nvidia", ""))
        stem = f"gpu-{short}-driver{device['driver']}"
        old = sorted(folder.glob(f"{stem}-*.jsonl"))
        if old and not again:
            return cls(old[-1])
        now = datetime.datetime.now(datetime.timezone.utc)
        path = folder / f"{stem}-{now.date().isoformat()}.jsonl"
        if path.exists():
            path = path.with_stem(f"{path.stem}-{now:%H%M%S}")
        folder.mkdir(parents=True, exist_ok=True)
        made = cls(path)
        made.add({"machine": facts(device), "date": now.isoformat(timespec="seconds")})
        return made

    @contextmanager
    def claimed(self) -> Iterator[bool]:
        """Lock the record against other runs of the plan; yield False if another run has the lock.

        Two runs at once would disturb each other's figures.
        """
        with self.path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def add(self, line: dict[str, Any]) -> None:
        """Append a line. If the file ends within a line, first append a line break."""
        with self.path.open("ab+") as out:
            out.seek(-min(1, out.tell()), os.SEEK_END)
            cut = out.read() not in (b"", b"\n")
            text = json.dumps(line, sort_keys=True) + "\n"
            out.write(("\n" if cut else "").encode() + text.encode())

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines, without incomplete ones."""
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue

    def ended(self) -> dict[str, dict[str, Any]]:
        """Return the last outcome of each item that has an outcome."""
        return {line["item"]: line for line in self.lines() if "item" in line}


def facts(device: dict[str, Any]) -> dict[str, Any]:
    """Return facts about the machine that explain a result. They name no host, user or path."""
    found = machine_facts([device["name"]])
    for name in PACKAGES:
        try:
            found["versions"][name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found["versions"][name] = "not installed"
    return {**found, "gpu": device, "kernel": platform.release()}
