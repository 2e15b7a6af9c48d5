# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The checks of ``jupyter gpupool doctor`` on this machine, one function for each.

Each function returns one :class:`Finding` or several. If a check cannot find out what it asks, its
finding says this. A check never guesses.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Mapping, Sequence

from ..broker.hostmemory import HostRoom
from ..cgroups import Host
from ..config import BrokerSettings
from ..config.accounts import unknown_names
from ..config.differences import differences
from ..config.tree import check_machine
from ..devices import Finding, Verdict
from ..endpoint import check_socket, find_socket
from ..errors import BrokerUnavailable, Code, GPUPoolError
from ..units import format_bytes

#: The Python distributions that this package needs. By name of the distribution: the part of this
#: package that uses it.
PACKAGES = {
    "jupyter_client": "kernels",
    "ipykernel": "the Pooled GPU kernel",
    "tornado": "the broker",
    "traitlets": "the configuration",
}


def python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.platform != "linux":
        return Finding("fail", "python", f"{version} on {sys.platform}", "Use Linux.")
    return Finding("ok", "python", f"{version} ({sys.executable})")


def packages() -> list[Finding]:
    found = []
    for name, purpose in PACKAGES.items():
        try:
            found.append(Finding("ok", name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            todo = f"This package is needed for {purpose}: pip install {name}"
            found.append(Finding("fail", name, "not installed", todo))
    return found


def configuration(settings: BrokerSettings) -> list[Finding]:
    files = ", ".join(map(str, settings.files)) or "no file, so every option has its default"
    notes = [Finding("warn", "config", note) for note in settings.notes]
    return [Finding("ok", "config", files), *notes]


def groups(settings: BrokerSettings, found: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Check that the GPUs have room for all guarantees, and that the members of groups exist."""
    tree = settings.pool.groups
    if not tree:
        return []
    capacities = [int(device["memory_capacity"]) for device in found]
    wrong = check_machine(settings, capacities)
    if wrong:
        return [Finding("fail", "groups", fault.text, fault.next_step) for fault in wrong]
    unknown = unknown_names(settings)
    if unknown:
        return [Finding("warn", "groups", fault.text, fault.next_step) for fault in unknown]
    count = f"{len(tree)} groups" if len(tree) > 1 else "1 group"
    return [Finding("ok", "groups", f"{count}; `jupyter gpupool check-config` shows them")]


def in_force(settings: BrokerSettings, status: Mapping[str, Any]) -> list[Finding]:
    """Check whether the running broker uses the configuration that this command has read."""
    found = []
    for d in differences(settings, status.get("config") or {}):
        text = (
            f"c.GPUPool.{d.option} is {d.here} here ({d.here_from}), but {d.in_force} in the "
            f"running broker ({d.in_force_from})"
        )
        todo = (
            "Change the value that the broker reads and send SIGHUP to the broker, or end the "
            "broker, so that a new one starts."
        )
        found.append(Finding("warn", "config", text, todo))
    return found


def compiler() -> Finding:
    found = next(
        (c for c in (os.environ.get("CC"), "cc", "gcc", "clang") if c and shutil.which(c)), ""
    )
    if found:
        return Finding("ok", "compiler", str(shutil.which(found)))
    todo = (
        "Only the build of the guard and of the emulated driver needs a compiler: apt-get install "
        "gcc libc6-dev"
    )
    return Finding("warn", "compiler", "no C compiler", todo)


def emulator() -> Finding:
    """Check whether the emulated driver is built; the package's build makes it."""
    from ..emulation import EmulatorNotBuilt, library_dir

    try:
        return Finding("ok", "emulator", f"built in {library_dir()}")
    except EmulatorNotBuilt:
        todo = "Build it with: python -m emucuda.build"
        return Finding("warn", "emulator", "the emulated driver is not built", todo)


def guard(settings: BrokerSettings) -> Finding:
    """Check whether the guard's libraries are built; the package's build makes them."""
    from ..guard.install import GuardMissing, library

    if not settings.guard:
        return Finding("ok", "guard", "off: c.GPUPool.guard is False")
    try:
        return Finding("ok", "guard", f"built in {library().parent}")
    except GuardMissing as error:
        return Finding("warn", "guard", error.message, error.next_step)


def attach(in_force: str, reason: str, settings: BrokerSettings) -> Finding:
    """Return the attach policy of kernels that choose none, and the reason for this policy."""
    when = {
        "lazy": "kernels get their slice at their first CUDA call",
        "cell": "kernels get their slice when a cell starts",
        "manual": "kernels get their slice on %gpu attach",
    }
    text = f"{in_force}: {when.get(in_force, in_force)}"
    if not reason:
        return Finding("ok", "attach", text)
    # Without the guard, kernels cannot use the default policy lazy. If an admin has turned the
    # guard off, the admin wants this, so there is no warning.
    return Finding("warn" if settings.guard else "ok", "attach", text, reason)


def guard_limits(found: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Return what the guard cannot prevent, if the guard is in use."""
    if not any(device["tier"] == "guarded" for device in found):
        return []
    return [
        Finding(
            "ok",
            "guard's limits",
            "a limit for well-behaved programs, not a security boundary",
            "A program can go around it: unset LD_PRELOAD, link statically, or open the driver "
            "by its path. c.GPUPool.overuse says what the pool does about such memory. Kernels "
            "take turns to compute; the hardware does not divide the GPU.",
        )
    ]


def socket(path: Path, answers: bool) -> Finding:
    """Check whether this user can trust the socket, and whether a broker answers at it."""
    if answers:
        return Finding("ok", "socket", f"a broker answers at {path}")
    try:
        check_socket(path)
    except BrokerUnavailable as error:
        if error.code != Code.NO_BROKER:
            return Finding("fail", "socket", error.message, error.next_step)
        todo = "The first Pooled GPU kernel starts one for you."
        return Finding("ok", "socket", f"no broker runs at {path}", todo)
    todo = "Open a Pooled GPU kernel, which starts a broker, or run `jupyter gpupool broker`."
    return Finding("fail", "socket", f"nothing answers at {path}", todo)


def kernelspecs() -> list[Finding]:
    """Check whether the Pooled GPU kernel and its provisioner are installed."""
    from jupyter_client.kernelspec import KernelSpecManager

    entries = importlib.metadata.entry_points(group="jupyter_client.kernel_provisioners")
    names = {entry.name for entry in entries}
    found = []
    if "gpupool-provisioner" in names:
        found.append(Finding("ok", "provisioner", "gpupool-provisioner is registered"))
    else:
        todo = "Install this package in the environment of the server: pip install jupyter_gpupool"
        found.append(Finding("fail", "provisioner", "gpupool-provisioner is not registered", todo))
    specs = KernelSpecManager().find_kernel_specs()
    if "gpupool-python3" in specs:
        found.append(Finding("ok", "kernelspec", f"gpupool-python3 in {specs['gpupool-python3']}"))
    else:
        todo = "Reinstall jupyter_gpupool, or make this kernel: jupyter gpupool wrap python3"
        found.append(Finding("fail", "kernelspec", "gpupool-python3 is not installed", todo))
    return found


def ptrace_scope(proc: Path = Path("/proc")) -> Finding:
    """Check whether the Linux module Yama lets one process trace another.

    See the kernel documentation, admin-guide/LSM/Yama.
    """
    try:
        scope = int((proc / "sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return Finding("ok", "ptrace", "not restricted (no Yama)")
    if scope == 0:
        return Finding("ok", "ptrace", "not restricted (ptrace_scope 0)")
    if scope == 1 and os.getuid() == 0:
        return Finding("ok", "ptrace", "ptrace_scope 1, which does not restrict a broker of root")
    todo = (
        "This may keep the pool from suspending kernels, which are then pinned. In that case, run "
        "the broker as root or set kernel.yama.ptrace_scope=0."
    )
    return Finding("warn", "ptrace", f"restricted (ptrace_scope {scope})", todo)


def host_memory(settings: BrokerSettings, devices: Sequence[Mapping[str, Any]]) -> Finding:
    """Check whether the host has room for suspended state.

    The driver keeps the state of suspended kernels in the host memory of their processes.
    """
    budget = settings.pool.host_memory
    text = f"{format_bytes(budget)} of {format_bytes(Host().total())} for suspended state"
    largest = max((int(d["memory_capacity"]) for d in devices), default=0)
    if not largest:
        return Finding("ok", "host memory", text)
    total = sum(int(d["memory_capacity"]) for d in devices)
    text += f"; the GPUs have {format_bytes(total)}"
    if budget < largest:
        todo = (
            "A kernel that has grown to a whole GPU cannot be suspended. Add memory, raise "
            "c.GPUPool.host_memory, or set c.GPUPool.max_memory_per_kernel."
        )
        return Finding("warn", "host memory", text, todo)
    return Finding("ok", "host memory", text)


def memory_limits(
    settings: BrokerSettings, devices: Sequence[Mapping[str, Any]], host: Host | None = None
) -> list[Finding]:
    """Check whether the memory limits allow the suspend of a slice of the default size.

    These are the limits of the machine and of this process's cgroups. Kernels that a spawner or a
    service manager starts may have other limits.
    """
    largest = max((int(d["memory_capacity"]) for d in devices), default=0)
    wanted = min(settings.pool.default_memory, largest)
    room = HostRoom(host, lambda: settings.host_reserve)
    found = []
    for level in room.host.levels():
        most = room.most(level)
        if most >= wanted:
            continue
        kept = f"{format_bytes(room.kept(level))} of this must stay free (host_reserve)"
        found.append(
            Finding(
                "warn",
                "memory limit",
                f"{level} may use {format_bytes(level.limit)}, and {kept}, so a slice of "
                f"{format_bytes(wanted)} can never be suspended here",
                "Such kernels keep their GPU while others wait. Raise the memory limit, lower "
                "c.GPUPool.default_memory, or set c.GPUPool.max_memory_per_kernel.",
            )
        )
    room.close()
    return found


def journal(status: Mapping[str, Any]) -> list[Finding]:
    """Check whether the running broker can write the journal that the next broker reads."""
    broker = status.get("broker") or {}
    if not broker.get("journal_problem"):
        if broker.get("journal_note"):
            return [Finding("warn", "journal", str(broker["journal_note"]))]
        return [Finding("ok", "journal", str(broker["journal"]))] if "journal" in broker else []
    todo = (
        "Until the journal is repaired, a restarted broker does not know what happened after the "
        "journal failed."
    )
    return [Finding("fail", "journal", str(broker["journal_problem"]), todo)]


def journal_place(settings: BrokerSettings, path: Path) -> list[Finding]:
    """Return where a new broker at the socket ``path`` would write its journal."""
    from ..broker.store.journal_file import place

    try:
        found = place(settings.state_dir, path)
    except GPUPoolError as error:
        return [Finding("fail", "journal", error.message, error.next_step)]
    verdict: Verdict = "warn" if found.note else "ok"
    return [Finding(verdict, "journal", found.note or str(found.path))]


def devices(
    found: Sequence[Mapping[str, Any]],
    problem: str,
    orders: Sequence[Mapping[str, Any]] = (),
) -> list[Finding]:
    """Return one line for each GPU: its tier, and what does not work in this tier.

    ``orders`` is the field ``maintenance`` of the broker's status. If an admin has taken a GPU out
    of service, the finding is a warning and not a failure.
    """
    held = {str(order["device"]): order for order in orders}
    if not found:
        return [Finding("fail", "devices", problem or "no GPU was found", "See 'driver' above.")]
    lines = []
    for device in found:
        # Devices of the emulated driver already have the word "emulated" in their names.
        label = "EMULATED " * (device["emulated"] and "EMULATED" not in device["name"].upper())
        size = format_bytes(device["memory_total"])
        text = f"{label}{device['name']}, {size}, tier {device['tier']}"
        if device.get("context_bytes"):
            text += f", a CUDA context takes {format_bytes(device['context_bytes'])}"
        reason = str(device.get("tier_reason") or "")
        order = held.get("") or held.get(str(device.get("uuid")))
        if order is not None:
            lines.append(Finding("warn", f"GPU {device['index']}", text, _taken_out(order, device)))
        elif device.get("drained_reason"):
            reason = f"not used: {device['drained_reason']}"
            lines.append(Finding("fail", f"GPU {device['index']}", text, reason))
        elif not device["can_suspend"]:
            todo = reason or "The self-test could not suspend a process on this GPU."
            lines.append(Finding("warn", f"GPU {device['index']}", f"{text}, no suspend", todo))
        else:
            text += ", suspend works"
            lines.append(Finding("ok", f"GPU {device['index']}", text, reason))
    return lines


def _taken_out(order: Mapping[str, Any], device: Mapping[str, Any]) -> str:
    """Return who took a GPU out of service, when and why, and how to put it back."""
    done = {"pause": "paused", "drain": "drained"}[str(order["kind"])]
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(float(order["since"])))
    why = f" ({order['reason']})" if order.get("reason") else ""
    target = f" --device {device['index']}" if order["device"] else ""
    return (
        f"{done} by {order['by']} on {when}{why}; to give it back: jupyter gpupool resume{target}"
    )


def limited(limit: str) -> list[Finding]:
    """Return which environment variable keeps GPUs of this machine out of the pool."""
    return [Finding("ok", "devices", limit)] if limit else []


def default_fits(settings: BrokerSettings, found: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Check whether a slice of the default size fits on a GPU.

    If it fits on none, kernels get a smaller slice.
    """
    largest = max((int(d["memory_capacity"]) for d in found), default=0)
    memory = settings.pool.default_memory
    if not largest or memory <= largest:
        return []
    message = (
        f"default_memory is {format_bytes(memory)}, the largest GPU has {format_bytes(largest)}"
    )
    todo = "A kernel that asks for no size gets a whole GPU. Lower c.GPUPool.default_memory."
    return [Finding("warn", "config", message, todo)]


def reserve_fits(settings: BrokerSettings, found: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Check whether each GPU has more memory than the reserve.

    The pool cannot grant any memory of a GPU that is not larger than the reserve.
    """
    reserve = settings.pool.reserve
    small = [d for d in found if reserve and int(d["memory_total"]) <= reserve]
    if not small:
        return []
    names = ", ".join(f"GPU {d['index']} ({format_bytes(d['memory_total'])})" for d in small)
    message = f"reserve is {format_bytes(reserve)}, so the pool can grant no memory of {names}"
    return [Finding("warn", "config", message, "Lower c.GPUPool.reserve.")]


def stanzas() -> list[Finding]:
    """Check whether the options of pooled kernelspecs are valid.

    A kernel with invalid options does not start.
    """
    from traitlets import TraitError

    from ..kernelspecs import list_pooled
    from ..launcher import PLACEMENT_OPTIONS, check_options, options_of
    from ..provisioner import GPUPoolProvisioner

    found = []
    for kernel in list_pooled():
        path = kernel.path / "kernel.json"
        stanza = json.loads(path.read_text(encoding="utf-8"))["metadata"]["kernel_provisioner"]
        options = stanza.get("config", {})
        try:
            check_options(options, kernel.name, options_of(stanza["provisioner_name"]))
            # A remote provisioner accepts the options of GPUPoolProvisioner and PLACEMENT_OPTIONS.
            # So this check uses GPUPoolProvisioner for both provisioners: the import of the remote
            # provisioner needs pyzmq with CurveZMQ.
            GPUPoolProvisioner(**{k: v for k, v in options.items() if k not in PLACEMENT_OPTIONS})
        except (GPUPoolError, TraitError, TypeError) as error:
            todo = f"Correct {path}: kernels with these options do not start."
            found.append(Finding("warn", "kernelspec", f"{kernel.name}: {error}", todo))
    return found


def find(path: str, configured: str) -> Path:
    """Return ``path``, or the socket that a new kernel would use if ``path`` is empty."""
    return Path(path) if path else find_socket(configured)
