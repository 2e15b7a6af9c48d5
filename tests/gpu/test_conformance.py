# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Runs the emulated driver's conformance program against the machine's driver.

If a case fails on a real driver, the emulation is wrong, and code that relies on this behaviour may
be wrong, too. Each case runs in its own process, so a crash or a hang hides no other case.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.emulated import build

SOURCE = Path(__file__).parents[1] / "emulator" / "conformance.c"

#: The names of all cases, in the order of the program. Its last cases may leave a process behind or
#: fill the device, so they must run last.
CASES = [name for name in re.findall(r"CASE\((\w+)\)", SOURCE.read_text()) if name != "name"]

#: The cases that run here on an emulated device, too, to test this file. On the emulated driver,
#: ``tests/emulator`` runs all cases.
EMULATED = {"version", "kernel", "state_machine"}

#: The time-out of one case, in seconds. It is shorter than the program's own time-out of 60 s for
#: an answer: a driver answers within a second.
BOUND = 30


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    out = tmp_path_factory.mktemp("conformance") / "conformance"
    command = [*build.compiler(), "-std=gnu11", "-O1", "-o", str(out), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return out


@pytest.mark.parametrize(
    "case", [n if n in EMULATED else pytest.param(n, marks=pytest.mark.gpu) for n in CASES]
)
def test_real_driver_passes_the_conformance_case(program, machine, case, note):
    others = [name for name in CASES if name != case]
    process = subprocess.Popen(
        [program, *others],
        env=machine.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    bound, late = BOUND, False
    try:
        out, _ = process.communicate(timeout=bound)
    except subprocess.TimeoutExpired:
        late = True
    finally:
        # Kill the whole process group: the targets and helpers of the program may run longer than
        # the program.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if late:
        # This raises an error if a killed process hangs in the kernel driver and does not end.
        out, _ = process.communicate(timeout=bound)
    diagnostics = re.findall(r"^# (?!\d+ of)(.*)$", out, re.M)
    skipped = re.search(rf"^ok \d+ - {case} # SKIP (.*)$", out, re.M)
    ok = process.returncode == 0 and re.search(rf"^ok \d+ - {case}\b", out, re.M)
    note(outcome="late" if late else "ok" if ok else "not ok", diagnostics=diagnostics)
    assert not late, f"{case} did not end in {bound} s: {diagnostics}"
    assert ok, f"{case} ended with {process.returncode}: {diagnostics or out[-1000:]}"
    if skipped:
        pytest.skip(skipped[1])
