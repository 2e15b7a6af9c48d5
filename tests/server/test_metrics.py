# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Names, units and values of the metrics, and the dashboard that shows them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, generate_latest

from jupyter_gpupool.server import server_metrics as metrics
from tests import promql

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "jupyter-gpupool.json"


def value(name, **labels):
    return REGISTRY.get_sample_value(f"jupyter_gpupool_{name}", labels)


def families():
    """Return our metrics in Prometheus's registry, as a dict: name -> names of its samples."""
    found = {}
    for family in REGISTRY.collect():
        if family.name.startswith("jupyter_gpupool_"):
            suffixes = ("_bucket", "_sum", "_count") if family.type == "histogram" else ("",)
            found[family.name] = {family.name + suffix for suffix in suffixes}
    return found


@pytest.fixture
def clean():
    yield
    metrics.show([])


def piece(device, granted, used):
    return {"device": device, "granted_bytes": granted, "used_bytes": used}


def test_gauges_are_split_by_device_and_state(clean):
    metrics.show(
        [
            {"state": "idle", "slices": [piece("A", 100, 60)]},
            {"state": "idle", "slices": [piece("A", 50, 5)]},
            {"state": "active", "slices": [piece("A", 60, None), piece("B", 20, 3)]},
            {"state": "detached", "slices": [], "suspended_bytes": 7},
        ]
    )
    assert value("granted_bytes", device="A", state="idle") == 150
    assert value("granted_bytes", device="B", state="active") == 20, "not equal parts"
    assert value("used_bytes", device="B", state="active") == 3
    assert value("used_bytes", device="A", state="idle") == 65
    assert value("used_bytes", device="A", state="active") is None, "unknown is not zero"
    assert value("suspended_bytes", state="detached") == 7
    assert value("sessions", state="idle") == 2
    metrics.show([])
    assert value("sessions", state="idle") is None
    assert value("granted_bytes", device="A", state="idle") is None


def test_histograms_use_the_seconds_in_the_journal():
    def count(name):
        return value(f"{name}_seconds_count", device="H") or 0

    before = [count(name) for name in ("wait", "suspend", "resume")]
    for row in (
        {"kind": "attach", "device": "H", "seconds": 3.0},
        {"kind": "resume", "device": "H", "seconds": 4.0, "detail": {"driver_seconds": 0.5}},
        {"kind": "suspend", "device": "H", "seconds": 0.25},
        {"kind": "state", "device": "H", "seconds": None},
    ):
        metrics.observe(row)
    after = [count(name) for name in ("wait", "suspend", "resume")]
    assert [b - a for a, b in zip(before, after, strict=True)] == [2, 1, 1]
    assert value("wait_seconds_sum", device="H") == 7.0
    assert value("resume_seconds_sum", device="H") == 0.5
    assert value("suspend_seconds_sum", device="H") == 0.25


def test_names_and_units_follow_prometheus():
    found = families()
    assert len(found) == len(metrics.ALL)
    for name in found:
        assert re.fullmatch(r"jupyter_gpupool_[a-z_]+", name)
        kind = name.removeprefix("jupyter_gpupool_")
        assert kind.endswith(("_bytes", "_seconds")) or kind in ("sessions", "broker_up")
    text = generate_latest(REGISTRY).decode()
    for name in found:
        assert f"# HELP {name} " in text


def test_dashboard_uses_only_existing_metrics(clean):
    board = json.loads(DASHBOARD.read_text())
    gauge = [{"state": "idle", "slices": [piece("A", 1, 1)], "suspended_bytes": 1}]
    metrics.show(gauge)
    named = promql.check(board, promql.exported(REGISTRY))
    known = families()
    for name, samples in known.items():
        assert named & samples, f"no panel shows {name}"
    for panel in board["panels"]:
        unit = panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            if "_bytes" in target["expr"]:
                assert unit == "bytes"
            elif "_seconds" in target["expr"]:
                assert unit == "s"
    assert len({p["id"] for p in board["panels"]}) == len(board["panels"])
