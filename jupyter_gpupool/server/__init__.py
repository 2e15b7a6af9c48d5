# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The Jupyter Server extension: the pool as one server shows it to its user interface.

- ``views``: pure; what of a snapshot may be shown here, and what changed between two.
- ``broker_link``: the one connection to the broker.
- ``watch``: keeps the newest view while it is needed; events, metrics, idle warnings.
- ``kernel_history``: pure; what the snapshots showed in the last minutes, and in all.
- ``server_metrics``: what ``/metrics`` shows.
- ``handlers``, ``stream``: REST and the websocket under ``/gpupool/api``; ``openapi``: what it is.
- ``page_config``: what JupyterLab's pages know before they ask.
- ``extension``: puts them into the server.

Importing this package imports nothing else.
"""

from __future__ import annotations

from typing import Any


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    """Return the extension. Called by the server, which the installation has told of it."""
    from .extension import GPUPoolExtension

    return [{"module": "jupyter_gpupool.server", "app": GPUPoolExtension}]
