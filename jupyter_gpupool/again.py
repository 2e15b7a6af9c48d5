# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Open a session and tell its process, although the broker may die between any two steps.

Used by the two that start kernels, the provisioner and the launcher. Standard library only.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Callable

from .client import Client
from .errors import BrokerUnavailable, Code
from .protocol import Message
from .startrecord import START_TIMEOUT


class ClientAgain:
    """A connection that is made again, with the call under way, when the broker has died.

    Every call made here may reach two brokers: ``open`` leaves a session that no process enters,
    which the broker ends by itself, and the others may be repeated.

    Parameters
    ----------
    find:
        Returns the socket of a living broker; starts one that has died. Raises BrokerUnavailable.
    timeout:
        Seconds for one call, the starts of brokers included.
    """

    def __init__(self, find: Callable[[], Path], *, timeout: float = START_TIMEOUT) -> None:
        self._find = find
        self._timeout = timeout
        self._client: Client | None = None
        #: Where the broker is that answered last.
        self.path: Path | None = None

    def call(self, kind: str, /, **fields: Any) -> Message:
        """Send a request and return its answer.

        Raises
        ------
        RefusedError
            If the broker answers with an error.
        BrokerUnavailable
            If no broker can be started, or none lives long enough to answer.
        """
        give_up = time.monotonic() + self._timeout
        while True:
            client = self._client
            if client is None:
                client = self._connect(give_up)
            try:
                return client.call(kind, **fields)
            except BrokerUnavailable:
                # A broker that lives and is silent would be as silent again.
                if not client.closed or time.monotonic() > give_up:
                    raise
                self.close()

    def close(self) -> None:
        """End the connection. The next call makes another."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connect(self, give_up: float) -> Client:
        while True:
            self.path = self._find()
            try:
                self._client = Client(self.path)
                return self._client
            except BrokerUnavailable as error:
                # It died after it was found.
                if error.code == Code.BAD_SOCKET or time.monotonic() > give_up:
                    raise
