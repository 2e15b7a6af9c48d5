# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Credentials by MUNGE: the daemon of each machine vouches for the user id of its local clients.

The daemons share a key. Linux tells a daemon the user id of its client, so a client needs no
password. A credential is encrypted, and each daemon decodes it only for a client with the user id
``reader``. Debian's package ``munge`` contains the daemon and ``libmunge``. Only brokers and
servers of a cluster load this library.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from functools import cache
from typing import Any, Iterator

from .identity import LIFETIME, CheckedCredential, bad, cannot

LIBRARY = "libmunge.so.2"

# From munge.h: options of a context, and a cipher.
_CIPHER, _TTL, _SOCKET, _ONLY_UID = 0, 4, 8, 9
_AES128 = 4

#: By error number (see munge.h), for the errors that mean a bad credential: what is wrong with it.
_BAD = {
    8: "its format is wrong",
    9: "its version is unknown",
    14: "it was changed, or the machines do not share a key",
    15: "it is too old, or the clocks of the machines differ",
    16: "its time is in the future: the clocks of the machines differ",
    17: "it was used before",
    18: "it is for another user",
}
_INSTALL = "Install Debian's package munge, and start munged with the cluster's key."


class Munge:
    """Makes and checks credentials with the help of this machine's daemon.

    Parameters
    ----------
    socket:
        The daemon's socket; "" for the default socket of the library.
    reader:
        The user id that may check the credentials made here: the user id of the brokers.
    """

    def __init__(self, socket: str = "", *, reader: int = 0) -> None:
        self._socket, self._reader = socket, reader

    def seal(self, text: str) -> str:
        """Return a credential with ``text``, made by the user of this process."""
        data, found = text.encode(), ctypes.c_void_p()
        with self._context() as (lib, context):
            for option, value in ((_CIPHER, _AES128), (_TTL, LIFETIME), (_ONLY_UID, self._reader)):
                _set(lib, context, option, ctypes.c_int(value))
            error = lib.munge_encode(ctypes.byref(found), context, data, len(data))
            try:
                if error:
                    raise cannot(
                        f"MUNGE could not make a credential: {_words(lib, context, error)}.",
                        _INSTALL,
                    )
                return ctypes.string_at(found.value or 0).decode()
            finally:
                _free(found)

    def check(self, credential: str) -> CheckedCredential:
        """Return who made a credential, and its text. MUNGE refuses a second use."""
        data, size = ctypes.c_void_p(), ctypes.c_int()
        uid, gid = ctypes.c_uint(), ctypes.c_uint()
        with self._context() as (lib, context):
            error = lib.munge_decode(
                credential.encode(), context, ctypes.byref(data), ctypes.byref(size),
                ctypes.byref(uid), ctypes.byref(gid),
            )  # fmt: skip
            try:
                if error in _BAD:
                    raise bad(_BAD[error], "Try again: each request makes a new credential.")
                if error:
                    raise cannot(
                        f"MUNGE could not check a credential: {_words(lib, context, error)}.",
                        _INSTALL,
                    )
                raw = ctypes.string_at(data.value, size.value) if data.value else b""
            finally:
                _free(data)
        return CheckedCredential(uid.value, raw.decode(errors="replace"))

    @contextmanager
    def _context(self) -> Iterator[tuple[Any, Any]]:
        lib = _library()
        context = ctypes.c_void_p(lib.munge_ctx_create())
        try:
            if self._socket:
                _set(lib, context, _SOCKET, ctypes.c_char_p(self._socket.encode()))
            yield lib, context
        finally:
            lib.munge_ctx_destroy(context)


def _set(lib: Any, context: Any, option: int, value: Any) -> None:
    """Set an option, or raise an error.

    Without the option, a credential might not be encrypted for its reader.
    """
    error = lib.munge_ctx_set(context, option, value)
    if error:
        raise cannot(f"MUNGE cannot be set up: {_words(lib, context, error)}.", _INSTALL)


def _words(lib: Any, context: Any, error: int) -> str:
    text = lib.munge_ctx_strerror(context) or lib.munge_strerror(error)
    return (text or b"").decode(errors="replace") or f"error {error}"


@cache
def _libc() -> Any:
    lib = ctypes.CDLL(None)
    lib.free.argtypes = [ctypes.c_void_p]
    return lib


def _free(pointer: ctypes.c_void_p) -> None:
    _libc().free(pointer)


@cache
def _library() -> Any:
    try:
        lib = ctypes.CDLL(LIBRARY)
    except OSError:
        raise cannot(f"This machine has no {LIBRARY}, which makes credentials.", _INSTALL) from None
    lib.munge_ctx_create.restype = ctypes.c_void_p
    lib.munge_ctx_strerror.restype = ctypes.c_char_p
    lib.munge_strerror.restype = ctypes.c_char_p
    return lib
