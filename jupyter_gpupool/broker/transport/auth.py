# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Identify the peer of a connection, and check what that user may see and do.

Identity comes from the operating system (``SO_PEERCRED``), never from a message. Only
a session's token in a message proves more: that the session was opened for the sender.
"""

from __future__ import annotations

import pwd
import socket
import struct
from dataclasses import dataclass
from functools import lru_cache

from ...errors import Code, RefusedError
from ...pool.model import Owner

_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that made a connection, as it was at that moment."""

    pid: int
    uid: int
    gid: int


def peer_of(connection: socket.socket) -> Peer:
    """Return the peer of a connected unix socket."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Peer(*_CREDENTIALS.unpack(raw))


# Names come from NSS, which may ask the network.
@lru_cache(maxsize=4096)
def owner_of(uid: int) -> Owner:
    """Return the user; a user id without an account is its own name."""
    try:
        return Owner(pwd.getpwuid(uid).pw_name)
    except KeyError:
        return Owner(f"uid-{uid}")


@dataclass(frozen=True, slots=True)
class Access:
    """The rules, for one broker.

    Attributes
    ----------
    machine_wide:
        Serve every user of the machine; otherwise only ``own_uid`` and root.
    own_uid:
        The broker's own user.
    admins:
        Names of users who may see and release every session.
    """

    machine_wide: bool
    own_uid: int
    admins: tuple[str, ...] = ()

    def check_connect(self, peer: Peer) -> None:
        """Refuse a user whom this broker does not serve.

        Raises
        ------
        RefusedError
            With code ``not-served``.
        """
        if self.machine_wide or peer.uid in (0, self.own_uid):
            return
        raise RefusedError(
            f"This broker serves only user id {self.own_uid}, and you are {peer.uid}.",
            code=Code.NOT_SERVED,
            next_step="Unset GPUPOOL_SOCKET to use your own broker.",
        )

    def is_admin(self, peer: Peer) -> bool:
        """Return whether the peer may see and release every session."""
        return peer.uid in (0, self.own_uid) or (
            bool(self.admins) and owner_of(peer.uid).name in self.admins
        )

    def may_act(self, peer: Peer, uid: int) -> bool:
        """Return whether the peer may see and change the sessions of user ``uid``."""
        return peer.uid == uid or self.is_admin(peer)
