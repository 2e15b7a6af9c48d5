# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The pool's part of ``/metrics``: this server's kernels only, in Prometheus' base units.

The metrics are in Prometheus' default registry. Jupyter Server serves this registry. Each snapshot
sets the gauges. The histograms contain figures from the broker's journal since this server began to
watch.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Iterable, Mapping

from prometheus_client import Gauge

from ..durations import Durations

UP = Gauge("jupyter_gpupool_broker_up", "1 if the GPU pool broker answered when last asked")
SESSIONS = Gauge("jupyter_gpupool_sessions", "Pooled GPU kernels of this server", ["state"])
GRANTED = Gauge(
    "jupyter_gpupool_granted_bytes",
    "Device memory granted to kernels of this server",
    ["device", "state"],
)
USED = Gauge(
    "jupyter_gpupool_used_bytes",
    "Device memory used by kernels of this server, as last measured",
    ["device", "state"],
)
SUSPENDED = Gauge(
    "jupyter_gpupool_suspended_bytes",
    "Suspended GPU state of this server's kernels in host memory",
    ["state"],
)
DURATIONS = Durations("jupyter_gpupool_")

ALL = (UP, SESSIONS, GRANTED, USED, SUSPENDED, *DURATIONS.all)


def show(sessions: Iterable[Mapping[str, Any]]) -> None:
    """Set the gauges to the sums over these sessions, and drop all earlier values."""
    counts: dict[str, int] = defaultdict(int)
    suspended: dict[str, int] = defaultdict(int)
    granted: dict[tuple[str, str], int] = defaultdict(int)
    used: dict[tuple[str, str], int] = defaultdict(int)
    for session in sessions:
        state = session["state"]
        counts[state] += 1
        suspended[state] += session.get("suspended_bytes") or 0
        for piece in session.get("slices") or ():
            granted[piece["device"], state] += piece["granted_bytes"]
            if piece["used_bytes"] is not None:  # a value that was not measured is not zero
                used[piece["device"], state] += piece["used_bytes"]
    for gauge, by_state in ((SESSIONS, counts), (SUSPENDED, suspended)):
        gauge.clear()
        for state, value in by_state.items():
            gauge.labels(state).set(value)
    for gauge, by_device in ((GRANTED, granted), (USED, used)):
        gauge.clear()
        for (device, state), amount in by_device.items():
            gauge.labels(device, state).set(amount)


def observe(row: Mapping[str, Any]) -> None:
    """Add a journal row about a kernel of this server to the histograms."""
    DURATIONS.observe(
        str(row.get("kind")), row.get("device") or "", row.get("seconds"), row.get("detail", {})
    )
