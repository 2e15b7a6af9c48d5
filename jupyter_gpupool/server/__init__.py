# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The Jupyter Server extension: one server's view of the pool for its user interface.

- ``views``: pure; the part of a snapshot that this server shows, and the changes between two
  snapshots.
- ``machines``: pure; the machines of the cluster, from the broker's answer.
- ``broker_link``: the one connection to the broker.
- ``watch``: keeps the newest view while somebody needs it; publishes events, metrics and idle
  warnings.
- ``remote_kernels``: this server's kernels on other machines of a cluster.
- ``kernel_history``: pure; figures from the snapshots of the last minutes, and totals.
- ``server_metrics``: the pool's part of ``/metrics``.
- ``handlers``, ``stream``: REST and websocket under ``/gpupool/api``; ``openapi`` has their
  description.
- ``admin_routes``: REST for admins of the pool: all sessions, and orders about them.
- ``page_config``: what JupyterLab's pages know about the GPU before their first request.
- ``extension``: adds all these parts to the server.

Importing this package imports none of these modules.
"""

from __future__ import annotations

from typing import Any


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    """Return the extension. The server calls this in each package that its configuration names."""
    from .extension import GPUPoolExtension

    return [{"module": "jupyter_gpupool.server", "app": GPUPoolExtension}]
