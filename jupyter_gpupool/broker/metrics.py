# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Switches the metrics of the whole pool on and off, by ``c.GPUPool.metrics_port``.

While metrics are off, the broker does not import ``figures`` and counts nothing. While they are on,
figures come from the pool's accounts and from each row of the journal, and the broker serves them
on loopback.
"""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING

from .configuration import Configuration
from .core import Core
from .gpu.monitor import Monitor
from .gpu.samples import Samples

if TYPE_CHECKING:
    from .figures import Endpoint, Figures


class Metrics:
    """The metrics of one broker. ``port`` is the port that serves them, or 0 if none does."""

    def __init__(
        self,
        core: Core,
        samples: Samples,
        monitor: Monitor,
        configuration: Configuration,
        log: logging.Logger,
    ) -> None:
        self.port = 0
        self._core = core
        self._samples = samples
        self._monitor = monitor
        self._configuration = configuration
        self._log = log
        self._served: tuple[Figures, Endpoint] | None = None

    def configure(self) -> None:
        """Serve the metrics at the configured port, or nowhere if no port is configured.

        Another process may use the configured port, for example if several users' own brokers read
        the same machine-wide configuration. The broker then logs this and continues to run, because
        kernels do not depend on metrics. If the broker served the metrics at another port before,
        it still serves them at that port. The next call of this method tries the configured port
        again.
        """
        port = self._configuration.settings.metrics_port
        if port and port != self.port:
            self._open(port)
        elif self.port and not port:
            self.close()
            self._log.info("Metrics are no longer served")
        self._monitor.sample_for_metrics(self.port != 0)

    def _open(self, port: int) -> None:
        from .figures import Endpoint, Figures

        before = self._served
        figures = (
            before[0]
            if before is not None
            else Figures(self._core, self._samples, self._log, node=self._node())
        )
        try:
            endpoint = Endpoint(port, figures.page, self._log)
        except OSError as error:
            self._log.error(
                "c.GPUPool.metrics_port: port %d of 127.0.0.1 cannot be used (%s). The pool goes "
                "on, and metrics are served %s. Free the port or set another one, and then reload "
                "the configuration.",
                port, error.strerror, f"at port {self.port} as before" if self.port else "nowhere",
            )  # fmt: skip
            return
        if before is not None:
            before[1].close()
        else:
            figures.start()
        self._served, self.port = (figures, endpoint), port
        self._log.info("Metrics for every user of this machine: http://127.0.0.1:%d/metrics", port)

    def _node(self) -> str:
        """Return the name of this machine in its cluster; "" if it is in no cluster."""
        settings = self._configuration.settings
        name = settings.cluster_node or socket.gethostname()
        return name if settings.cluster_nodes else ""

    def close(self) -> None:
        """Stop serving and counting."""
        if self._served is not None:
            figures, endpoint = self._served
            endpoint.close()
            figures.stop()
        self._served, self.port = None, 0
