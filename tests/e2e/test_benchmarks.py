# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The benchmarks run, and users can publish the files that they write."""

from __future__ import annotations

import getpass
import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )


def test_unknown_benchmark_is_refused_with_the_known_names():
    done = run("nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stderr
    assert "suspend_overhead" in done.stderr


@pytest.mark.long
@pytest.mark.timeout(1600)
def test_every_benchmark_writes_anonymous_figures(tmp_path):
    done = run("--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    written = sorted(tmp_path.glob("*.json"))
    names = {json.loads(path.read_text())["benchmark"] for path in written}
    assert {"cell_latency", "kernel_start", "pool_decisions", "suspend_overhead"} <= names
    secrets = [platform.node(), str(Path.home()), str(ROOT), sys.prefix]
    if getpass.getuser() not in ("root", "user"):
        secrets.append(getpass.getuser())
    for path in written:
        text = path.read_text()
        for secret in filter(None, secrets):
            assert secret not in text, f"{path.name} names {secret}"
        result = json.loads(text)
        assert result["machine"]["cores"] > 0
        assert result["budgets"], f"{path.name} compares nothing with a budget"
