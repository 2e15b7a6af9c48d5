# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The choice of ``c.GPUPool.cluster_identity``."""

from __future__ import annotations

from .identity import Authenticator


def authenticator(configured: str, *, reader: int) -> Authenticator | None:
    """Return what checks credentials, as configured; None if this machine takes none.

    ``reader`` is the user id of the brokers, which alone may read credentials.
    """
    if not configured:
        return None
    if configured.startswith(("http://", "https://")):
        from .hub_tokens import HubTokens

        return HubTokens(configured)
    from .munge import Munge

    return Munge(configured.partition(":")[2], reader=reader)
