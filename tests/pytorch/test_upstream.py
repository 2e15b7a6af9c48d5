# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The runner of PyTorch's own tests reports the outcome of each test, without and
with the guard.
"""

from __future__ import annotations

from . import upstream

TESTS = """
import os, subprocess, sys, time, unittest
import torch

class TestOne(unittest.TestCase):
    def test_device(self):
        assert torch.ones(3, device="cuda").sum().item() == 3
    def test_fails(self):
        assert torch.cuda.device_count() == 7
    def test_skips(self):
        self.skipTest("not today")
    def test_crashes(self):
        os.abort()
    def test_hangs(self):
        subprocess.Popen(["sleep", "1000"]).wait()
    def test_lacks_an_operator(self):
        x = torch.ones(4, 4, device="cuda")
        torch.batch_norm_stats(x, 1e-5)
    def test_depends(self):
        assert "GPUPOOL_SESSION" not in os.environ
"""

WANTED = {
    "crashes": "failed",
    "device": "passed",
    "fails": "failed",
    "hangs": "too slow",
    "lacks_an_operator": "not applicable",
    "skips": "not applicable",
}


def test_outcomes_and_differences_are_reported(tmp_path, monkeypatch):
    (tmp_path / "test_small.py").write_text(TESTS)
    rows = {"small": ("test_small", ("TestOne",), upstream.ALL, False)}
    monkeypatch.setattr(upstream, "ROWS", rows)
    results = {}
    with upstream.servers(str(tmp_path)) as started:
        for only, seconds in (("^(?!.*hangs)", 100), ("hangs", 1)):
            assert list(upstream.run(started, "small", only, seconds, results))
    outcomes = {
        test.removeprefix("TestOne.test_"): {m: upstream.judged(test, o) for m, o in found.items()}
        for test, found in results["small"].items()
    }
    assert outcomes.pop("depends") == {"alone": "passed", "guarded": "failed"}
    assert outcomes == {name: dict.fromkeys(upstream.MODES, word) for name, word in WANTED.items()}
    assert upstream.differences(results) == [
        "small: TestOne.test_depends: alone passed, guarded failed"
    ]
    assert "| small (`test_small.py`) | alone | 2 | 2 | 1 | 2 |" in upstream.table(results)
