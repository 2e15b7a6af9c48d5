# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Percentiles, facts about the machine, and the format of results.

A benchmark's result is a dict of JSON values. The key ``budgets`` has a list of results of
:func:`budget`. The runner prints this list as a table. Two optional keys name the hardware:
``emulated`` is true if the devices are emulated, and ``device_names`` has the names that the pool
gives the devices. No result names a host, a user or a path.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

#: Packages whose versions belong to a result.
PACKAGES = (
    "jupyter_gpupool",
    "cuda-bindings",
    "cuda-core",
    "ipykernel",
    "jupyter_client",
    "nvidia-ml-py",
    "pyzmq",
    "tornado",
)


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the percentile ``percent`` of ``values`` (nearest rank).

    Raises
    ------
    ValueError
        If there are no values, or if ``percent`` is 0 or less, or more than 100.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("There is no percentile of nothing.")
    if not 0 < percent <= 100:
        raise ValueError(f"A percentile is above 0 and at most 100, not {percent}.")
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return count, least, median, p90, p99 and greatest of ``values``, in their unit."""
    return {
        "count": len(values),
        "min": min(values),
        "p50": percentile(values, 50),
        "p90": percentile(values, 90),
        "p99": percentile(values, 99),
        "max": max(values),
    }


def budget(
    what: str, measured: float, allowed: float, unit: str, *, at_least: bool = False
) -> dict[str, Any]:
    """Return one line of the table of budgets.

    With ``at_least``, a higher figure is better (for example operations per second), and
    ``allowed`` is the lowest allowed figure.
    """
    met = measured >= allowed if at_least else measured <= allowed
    return {
        "what": what,
        "measured": measured,
        "allowed": allowed,
        "unit": unit,
        "at_least": at_least,
        "met": met,
    }


def verdict(line: dict[str, Any]) -> str:
    """Return "met", or by which factor the figure misses the budget."""
    if line["met"]:
        return "met"
    if line["at_least"]:
        factor = line["allowed"] / line["measured"] if line["measured"] else float("inf")
    else:
        factor = line["measured"] / line["allowed"] if line["allowed"] else float("inf")
    return f"MISSED, {factor:.2g} x the budget"


def table(lines: list[dict[str, Any]]) -> str:
    """Return the budgets as aligned text."""
    rows = [("budget", "allowed", "measured", "")]
    for line in lines:
        sign = ">=" if line["at_least"] else "<="
        rows.append(
            (
                line["what"],
                f"{sign} {line['allowed']:g} {line['unit']}",
                f"{line['measured']:.4g} {line['unit']}",
                verdict(line),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def _memory_total() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def rss(pid: int) -> int:
    """Return the resident bytes of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def pss(pid: int) -> int:
    """Return the PSS of a process in bytes: each shared page is divided among its users."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def machine_facts(devices: Sequence[str] = ()) -> dict[str, Any]:
    """Return facts about the machine that explain a result. They name no host, user or path.

    ``devices`` are the pool's names of the GPUs in use. The name of an emulated GPU contains the
    word "emulated".
    """
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    try:
        load = round(os.getloadavg()[0], 2)
    except OSError:
        load = -1.0
    return {
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": _memory_total(),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "versions": versions,
        "devices": list(devices) or ["none used"],
        #: The load average. If it is above the number of cores, other work disturbed the figures.
        "load_before": load,
    }


def host_kind(facts: Mapping[str, Any]) -> str:
    """Return a short word for a file name: ``"emulated-2cores"`` or ``"h200-16cores"``."""
    names = [str(n) for n in facts["devices"]]
    if any("emulated" in n.lower() for n in names):
        device = "emulated"
    elif names == ["none used"]:
        device = "cpu"
    else:
        device = re.sub(r"[^a-z0-9]+", "", names[0].lower().replace("nvidia", ""))
    return f"{device}-{facts['cores']}cores"


def write_result(name: str, result: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Write ``result`` as ``<name>-<kind of host>-<date>.json`` into ``folder``; return the file.

    If ``result`` has no ``machine``, this function adds it.
    """
    complete = {"benchmark": name, "machine": machine_facts(), **result}
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{host_kind(complete['machine'])}-{today}.json"
    path.write_text(json.dumps(complete, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return path
