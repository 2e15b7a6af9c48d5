# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter gpupool doctor``: prints the result of each check, and below it what to do.

It changes nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, Mapping, Sequence

from ..client import Client
from ..config import BrokerSettings, WrongConfiguration, load_settings, usable_attach
from ..devices import DeviceOptions, Finding, vendor
from ..endpoint import MACHINE_SOCKET, SOCKET_VARIABLE
from ..errors import GPUPoolError
from ..guard.install import without_guard
from . import checks, maintenance
from .picture import Style
from .status import style_for

_COLOUR = {"ok": "running", "warn": "idle", "fail": "alarm"}


def examine(
    socket: str,
    *,
    config_files: Sequence[Path],
    as_json: bool,
    retest: bool = False,
    inside: bool = False,
) -> int:
    """Run the checks and print the results; return 0, or 1 if a check fails.

    With ``retest``, the running broker first repeats the self-test of the GPUs that are out of
    service. With ``inside``, the checks are about this container and not about the machine.
    """
    if retest:
        note = maintenance.retest(socket)
        print(note, file=sys.stderr if as_json else sys.stdout)
    findings = _inside(socket, config_files) if inside else _all(socket, config_files)
    if as_json:
        print(json.dumps([asdict(f) for f in findings], indent=2))
    else:
        style = style_for(sys.stdout)
        print("\n".join(line for finding in findings for line in _lines(finding, style)))
        print(_summary(findings))
    return int(any(f.verdict == "fail" for f in findings))


def _lines(finding: Finding, style: Style) -> list[str]:
    verdict = style.paint(f"{finding.verdict:<4}", _COLOUR[finding.verdict])
    lines = [f"{verdict}  {finding.name:<14}  {finding.message}"]
    if finding.todo:
        lines.append(f"{'':22}{finding.todo}")
    return lines


def _summary(findings: Sequence[Finding]) -> str:
    bad = sum(f.verdict == "fail" for f in findings)
    warn = sum(f.verdict == "warn" for f in findings)
    if bad:
        return f"\n{bad} of {len(findings)} checks failed, {warn} gave a warning."
    return f"\nReady: {len(findings)} checks, {warn} with a warning."


def _all(socket: str, config_files: Sequence[Path]) -> list[Finding]:
    found = [checks.python(), *checks.packages(), checks.compiler(), checks.emulator()]
    try:
        settings = load_settings(config_files)
    except WrongConfiguration as error:
        # The other checks need a valid configuration. If they used the default options instead,
        # they would report on a configuration that nobody has written.
        found += [Finding("fail", "config", f.text, f.next_step) for f in error.faults]
        return found
    found += checks.configuration(settings)
    found += vendor.inspect(settings.device_python, driver=not settings.emulate)
    found.append(checks.guard(settings))
    path = checks.find(socket, settings.socket)
    status = _ask_broker(path)
    found.append(checks.socket(path, status is not None))
    if status is not None:
        devices, problem = list(status["devices"]), ""
        orders = status.get("maintenance") or []
        limit = str(status.get("limited", ""))
        found += checks.journal(status)
        found += checks.in_force(settings, status)
        policies = status.get("settings") or {}
        attach, reason = policies.get("attach", ""), policies.get("attach_reason", "")
    else:
        orders = []
        devices, problem, unguarded, limit = probe(settings)
        found += checks.journal_place(settings, path)
        guarded = any(device["tier"] == "guarded" for device in devices)
        attach, reason = usable_attach(settings.attach, guarded, unguarded)
    found += checks.devices(devices, problem, orders) + checks.limited(limit)
    if devices:
        found += [checks.attach(attach, reason, settings), *checks.guard_limits(devices)]
    found += checks.groups(settings, devices)
    found += checks.default_fits(settings, devices) + checks.reserve_fits(settings, devices)
    found += [checks.host_memory(settings, devices), *checks.memory_limits(settings, devices)]
    found += [checks.ptrace_scope()]
    found += checks.kernelspecs() + checks.stanzas()
    return found


def _inside(socket: str, config_files: Sequence[Path]) -> list[Finding]:
    from .inside import examine_inside

    try:
        configured = load_settings(config_files).socket
    except WrongConfiguration as error:
        return [Finding("fail", "config", f.text, f.next_step) for f in error.faults]
    # Do not call find_socket(). If the container does not mount the machine's folder, find_socket()
    # would choose the user's own socket. This choice is right only on a machine without a machine
    # broker.
    named = socket or configured or os.environ.get(SOCKET_VARIABLE, "")
    return examine_inside(Path(named) if named else MACHINE_SOCKET)


def _ask_broker(path: Path) -> Mapping[str, Any] | None:
    try:
        with Client(path) as client:
            return client.call("status")
    except GPUPoolError:
        return None  # the check of the socket reports why


def probe(settings: BrokerSettings) -> tuple[list[Mapping[str, Any]], str, str, str]:
    """Find and test the devices as a broker does at its start, and release them.

    Return four values: the devices, why there are none, why the guard is off, and which setting
    hides GPUs. A text that does not apply is empty.
    """

    async def look(
        env: Mapping[str, str] | None,
    ) -> tuple[list[Mapping[str, Any]], str, str, str]:
        service = vendor.open_devices(
            DeviceOptions(
                log=logging.getLogger(__name__),
                env=env,
                given=without_guard(os.environ),
                lock_timeout=settings.lock_timeout,
                guard=settings.guard,
                python=settings.device_python,
            )
        )
        try:
            devices = await service.start()
            return (
                [{**asdict(d), "memory_capacity": d.memory_total - d.memory_reserved}
                 for d in devices],
                service.problem,
                service.guard.guard_problem if service.guard else "",
                service.limit,
            )  # fmt: skip
        finally:
            await service.close()

    with tempfile.TemporaryDirectory(prefix="gpupool-doctor-") as folder:
        try:
            return asyncio.run(look(_environment(settings.emulate, Path(folder))))
        except GPUPoolError as error:
            return [], str(error), "", ""


def _environment(emulate: str, folder: Path) -> Mapping[str, str] | None:
    if not emulate:
        return None
    from ..emulation import environment

    return {**os.environ, **environment(emulate, folder)}
