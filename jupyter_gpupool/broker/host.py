# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Host memory that could be taken now without swapping or an OOM kill, in bytes.

A suspended kernel's device memory lands in that kernel's own resident memory, so what counts is
the machine *and* every memory cgroup above the process that takes it.
"""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def available(pid: int | None = None, *, root: Path = _ROOT, proc: Path = Path("/proc")) -> int:
    """Return the bytes that process ``pid`` (None: this one) could still take.

    The least of ``MemAvailable`` and, for each cgroup from the process's own to the root, its
    limit less its use. What cannot be read does not limit.
    """
    least = _mem_available(proc)
    for folder, limit_name, usage_name in _groups(pid, root, proc):
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is not None and usage is not None:
            # Cache that the kernel can drop is no use that counts against us.
            least = min(least, limit - usage + _reclaimable(folder))
    return max(0, least)


def _mem_available(proc: Path) -> int:
    with (proc / "meminfo").open() as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable (Linux 3.14 has it)")


def _groups(pid: int | None, root: Path, proc: Path) -> list[tuple[Path, str, str]]:
    try:
        lines = (proc / ("self" if pid is None else str(pid)) / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[Path, str, str]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = base / path.lstrip("/")
        while folder != base.parent:
            found.append((folder, *names))
            folder = folder.parent
    return found


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" is no limit


def _reclaimable(folder: Path) -> int:
    try:
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "inactive_file":
                return int(value)
    except OSError:
        pass
    return 0
