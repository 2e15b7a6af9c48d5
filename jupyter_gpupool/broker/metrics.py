# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Switches the metrics of the whole pool on and off, by ``c.GPUPool.metrics_port``.

Off, nothing of ``figures`` and ``scrape`` is imported and nothing is counted. On, figures come from
the pool's accounts and from each row of the journal, and are served on loopback.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..config import BrokerSettings
from .gpu.actions import DeviceEffects
from .runner import Runner
from .store.journal import Row

if TYPE_CHECKING:
    from .figures import Figures
    from .scrape import Endpoint


class Metrics:
    """The metrics of one broker. ``port`` is where they are served; 0: nowhere."""

    def __init__(self, runner: Runner, effects: DeviceEffects, log: logging.Logger) -> None:
        self.port = 0
        self._runner = runner
        self._effects = effects
        self._log = log
        self._figures: Figures | None = None
        self._endpoint: Endpoint | None = None
        #: Who is shown each row besides us.
        self._others = runner.on_row

    def configure(self, settings: BrokerSettings) -> None:
        """Serve as configured from now on.

        A port that cannot be had is logged and no more: kernels do not depend on being measured,
        and every user's own broker may read the same machine-wide configuration. What was served
        before, is still. The next call tries again.
        """
        if settings.metrics_port != self.port:
            if settings.metrics_port:
                self._open(settings.metrics_port)
            else:
                self.close()
                self._log.info("Metrics are no longer served")

    def _open(self, port: int) -> None:
        from .figures import Figures
        from .scrape import Endpoint

        figures = self._figures or Figures(self._runner, self._effects)
        try:
            endpoint = Endpoint(port, figures.page, self._log)
        except OSError as error:
            self._log.error(
                "c.GPUPool.metrics_port: port %d of 127.0.0.1 cannot be used (%s); the pool goes "
                "on, and metrics are served %s. Free the port or set another one, then reload.",
                port, error.strerror, f"at port {self.port} as before" if self.port else "nowhere",
            )  # fmt: skip
            return
        if self._endpoint is not None:
            self._endpoint.close()
        if self._figures is None:
            self._figures = figures
            figures.start()
            self._others, self._runner.on_row = self._runner.on_row, self._row
        self._endpoint, self.port = endpoint, port
        self._log.info("Metrics for every user of this machine: http://127.0.0.1:%d/metrics", port)

    def close(self) -> None:
        """Serve and count no more."""
        if self._endpoint is not None:
            self._endpoint.close()
        if self._figures is not None:
            self._figures.stop()
            self._runner.on_row = self._others
        self._endpoint = self._figures = None
        self.port = 0

    def _row(self, row: Row) -> None:
        self._others(row)
        assert self._figures is not None
        try:
            self._figures.observe(row)
        except Exception:  # no figure is worth a slice
            self._log.exception("A row of the journal was not counted in the metrics")
