# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Long tests: the conformance program with sanitizers, and callers that are killed at random
moments of a suspend or resume.
"""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from emucuda import build

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

HERE = Path(__file__).parent

STEP = """
from cuda.core.checkpoint import Process
p = Process({})
s = p.state
if s == "running":
    p.lock(5000); p.checkpoint()
elif s == "locked":
    p.checkpoint()
else:
    p.restore(); p.unlock()
"""
SETTLE = """
from cuda.core.checkpoint import Process
p = Process({})
if p.state == "checkpointed":
    p.restore()
if p.state == "locked":
    p.unlock()
"""


@pytest.mark.parametrize("kind", ["address", "thread"])
def test_conformance_suite_passes_under_a_sanitizer(emulated, tmp_path, kind):
    build.compile(tmp_path / "lib", sanitize=kind)
    program, machine = tmp_path / "conformance", emulated()
    source = str(HERE / "conformance.c")
    command = [*build.compiler(), "-std=gnu11", "-o", str(program), source, "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    runtime = {"address": "libasan.so", "thread": "libtsan.so"}[kind]
    found = subprocess.run(
        [*build.compiler(), f"-print-file-name={runtime}"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout.strip()
    options = "handle_segv=0:detect_leaks=0:halt_on_error=1"  # one case crashes on purpose
    env = {
        **os.environ,
        **machine.env,
        "LD_PRELOAD": found,
        "LD_LIBRARY_PATH": str(tmp_path / "lib"),
    }
    env |= {"ASAN_OPTIONS": options, "TSAN_OPTIONS": "handle_segv=0:halt_on_error=1"}
    done = subprocess.run(
        [program], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("seed", range(5))
def test_callers_killed_at_any_instant_lose_no_memory(emulated, seed):
    chance = random.Random(seed)
    machine = emulated("1x1GiB,bandwidth=2GB/s")
    target, worker = machine.target(), None
    code = "context(); n = 64 << 20; p = ok(D.cuMemAlloc(n)); put(p, bytes_of(n)); _ = get(p, n)"
    want = target.do(code)
    for number in range(60):
        worker = worker or machine.target()
        worker.send(STEP.format(target.pid))
        time.sleep(chance.random() * 0.12)
        if chance.random() < 0.3:
            target.signal(signal.SIGSTOP)
            time.sleep(chance.random() * 0.02)
            target.signal(signal.SIGCONT)
        if chance.random() < 0.5:
            worker.kill()
            worker = None
        else:
            assert worker.reply() is None
        if number % 10 == 9:
            machine.target().do(SETTLE.format(target.pid))
            assert target.do("_ = get(p, n)") == want
