# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Whether NVIDIA's driver is here, what each version can do at most, and sentences about problems.

A version can prove that the driver lacks an ability. Only the self-test of a device can prove that
the device has the ability.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ...errors import GPUPoolError
from ..model import Finding, Verdict
from . import interpreter

#: First driver that has the checkpoint calls in its API (CUDA 12.8). cuda.core refuses older
#: drivers.
SUSPEND_FLOOR = 570
#: First driver that can restore a process on another device of the same model.
MIGRATE_FLOOR = 580

#: File with the version of the loaded kernel module.
MODULE = Path("/proc/driver/nvidia/version")

WITHOUT_GPU = "To try the pool without a GPU, set c.GPUPool.emulate = '2x16GiB'."

#: Sentences about the errors of nvmlInit. A key is the name of an NVML constant without
#: ``NVML_ERROR_``.
_PROBLEMS = {
    "LIBRARY_NOT_FOUND": (
        "No NVIDIA driver was found: libnvidia-ml.so.1 cannot be loaded. "
        f"Install the driver, or give the container its GPUs. {WITHOUT_GPU}"
    ),
    "DRIVER_NOT_LOADED": (
        "The NVIDIA driver is installed but its kernel module is not loaded. "
        "Load it (modprobe nvidia) or reboot."
    ),
    "LIB_RM_VERSION_MISMATCH": (
        "The NVIDIA driver was updated, but its old kernel module is still loaded. Reboot."
    ),
    "NO_PERMISSION": (
        "This user has no permission to use the NVIDIA driver. "
        "Check the permissions of /dev/nvidia*."
    ),
}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The most that the installed driver can do; ``reason`` says why it cannot do more."""

    suspend: bool
    migrate: bool
    reason: str = ""


def present() -> bool:
    """Whether this machine has an NVIDIA kernel driver (or WSL's GPU device).

    A device file alone proves nothing: NVIDIA's library creates ``/dev/nvidiactl`` when root calls
    cuInit, even if the Linux kernel has no NVIDIA driver (observed with versions 535, 550 and 555
    of the library). Without the driver, that file cannot be opened.
    """
    if any(os.path.exists(path) for path in ("/proc/driver/nvidia/version", "/dev/dxg")):
        return True
    try:
        os.close(os.open("/dev/nvidiactl", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except PermissionError:
        return True  # the driver exists, but this user may not use it; another message reports this
    except OSError:
        return False
    return True


def kill_hazard(module: Path = MODULE) -> str:
    """Return why the pool must suspend a resumed process again before it kills the process.

    Return "" if no such problem of the loaded driver is known. With the open kernel module
    595.71.05, the kill of a restored process has hung the whole machine (NVIDIA/cuda-checkpoint,
    issue 53). If the process is suspended again before the kill, the machine does not hang.
    """
    try:
        text = module.read_text(errors="replace")
    except OSError:
        return ""
    version = re.search(r"\b(595(?:\.\d+)+)\b", text)
    if version is None or "open kernel module" not in text.lower():
        return ""
    return (
        f"The open kernel module {version[1]} is known to hang the machine when a resumed process "
        "is killed. Therefore the pool suspends a resumed kernel again before it ends the kernel. "
        "A kill from outside the pool (kill -9, out of memory) is not safe: after such a kill, "
        "the pool tests the GPU before another kernel gets it."
    )


def capabilities(driver_version: str) -> Capabilities:
    """Return the most that driver ``driver_version`` (such as ``"580.95.05"``) can do.

    If ``driver_version`` does not begin with a number, the version is unknown, and the result
    excludes nothing.
    """
    match = re.match(r"\d+", driver_version)
    if match is None:
        return Capabilities(suspend=True, migrate=True)
    major = int(match.group())
    if major < SUSPEND_FLOOR:
        return Capabilities(
            suspend=False,
            migrate=False,
            reason=f"Driver {driver_version} is too old to suspend processes: "
            f"install {SUSPEND_FLOOR} or newer.",
        )
    if major < MIGRATE_FLOOR:
        return Capabilities(
            suspend=True,
            migrate=False,
            reason=f"Driver {driver_version} is too old to move a suspended process to another "
            f"device: install {MIGRATE_FLOOR} or newer.",
        )
    return Capabilities(suspend=True, migrate=True)


def problem(name: str, text: str) -> str:
    """Return a sentence for people about NVML's error ``name``; ``text`` is NVML's sentence."""
    other = f"The NVIDIA driver does not start: {text}. Run nvidia-smi for details."
    return _PROBLEMS.get(name, other)


# ---------------------------------------------------------------------- for the doctor


def device_python(configured: str) -> list[Finding]:
    """Check the Python of the broker's child processes, and its packages from NVIDIA."""
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


def loaded_driver(version_file: Path = MODULE) -> Finding:
    """Check the NVIDIA kernel driver."""
    try:
        text = version_file.read_text()
    except OSError:
        return Finding(
            "warn",
            "driver",
            "no NVIDIA kernel driver is loaded",
            "Install the driver (580 or newer is best), or emulate GPUs: "
            "c.GPUPool.emulate = '2x16GiB'.",
        )
    hazard = kill_hazard(version_file)
    if hazard:
        todo = "Install the proprietary kernel module, or another branch of the driver."
        return Finding("warn", "driver", hazard, todo)
    version = next((w for w in text.split() if w[:1].isdigit() and "." in w), "")
    able = capabilities(version)
    message = f"NVIDIA {version or text.splitlines()[0]}"
    verdict: Verdict = "ok" if able.migrate else "warn" if able.suspend else "fail"
    return Finding(verdict, "driver", message, able.reason)


def persistence_mode() -> list[Finding]:
    """Check persistence mode.

    Without this mode the driver unloads when no process uses it, and restores can fail.
    """
    import shutil
    import subprocess

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
        todo = "Run nvidia-smi -pm 1 as root, or enable nvidia-persistenced."
        return [Finding("warn", "persistence", f"off on GPU {', '.join(off)}", todo)]
    return [Finding("ok", "persistence", "on")]
