# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Find out which user has made a connection, and what this user may see and do.

The operating system names the peer (``SO_PEERCRED``). If the peer is in a container, the socket to
which it connects shows the user (``usersockets``). The broker believes no user name in a message.
In addition, a message may contain a session's token, which proves that the session was opened for
the sender.
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


#: A user id of this machine, or a name. A peer that came through a user's own socket has the name
#: of that user, because a user id in a container does not name a user of the machine.
User = int | str


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that made a connection, as it was at that moment.

    ``pid`` is the process id in the broker's PID namespace. The process may have another id in its
    own namespace.
    """

    pid: int
    uid: User
    gid: int


def peer_of(connection: socket.socket, user: str = "") -> Peer:
    """Return the peer of a connected unix socket.

    ``user`` is the user to whom the socket belongs; "" if the socket is for all users.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return Peer(pid, user or uid, gid)


def shown(user: User) -> str:
    """Return the user as text for messages to people."""
    return f"User id {user}" if isinstance(user, int) else f"User {user}"


# NSS may ask the network for the names, so this function caches them.
@lru_cache(maxsize=4096)
def owner_of(uid: User) -> Owner:
    """Return the user as an owner. Without an account, the name is ``uid-`` and the user id."""
    if isinstance(uid, str):
        return Owner(uid)
    try:
        return Owner(pwd.getpwuid(uid).pw_name)
    except KeyError:
        return Owner(f"uid-{uid}")


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of one broker about what users may do.

    Attributes
    ----------
    machine_wide:
        Whether the broker serves every user of the machine. If not, it serves only ``own_uid`` and
        root.
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

    def may_act(self, peer: Peer, uid: User) -> bool:
        """Return whether the peer may see and change the sessions of user ``uid``."""
        return peer.uid == uid or self.is_admin(peer)
