# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Histograms: how long kernels wait for a slice, and how long the moves of their state take.

The broker and each server publish these histograms.
"""

from __future__ import annotations

from typing import Any, Mapping

from prometheus_client import REGISTRY, CollectorRegistry, Histogram

_WAITS = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_MOVES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Durations:
    """Three histograms, each with one series per device. Their names begin with ``prefix``."""

    def __init__(self, prefix: str, registry: CollectorRegistry = REGISTRY) -> None:
        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(
                f"{prefix}{name}_seconds", what, ["device"], buckets=buckets, registry=registry
            )

        self.wait = histogram(
            "wait", "Time from a request to its slice, with restored state", _WAITS
        )
        self.suspend = histogram(
            "suspend", "Time to move a kernel's state from a device to host memory", _MOVES
        )
        self.resume = histogram("resume", "Time to bring a kernel's state back to a device", _MOVES)
        self.all = (self.wait, self.suspend, self.resume)

    def observe(
        self, kind: str, device: str, seconds: float | None, detail: Mapping[str, Any]
    ) -> None:
        """Add a journal row of kind attach, suspend or resume; ignore rows of any other kind."""
        if seconds is None:
            return
        if kind in ("attach", "resume"):
            self.wait.labels(device).observe(seconds)
        if kind == "resume":
            self.resume.labels(device).observe(detail.get("driver_seconds", 0.0))
        elif kind == "suspend":
            self.suspend.labels(device).observe(seconds)
