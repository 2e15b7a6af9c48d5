# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter gpupool list``, ``wrap`` and ``unwrap``: kernels that use the pool."""

from __future__ import annotations

import json

from .. import kernelspecs
from ..launcher import kernel_command, runs_ipykernel


def show_list() -> int:
    """Print the pooled kernels, one a line. Returns 0."""
    pooled = kernelspecs.list_pooled()
    if not pooled:
        print("No kernel uses the pool. Make one with: jupyter gpupool wrap python3")
        return 0
    rows = [("KERNEL", "SHOWN AS", "WRAPS", "FOLDER")]
    rows += [(k.name, k.display_name, k.wraps or "-", str(k.path)) for k in pooled]
    widths = [max(len(row[n]) for row in rows) for n in range(4)]
    for row in rows:
        print(
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        )
    return 0


def wrap(
    name: str, *, user: bool, prefix: str | None, new_name: str | None, display_name: str | None
) -> int:
    """Install a pooled twin of kernelspec ``name`` and say where. Returns 0."""
    folder = kernelspecs.wrap(
        name, user=user, prefix=prefix, new_name=new_name, display_name=display_name
    )
    print(f"Kernel {folder.name!r} uses the pool: {folder}")
    argv = json.loads((folder / "kernel.json").read_text())["argv"]
    if not runs_ipykernel(kernel_command(argv)):
        print(
            "Note: it is not an IPython kernel. It has no %gpu; the guard gives it its slice at "
            "its first CUDA call.\n`jupyter gpupool doctor` says whether this pool has the guard; "
            "without it the kernel runs without a GPU."
        )
    return 0


def unwrap(name: str) -> int:
    """Remove a pooled twin. Returns 0."""
    kernelspecs.unwrap(name)
    print(f"Removed {name!r}. Kernels that run keep running.")
    return 0
