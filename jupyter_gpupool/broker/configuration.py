# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The configuration in force. Every part reads it here, so that a reload reaches all at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Sequence

from traitlets.config import Config

from ..config import BrokerSettings, load_settings, needs_restart
from ..config.differences import shown
from ..endpoint import find_socket
from .transport.auth import Access, Peer
from .transport.listener import is_machine_wide


class Configuration:
    """The admin's configuration, and the values that follow from it for this broker.

    Parameters
    ----------
    files, overrides:
        See :func:`jupyter_gpupool.config.load_settings`.
    socket:
        Overrules the configuration; "" leaves it to :func:`jupyter_gpupool.endpoint.find_socket`.

    Raises
    ------
    GPUPoolError
        If the configuration is wrong.
    """

    def __init__(
        self, files: Sequence[Path] = (), overrides: Config | None = None, socket: str = ""
    ) -> None:
        self._files = [*files]
        self._overrides = overrides
        self.settings: BrokerSettings = load_settings(self._files, overrides)
        self.socket = Path(socket) if socket else find_socket(self.settings.socket)
        #: Whether this broker serves every user of the machine.
        self.machine_wide = is_machine_wide(self.socket)
        self.access = self._access()

    def reload(self) -> tuple[str, ...]:
        """Read the files again; return the options that change only at the next start.

        Raises
        ------
        GPUPoolError
            If the configuration is wrong; then nothing has changed.
        """
        new = load_settings(self._files, self._overrides)
        late = needs_restart(self.settings, new)
        self.settings = new
        self.access = self._access()
        return late

    def shown(self, peer: Peer) -> dict[str, Any]:
        """Return the configuration in force as ``peer`` may see it; a server may read another."""
        return shown(self.settings, private=self.access.is_admin(peer))

    def _access(self) -> Access:
        return Access(self.machine_wide, os.geteuid(), self.settings.admins)
