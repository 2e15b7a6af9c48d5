# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Make the authenticator that ``c.GPUPool.cluster_identity`` chooses."""

from __future__ import annotations

from .identity import Authenticator


def authenticator(configured: str, *, reader: int) -> Authenticator | None:
    """Return the configured authenticator; None if this machine accepts no credentials.

    ``reader`` is the user id of the brokers. With MUNGE, only this user can read credentials.
    """
    if not configured:
        return None
    if configured.startswith(("http://", "https://")):
        from .hub_tokens import HubTokens

        return HubTokens(configured)
    from .munge import Munge

    return Munge(configured.partition(":")[2], reader=reader)
