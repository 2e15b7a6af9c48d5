# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What ``jupyter gpupool doctor`` shows of NVIDIA's driver and packages, without loading either."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from ...errors import GPUPoolError
from ..model import Finding, Verdict
from . import interpreter
from .driver import MODULE, capabilities, kill_hazard


def device_python(configured: str) -> list[Finding]:
    """The interpreter of the broker's device processes, and NVIDIA's packages in it."""
    try:
        found = interpreter.ask(interpreter.choose(configured))
    except GPUPoolError as error:
        return [Finding("fail", "device python", error.message, error.next_step)]
    if found.problem:
        message = f"{found.path}: {found.problem}"
        return [Finding("fail", "device python", message, interpreter.TODO)]
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    text = f"{found.python} ({found.path})"
    return [Finding("ok", "device python", text), Finding("ok", "NVIDIA packages", versions)]


def driver(version_file: Path = MODULE) -> Finding:
    """The NVIDIA kernel driver."""
    try:
        text = version_file.read_text()
    except OSError:
        return Finding(
            "warn",
            "driver",
            "no NVIDIA kernel driver is loaded",
            "Install one (580 or newer is best), or emulate: c.GPUPool.emulate = '2x16GiB'.",
        )
    hazard = kill_hazard(version_file)
    if hazard:
        todo = "Install the proprietary module or another branch."
        return Finding("warn", "driver", hazard, todo)
    version = next((w for w in text.split() if w[:1].isdigit() and "." in w), "")
    able = capabilities(version)
    message = f"NVIDIA {version or text.splitlines()[0]}"
    verdict: Verdict = "ok" if able.migrate else "warn" if able.suspend else "fail"
    return Finding(verdict, "driver", message, able.reason)


def persistence_mode() -> list[Finding]:
    """Without it the driver unloads between uses, and a restore from another process can fail."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=index,persistence_mode", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        todo = "The driver may hang: see `dmesg`."
        return [Finding("fail", "persistence", "nvidia-smi gave no answer in 20 s", todo)]
    if done.returncode:
        message = (done.stdout or done.stderr).strip().splitlines()[:1] or ["nvidia-smi failed"]
        return [Finding("fail", "persistence", message[0], "Repair the driver.")]
    off = [line.split(",")[0] for line in done.stdout.splitlines() if "Disabled" in line]
    if off:
        todo = "As root: nvidia-smi -pm 1, or enable nvidia-persistenced."
        return [Finding("warn", "persistence", f"off on GPU {', '.join(off)}", todo)]
    return [Finding("ok", "persistence", "on")]
