# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The Jupyter Server extension: one server's view of the pool for its user interface.

- ``views``: pure; the part of a snapshot to show here, and the changes between two.
- ``machines``: pure; the machines of the cluster, from the answer of the broker.
- ``broker_link``: the one connection to the broker.
- ``watch``: keeps the newest view while it is needed; events, metrics, idle warnings.
- ``remote_kernels``: this server's kernels on other machines of a cluster.
- ``kernel_history``: pure; figures of the snapshots in the last minutes, and totals.
- ``server_metrics``: the pool's part of ``/metrics``.
- ``handlers``, ``stream``: REST and websocket under ``/gpupool/api``; ``openapi`` describes them.
- ``admin_routes``: REST for admins of the pool: all sessions, and orders about them.
- ``page_config``: what JupyterLab's pages know before their first request.
- ``extension``: adds all of them to the server.

Importing this package imports nothing else.
"""

from __future__ import annotations

from typing import Any


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    """Return the extension. The server calls this; its configuration names this package."""
    from .extension import GPUPoolExtension

    return [{"module": "jupyter_gpupool.server", "app": GPUPoolExtension}]
